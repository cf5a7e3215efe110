"""What happens to a serving cluster when hosts, links, supervisors or the control machine go."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from clusters import SERVE, Stream, ask, assert_nothing_left, cluster, health, phalanx, up, wait_for

PROMPT = "What is phalanx?"
TOKENS = 300


def ready(hosts) -> bool:
    return health(hosts).get("status") == "ok"


def down_because(hosts, word: str) -> bool:
    found = health(hosts)
    return found.get("status") not in (None, "ok") and word in found.get("reason", "")


def test_a_host_cut_off_is_named_and_streams_go_on_when_it_is_back(hosts):
    with cluster(hosts, 2, "ring") as url:
        whole = ask(hosts["desk"], url, PROMPT, TOKENS)
        stream = Stream(hosts["desk"], url, PROMPT, TOKENS)
        begun = stream.piece()
        assert begun
        hosts["b"].cut()
        assert wait_for(lambda: down_because(hosts, "b"), "/health names the host") < 5.0
        status = phalanx(hosts["desk"], "status", "2.json", check=False)
        assert status.returncode != 0
        assert "b" in status.stdout and "unreachable" in status.stdout
        hosts["b"].mend()
        assert wait_for(lambda: ready(hosts), "it serves again") < 15.0 + 10.0  # and the time to load
        assert begun + stream.text() == whole


def test_a_rank_that_is_killed_comes_back(hosts):
    with cluster(hosts, 2, "ring") as url:
        whole = ask(hosts["desk"], url, PROMPT, TOKENS)
        stream = Stream(hosts["desk"], url, PROMPT, TOKENS)
        begun = stream.piece()
        assert begun
        (pid,) = hosts["b"].processes("phalanx rank")
        hosts["b"].run(["kill", "-KILL", str(pid)])
        assert begun + stream.text() == whole
        assert health(hosts)["restarts"] == 1


def test_a_server_that_is_killed_comes_back(hosts):
    with cluster(hosts, 2, "ring") as url:
        (pid,) = hosts["a"].processes("phalanx serve")
        hosts["a"].run(["kill", "-KILL", str(pid)])
        wait_for(lambda: not ready(hosts), "it is gone")
        wait_for(lambda: ready(hosts), "it serves again")
        assert ask(hosts["desk"], url)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_supervisor_that_is_killed_takes_nothing_with_it(hosts, name):
    with cluster(hosts, 2, "ring") as url:
        (pid,) = hosts[name].processes("host supervise")
        hosts[name].run(["kill", "-KILL", str(pid)])
        assert ask(hosts["desk"], url)
        assert "its supervisor is gone" in phalanx(hosts["desk"], "status", "2.json").stdout


def test_an_agent_that_is_killed_comes_back(hosts):
    with cluster(hosts, 2, "ring") as url:
        (pid,) = hosts["b"].processes("phalanx agent")
        hosts["b"].run(["kill", "-KILL", str(pid)])
        wait_for(lambda: not ready(hosts), "the group is down")
        wait_for(lambda: ready(hosts), "it serves again")
        assert ask(hosts["desk"], url)


def test_a_host_that_is_killed_is_named_and_restart_brings_it_back(hosts):
    up(hosts, 2, "ring")
    hosts["b"].kill()
    assert wait_for(lambda: down_because(hosts, "b"), "/health names the host") < 5.0
    begun = time.monotonic()
    status = phalanx(hosts["desk"], "status", "2.json", check=False)
    assert time.monotonic() - begun < 5.0 + 4.0  # and the time to begin, where many processes share two processors
    assert status.returncode != 0 and "b" in status.stdout and "host-unreachable" in status.stdout
    assert f"(not ready since {health(hosts)['since']})" in status.stdout
    hosts["b"].boot()
    phalanx(hosts["desk"], "restart", "2.json")
    assert ask(hosts["desk"], f"http://{hosts['a'].address}:8000/v1")
    phalanx(hosts["desk"], "down", "2.json")


def test_a_host_that_does_not_come_is_waited_for_and_named_by_all(hosts):
    """`up` ends in time and says who is missing; `/health` and `status` go on saying so, and since when."""
    words = ("up", "2.json", "--backend", "ring", "--timeout", "8", "--skip-checks", "--", *SERVE)
    hosts["a"].run(["ip", "route", "add", "unreachable", hosts["b"].address])
    try:
        begun = time.time()
        late = phalanx(hosts["desk"], *words, check=False)
        assert late.returncode != 0 and time.time() - begun < 30
        said = " ".join(late.stderr.split())
        assert "Not healthy after 8 s: The agent of b at 10.77.0.2" in said and "It goes on starting" in said
        found = health(hosts)
        assert found["status"] == "starting" and "The agent of b" in found["reason"] and found["restarts"] == 0
        assert int(begun) <= datetime.fromisoformat(found["since"]).timestamp() < begun + 30
        status = phalanx(hosts["desk"], "status", "2.json", check=False)
        assert status.returncode != 0
        assert "The agent of b" in status.stdout and f"(not ready since {found['since']})" in status.stdout
    finally:
        hosts["a"].run(["ip", "route", "del", "unreachable", hosts["b"].address])
    wait_for(lambda: ready(hosts), "it serves once the host is there")
    assert "since" not in health(hosts) and ask(hosts["desk"], f"http://{hosts['a'].address}:8000/v1")
    phalanx(hosts["desk"], "down", "2.json")
    assert_nothing_left(hosts)


def test_serving_does_not_need_the_machine_it_was_started_from(hosts):
    with cluster(hosts, 2, "ring") as url:
        hosts["desk"].kill()
        assert ask(hosts["c"], url)
        hosts["desk"].boot()


def test_ssh_lost_while_it_starts_is_no_harm(hosts):
    terminal = hosts["desk"].popen(
        ["phalanx", "up", "2.json", "--backend", "ring", "--skip-checks", "--", "demo", "--memory-guard-gb", "1"]
    )
    wait_for(lambda: bool(hosts["a"].processes("phalanx serve")), "the server has been started")
    hosts["desk"].cut()
    wait_for(lambda: ready_inside(hosts), "it serves all the same")
    time.sleep(0.2)
    hosts["desk"].mend()
    terminal.wait(60)
    phalanx(hosts["desk"], "down", "2.json")


def ready_inside(hosts) -> bool:
    done = hosts["a"].run(["curl", "-s", "-m", "2", "http://127.0.0.1:8000/health"], check=False)
    return '"status":"ok"' in done.stdout.replace(" ", "")


def test_an_mpi_group_is_started_again_from_the_first_host(hosts):
    with cluster(hosts, 2, "mpi") as url:
        (pid,) = hosts["b"].processes("phalanx rank")
        hosts["b"].run(["kill", "-KILL", str(pid)])
        wait_for(lambda: not ready(hosts), "the group is down")
        wait_for(lambda: ready(hosts), "it serves again")
        assert ask(hosts["desk"], url)
