"""Clusters of real hosts: up, used from elsewhere, looked at, down, and nothing left (L1, L3-L5)."""

from __future__ import annotations

import json

import pytest
from clusters import (
    SERVE,
    ask,
    assert_nothing_left,
    cluster,
    health,
    phalanx,
    state_files,
    up,
    variables_of,
    wait_for,
)
from rig import CHECKOUT

CHILD = "phalanx serve"


def test_a_cluster_of_four_serves_a_client_on_another_host_and_leaves_nothing(hosts):
    with cluster(hosts, 4, "mpi", "--env", "UCX_TLS=tcp") as url:
        check(hosts, 4, url)
        for host in (hosts[name] for name in "abcd"):
            started = variables_of(host, "phalanx rank")
            (rank,) = (variables for variables in started if "OMPI_COMM_WORLD_RANK" in variables)
            assert rank["UCX_TLS"] == "tcp"
            assert rank["PYTHONPATH"] == host.variables["PYTHONPATH"], "the host's own; none could hand it out"
            assert host.run(["stat", "-c", "%U %a %F", rank["TMPDIR"]]).stdout == "root 700 directory\n"
            session = "ompi." if host.name == "a" else "prted."  # of Open MPI; in /tmp others could have made it
            assert session in host.run(["ls", rank["TMPDIR"]]).stdout
            assert host.run(["sh", "-c", "ls -d /tmp/ompi* /tmp/prte* /tmp/mlx"], check=False).stdout == ""


def check(hosts, count: int, url: str) -> None:
    """It serves, its files are its owner's, and `status` shows it."""
    text = ask(hosts["desk"], url)
    assert "phalanx" in text.lower()
    ranks = health(hosts)["ranks"]
    assert [rank["host"] for rank in ranks] == ["a", "b", "c", "d"][:count]
    assert all(rank["mismatches"] == 0 for rank in ranks)
    for host in list(hosts.hosts.values())[1 : count + 1]:
        files = {file.name: file for file in (host.home / ".phalanx/run").iterdir()}
        assert files["credentials.json"].stat().st_mode & 0o077 == 0
        assert "PRIVATE" not in files["spec.json"].read_text()
    status = json.loads(phalanx(hosts["desk"], "status", f"{count}.json", "--json").stdout)
    assert [one["role"] for one in status.values()] == ["server"] + ["agent"] * (count - 1)
    table = phalanx(hosts["desk"], "status", f"{count}.json").stdout
    assert "ready" in table and table.count("rank runs") == count - 1


def test_the_example_of_two_hosts(hosts):
    done = hosts["desk"].run([str(CHECKOUT / "examples/two_hosts.sh"), "a", "b", "demo", *SERVE[3:]])
    (answer,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert "phalanx" in answer["choices"][0]["message"]["content"].lower()
    assert_nothing_left(hosts)


def test_a_cluster_of_two_serves_a_client_on_another_host(serving):
    """The end of `serving` sees that it leaves nothing."""
    check(serving.rig, 2, serving.url)


def test_logs_are_kept_per_rank(serving):
    desk, a, b = (serving.rig[name] for name in ("desk", "a", "b"))
    merged = phalanx(desk, "logs", "2.json").stdout
    assert "a rank 0: joining 2 ranks over ring" in merged and "b rank 1: joining 2 ranks" in merged
    alone = phalanx(desk, "logs", "2.json", "--rank", "1", "--lines", "3").stdout
    assert len(alone.splitlines()) == 3 and all(line.startswith("b ") for line in alone.splitlines())
    follower = desk.popen(["phalanx", "logs", "2.json", "-f", "--lines", "1"])
    assert follower.stdout is not None and follower.stdout.readline()
    follower.terminate()
    follower.wait(120)
    assert "rank 0" in (a.home / ".phalanx/logs/rank-0.log").read_text()
    assert "rank 1" in (b.home / ".phalanx/logs/rank-1.log").read_text()


def test_a_second_up_says_that_one_runs(serving):
    desk = serving.rig["desk"]
    again = phalanx(desk, "up", "2.json", "--", *SERVE, check=False)
    assert again.returncode != 0
    assert "A cluster is running already: a: " in again.stderr and "phalanx down" in again.stderr
    assert "port" not in again.stderr
    blind = phalanx(desk, "up", "2.json", "--skip-checks", "--", *SERVE, check=False)
    assert blind.returncode != 0 and "Something is running here already" in blind.stderr
    assert serving.ready


def test_restart_brings_the_same_back(serving):
    before = serving.rig["a"].processes(CHILD)
    phalanx(serving.rig["desk"], "restart", "2.json")
    after = serving.rig["a"].processes(CHILD)
    assert before and after and not set(before) & set(after)
    assert ask(serving.rig["desk"], serving.url)


def test_a_key_is_shown_to_nobody(hosts):
    """Neither by the processes of a host, nor in a file that others may read, nor in a log; `status` knows it. Clients
    send it over HTTPS, whose certificate `up` has made, and trust no other."""
    desk, a = hosts["desk"], hosts["a"]
    key = "a-key-that-is-nowhere"
    up(hosts, 1, "auto", "--ssl", "trusted.pem", serve=(*SERVE, "--api-key", key))
    try:
        assert not any(key in args for args in a.processes("phalanx").values())
        (pid,) = a.processes("phalanx rank")
        inherited = a.run(["sh", "-c", f"tr '\\0' '\\n' </proc/{pid}/environ"]).stdout
        assert "PATH=" in inherited and key not in inherited
        holding = [file for file in (a.home / ".phalanx").rglob("*") if file.is_file() and key in file.read_text()]
        assert sorted(file.name for file in holding) == ["spec.json"]
        assert all(file.stat().st_mode & 0o077 == 0 for file in holding)
        status = phalanx(desk, "status", "1.json", "--json").stdout
        assert key not in status and json.loads(status)["a"]["health"]["ranks"]
        phalanx(desk, "restart", "1.json")
        models = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"https://{a.address}:8000/v1/models"]
        trusting = [*models, "--cacert", "trusted.pem"]
        assert desk.run([*trusting, "-H", f"Authorization: Bearer {key}"]).stdout == "200"
        assert desk.run(trusting).stdout == "401"
        assert desk.run(models, check=False).returncode == 60  # curl: the certificate is not trusted
    finally:
        phalanx(desk, "down", "1.json")
    assert_nothing_left(hosts)
    ended = phalanx(desk, "logs", "1.json").stdout
    assert "phalanx is ready" in ended and key not in ended


