"""What happens to a serving cluster when hosts, links, supervisors or the control machine go."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest
from clusters import SERVE, Stream, ask, assert_nothing_left, cluster, health, phalanx, wait_for
from rig import Host

PROMPT = "What is phalanx?"
TOKENS = 300


def ready(hosts) -> bool:
    return health(hosts).get("status") == "ok"


def down_because(hosts, word: str) -> bool:
    found = health(hosts)
    return found.get("status") not in (None, "ok") and word in found.get("reason", "")


def kill(host: Host, word: str) -> None:
    """The one process of a host with this in its command line."""
    (pid,) = host.processes(word)
    host.run(["kill", "-KILL", str(pid)])


def test_a_host_cut_off_is_named_and_streams_go_on_when_it_is_back(serving):
    hosts = serving.rig
    whole = ask(hosts["desk"], serving.url, PROMPT, TOKENS)
    stream = Stream(hosts["desk"], serving.url, PROMPT, TOKENS)
    begun = stream.piece()
    assert begun
    hosts["b"].cut()
    wait_for(lambda: down_because(hosts, "b"), "/health names the host")
    status = phalanx(hosts["desk"], "status", "2.json", check=False)
    assert status.returncode != 0
    assert "b" in status.stdout and "unreachable" in status.stdout
    hosts["b"].mend()
    wait_for(lambda: serving.ready, "it serves again")
    assert begun + stream.text() == whole


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_rank_that_is_killed_comes_back(serving, name):
    restarts = health(serving.rig)["restarts"]
    goes_on_without(serving, name, "phalanx rank")
    assert health(serving.rig)["restarts"] > restarts


def goes_on_without(serving, name: str, word: str) -> None:
    """A stream during which a process of a host is killed is whole."""
    hosts = serving.rig
    whole = ask(hosts["desk"], serving.url, PROMPT, TOKENS)
    stream = Stream(hosts["desk"], serving.url, PROMPT, TOKENS)
    begun = stream.piece()
    assert begun
    kill(hosts[name], word)
    assert begun + stream.text() == whole


def test_a_server_that_is_killed_comes_back(serving):
    kill(serving.rig["a"], "phalanx serve")
    wait_for(lambda: not serving.ready, "it is gone")
    wait_for(lambda: serving.ready, "it serves again")
    assert ask(serving.rig["desk"], serving.url)


def test_an_agent_that_is_killed_comes_back(serving):
    restarts = health(serving.rig)["restarts"]
    goes_on_without(serving, "b", "phalanx agent")
    assert health(serving.rig)["restarts"] > restarts


def test_serving_does_not_need_the_machine_it_was_started_from(serving):
    serving.rig["desk"].kill()
    try:
        assert ask(serving.rig["c"], serving.url)
    finally:
        serving.rig["desk"].boot()


def test_a_host_that_is_killed_is_named_and_restart_brings_it_back(serving):
    hosts = serving.rig
    hosts["b"].kill()
    wait_for(lambda: down_because(hosts, "b"), "/health names the host")
    status = phalanx(hosts["desk"], "status", "2.json", check=False)
    assert status.returncode != 0 and "b" in status.stdout and "host-unreachable" in status.stdout
    assert f"(not ready since {health(hosts)['since']})" in status.stdout
    hosts["b"].boot()
    phalanx(hosts["desk"], "restart", "2.json")
    assert ask(hosts["desk"], serving.url)


def test_supervisors_that_are_killed_take_nothing_with_them(serving):
    """`down` ends what they have left alone."""
    for gone, name in enumerate(("a", "b"), start=1):
        kill(serving.rig[name], "host supervise")
        assert ask(serving.rig["desk"], serving.url)
        assert phalanx(serving.rig["desk"], "status", "2.json").stdout.count("its supervisor is gone") == gone
    serving.end()


def test_a_host_that_does_not_come_is_waited_for_and_named_by_all(hosts):
    """`up` ends in time and says who is missing; `/health` and `status` go on saying so, and since when."""
    hosts["a"].run(["ip", "route", "add", "unreachable", hosts["b"].address])
    try:
        begun = time.time()
        words = ("up", "2.json", "--backend", "ring", "--skip-checks", "--timeout")
        late = phalanx(hosts["desk"], *words, "8", "--", *SERVE, check=False)
        if "The agent of b" not in late.stderr:  # the server of a busy machine has not come so far
            phalanx(hosts["desk"], "down", "2.json", check=False)
            late = phalanx(hosts["desk"], *words, "80", "--", *SERVE, check=False)
        said = " ".join(late.stderr.split())
        assert late.returncode != 0 and "It goes on starting" in said
        assert re.search(r"Not healthy after (8|80) s: The agent of b at 10\.77\.0\.2", said), said
        found = health(hosts)
        assert found["status"] == "starting" and "The agent of b" in found["reason"] and found["restarts"] == 0
        assert int(begun) <= datetime.fromisoformat(found["since"]).timestamp() <= time.time()
        status = phalanx(hosts["desk"], "status", "2.json", check=False)
        assert status.returncode != 0
        assert "The agent of b" in status.stdout and f"(not ready since {found['since']})" in status.stdout
    finally:
        hosts["a"].run(["ip", "route", "del", "unreachable", hosts["b"].address])
    wait_for(lambda: ready(hosts), "it serves once the host is there")
    assert "since" not in health(hosts) and ask(hosts["desk"], f"http://{hosts['a'].address}:8000/v1")
    phalanx(hosts["desk"], "down", "2.json")
    assert_nothing_left(hosts)


def test_ssh_lost_while_it_starts_is_no_harm(hosts):
    terminal = hosts["desk"].popen(
        ["phalanx", "up", "2.json", "--backend", "ring", "--skip-checks", "--", "demo", "--memory-guard-gb", "1"]
    )
    wait_for(lambda: bool(hosts["a"].processes("phalanx serve")), "the server has been started")
    hosts["desk"].cut()
    wait_for(lambda: ready_inside(hosts), "it serves all the same")
    time.sleep(0.2)
    hosts["desk"].mend()
    terminal.wait(240)
    phalanx(hosts["desk"], "down", "2.json")


def ready_inside(hosts) -> bool:
    done = hosts["a"].run(["curl", "-s", "-m", "2", "http://127.0.0.1:8000/health"], check=False)
    return '"status":"ok"' in done.stdout.replace(" ", "")


def test_an_mpi_group_is_started_again_from_the_first_host(hosts):
    with cluster(hosts, 2, "mpi") as url:
        kill(hosts["b"], "phalanx rank")
        wait_for(lambda: not ready(hosts), "the group is down")
        wait_for(lambda: ready(hosts), "it serves again")
        assert ask(hosts["desk"], url)