def test_up_after_a_reboot_of_all_hosts(hosts):
    up(hosts, 2, "ring")
    for name in ("a", "b"):
        hosts[name].reboot()
    assert state_files(hosts["a"])  # a PID file of a process that is gone, or that is somebody else's by now
    down = phalanx(hosts["desk"], "status", "2.json", check=False)
    assert down.returncode != 0 and "gone" in down.stdout
    with cluster(hosts, 2, "ring") as url:
        assert ask(hosts["desk"], url)


def test_down_of_nothing(hosts):
    done = phalanx(hosts["desk"], "down", "2.json")
    assert done.stdout.count("nothing was running") == 2


def test_a_model_that_is_not_there_is_the_first_cause(hosts):
    serve = ("models/none", *SERVE[1:])
    checked = phalanx(hosts["desk"], "up", "2.json", "--", *serve, check=False)
    assert checked.returncode != 0 and "model" in checked.stderr and "phalanx model p" in checked.stderr
    blind = phalanx(hosts["desk"], "up", "2.json", "--skip-checks", "--", "./none", *SERVE[1:], check=False)
    assert blind.returncode != 0
    assert "a:" in blind.stderr and "No such directory" in blind.stderr
    assert_nothing_left(hosts)


def test_a_host_that_is_off_is_named_and_nothing_stays_on_the_others(hosts):
    hosts["b"].cut()
    done = phalanx(hosts["desk"], "up", "2.json", "--skip-checks", "--", *SERVE, check=False)
    assert done.returncode != 0 and "b:" in done.stderr and "host-unreachable" in done.stderr
    hosts["b"].mend()
    assert_nothing_left(hosts)


def test_a_stopped_process_is_killed_only_after_the_time_out(hosts):
    up(hosts, 2, "ring")
    (pid,) = hosts["b"].processes("phalanx agent")
    hosts["b"].run(["kill", "-STOP", str(pid)])
    down = phalanx(hosts["desk"], "down", "2.json", "--timeout", "15")
    (killed,) = (line for line in down.stdout.splitlines() if line.startswith("b: killed"))
    assert "phalanx agent" in killed and "next start waits 30 s" in killed
    assert "a: killed" not in down.stdout
    status = json.loads(phalanx(hosts["desk"], "status", "2.json", "--json", check=False).stdout)
    assert 0 < status["b"]["held_s"] <= 30 and status["a"]["held_s"] == 0
    hosts["b"].run(["rm", "-r", str(hosts["b"].inside_home(".phalanx/run"))])
    assert_nothing_left(hosts)


def test_a_process_that_is_not_ours_is_never_ended(hosts):
    up(hosts, 2, "ring")
    stranger = hosts["b"].popen(["sleep", "1000"])
    wait_for(lambda: "sleep 1000" in hosts["b"].processes("sleep 1000").values(), "the stranger runs")
    (pid,) = hosts["b"].processes("sleep 1000")
    run = hosts["b"].home / ".phalanx/run"
    for name in ("supervisor.pid", "child.pid"):
        known = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**known, "pid": pid}))
    done = phalanx(hosts["desk"], "down", "2.json")
    assert "b: nothing was running" in done.stdout
    assert hosts["b"].processes("sleep 1000")
    forced = phalanx(hosts["desk"], "down", "2.json", "--force")
    assert "phalanx agent" in forced.stdout or "phalanx host" in forced.stdout
    assert hosts["b"].processes("sleep 1000") and not hosts["b"].processes("phalanx")
    stranger.terminate()
    assert_nothing_left(hosts)


def test_foreground_ends_with_its_terminal(hosts):
    """Of hosts that are only named: their addresses are asked for."""
    words = ["phalanx", "up", "--hosts", "a,b", "--backend", "ring", "--foreground", "--", *SERVE]
    terminal = hosts["desk"].popen(words)
    wait_for(lambda: health(hosts).get("status") == "ok", "the cluster is up")
    (pid,) = (pid for pid, args in hosts["desk"].processes("--foreground").items() if "nsenter" not in args)
    hosts["desk"].run(["kill", "-INT", str(pid)])
    assert terminal.wait(120) in (0, 130)
    assert_nothing_left(hosts)


def cycles(hosts, count: int) -> None:
    for _ in range(count):
        up(hosts, 2, "ring")
        phalanx(hosts["desk"], "down", "2.json")
        assert_nothing_left(hosts)


def test_two_cycles_leave_nothing(hosts):
    cycles(hosts, 2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_fifty_cycles_leave_nothing(hosts):
    cycles(hosts, 50)
