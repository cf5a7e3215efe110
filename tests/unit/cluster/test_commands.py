"""The cluster commands' flags, refusals and words; no host is reached."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from phalanx.cli import hostfile, logs, up
from phalanx.cli.clusters import chosen, phase, says
from phalanx.cli.down import report
from phalanx.cli.main import _divided, main
from phalanx.cluster.check_results import CheckResult
from phalanx.cluster.deployment import Deployment
from phalanx.cluster.host_status import HostStatus, ServerHealth
from phalanx.cluster.host_verbs import LogRequest
from phalanx.cluster.hostfile_parser import Host, Hostfile, parse
from phalanx.cluster.plans import Plan
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import Stopped
from phalanx.errors import ClusterError, ConfigError, ExitCode

GB = 1 << 30


def test_what_follows_two_dashes_is_passed_on():
    words = ["up", "hosts.json", "--", "demo", "--port", "9", "--", "x"]
    assert _divided("up", words) == (["up", "hosts.json"], ("demo", "--port", "9", "--", "x"))
    assert _divided("serve", words) == (words, ())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up"], "Which hosts? Nothing names them."),
        (["down", "x.json", "--hosts", "a"], "exclude each other"),
        (["status", "nowhere.json"], "nowhere.json cannot be read"),
        (["status", "a,b"], "Names of hosts go with --hosts: `--hosts a,b`."),
        (["up", "--hosts", "a,a"], "ssh 'a' is there twice"),
        (["up", "--hosts", "a,b", "-n", "3"], "--num-ranks 3, but there are 2 hosts"),
        (["up", "--hosts", "a,b", "--", "demo", "--tp", "3"], "--tp 3 needs 3 hosts, not 2."),
        (["up", "--hosts", "a,b", "--", "demo", "--backend", "ring"], "`up` sets it itself"),
        (["up", "--hosts", "a,b", "--gateway-host", "b"], "--gateway-host: one group has no gateway"),
        (["up", "--hosts", "a,b,c", "--replicas", "2", "--", "demo", "--tp", "2"], "need 4 hosts, but there are 3"),
        (["up", "--hosts", "a,b,c,d", "-n", "3", "--replicas", "2"], "3 hosts cannot be divided among --replicas 2"),
        (
            ["up", "--hosts", "a,b", "--replicas", "2", "--", "demo", "--", "--port", "8000"],
            "port is that of the server",
        ),
        (["up", "--hosts", "a,b", "--replicas", "0"], "0 is not a whole number, 1 or more"),
        (["logs", "--hosts", "a", "--rank", "1"], "--rank 1, but there are 1 hosts"),
        (["net", "setup", "--hosts", "a"], "takes its hosts from --node"),
        (["net", "test", "--hosts", "a", "--node", "a:en5:10.0.0.1"], "belong to `net setup`"),
        (["net", "test", "--hosts", "a"], "here is one host only"),
        (["net", "setup", "--node", "a:en5"], "HOST:IFACE:IP"),
        (["hostfile"], "Give host names, or --check"),
        (["hostfile", "a", "b,", "c"], "are one argument, with commas and without blanks, but here are 3."),
        (["hostfile", "a", "b"], "`phalanx hostfile a,b` asks these hosts, `phalanx hostfile --check FILE` checks"),
        (["model", "push", "./nowhere", "--hosts", "a"], "./nowhere is not on this machine"),
        (["host", "dance"], "no such verb"),
        (["agent"], "credentials.json holds no credentials"),
    ],
)
def test_refusals_say_why(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_hostfile_is_checked(tmp_path, capsys):
    file = tmp_path / "h.json"
    file.write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    assert main(["hostfile", "--check", str(file)]) == 0
    assert "2 hosts: a, b" in capsys.readouterr().out
    file.write_text("[]")
    assert main(["hostfile", "--check", str(file)]) == 64


def test_hostfile_knows_a_file_from_names_of_hosts(tmp_path, capsys):
    file = tmp_path / "hosts"
    file.write_text('[{"ssh": "a"}]')
    for name in (str(file), "hosts.json"):
        assert main(["hostfile", name]) == ExitCode.CONFIG
        assert f"`phalanx hostfile --check {name}`" in capsys.readouterr().err


@pytest.fixture
def discovered(monkeypatch) -> Hostfile:
    """What `hostfile` finds without asking a host."""
    found = Hostfile(hosts=(Host(ssh="a", ips=("10.0.0.1",)),))

    async def facts_of(remotes):
        return {}

    monkeypatch.setattr(hostfile, "facts_of", facts_of)
    monkeypatch.setattr(hostfile, "discover", lambda facts: (found, []))
    return found


def test_hostfile_asks_before_it_writes_over_a_file(discovered, tmp_path, capsys, monkeypatch):
    file = tmp_path / "hosts.json"
    assert main(["hostfile", "a", "-o", str(file)]) == 0
    written = file.read_text()
    assert parse(written, "x") == discovered
    file.write_text("mine")
    assert main(["hostfile", "a", "-o", str(file)]) == ExitCode.CONFIG
    assert "add --force" in capsys.readouterr().err and file.read_text() == "mine"
    terminal = io.StringIO("n\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["hostfile", "a", "-o", str(file)]) == ExitCode.CONFIG and file.read_text() == "mine"
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["hostfile", "a", "-o", str(file)]) == 0 and file.read_text() == written
    file.write_text("mine")
    assert main(["hostfile", "a", "-o", str(file), "--force"]) == 0 and file.read_text() == written


def test_hostfile_says_why_it_cannot_write(discovered, tmp_path, capsys):
    for output, said in ((tmp_path / "none" / "x", "there is no directory"), (tmp_path, "exists")):
        assert main(["hostfile", "a", "-o", str(output)]) == ExitCode.CONFIG
        assert said in capsys.readouterr().err
    assert main(["hostfile", "a", "-o", str(tmp_path), "--force"]) == ExitCode.CONFIG
    assert "cannot be written: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (("demo", "--host", "0.0.0.0"), "no key is asked for; `-- demo --api-key KEY` does"),
        (("demo",), "only a itself reaches this address"),
        (("demo", "--host", "0.0.0.0", "--api-key-file", "x"), ""),
    ],
)
def test_up_of_one_group_says_who_reaches_it_without_a_key(serve, said, capsys):
    plan = Plan(hostfile=Hostfile(hosts=(Host(ssh="a", ips=("10.0.0.1",)),)), serve=serve)
    up._say_where(Deployment(groups=(plan,)))
    printed = capsys.readouterr()
    assert said in printed.err and bool(said) == bool(printed.err)
    assert printed.out.endswith("(1 host)\n")
    up._say_where(Deployment(groups=(replace(plan, api_keys=("k",), serve=("demo", "--host", "0.0.0.0")),)))
    assert not capsys.readouterr().err


def test_one_way_to_name_hosts():
    assert [host.ssh for host in chosen(None, None, "a,b,c", 2).hosts] == ["a", "b"]
    with pytest.raises(ConfigError):
        chosen(Path("x"), Path("y"), None)


@pytest.mark.parametrize("words", [["hosts.json", "1"], ["--hosts", "a,b", "1"], ["--hostfile", "hosts.json", "1"]])
def test_where_options_name_the_hosts_the_only_word_of_restart_is_a_replica(words, monkeypatch, tmp_path):
    seen: list[tuple[list[str], str | None]] = []

    async def restart_all(remotes: Sequence[Remote], *, part: str | None, timeout_s: float) -> None:
        seen.append(([remote.name for remote in remotes], part))
        raise ClusterError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("phalanx.cli.restart.restart_all", restart_all)
    (tmp_path / "hosts.json").write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    assert main(["restart", *words]) != 0
    assert main(["restart", *words[:-1]]) != 0
    assert seen == [(["a", "b"], "1"), (["a", "b"], None)]


@pytest.mark.parametrize(
    ("words", "names", "gateway", "group"),
    [
        (["hosts.json"], ["a", "b"], True, True),
        (["hosts.json", "gateway"], ["a", "b"], True, False),
        (["--hosts", "a,b", "gateway"], ["a", "b"], True, False),
        (["hosts.json", "1"], ["b"], False, True),
        (["hosts.json", "--rank", "1"], ["b"], False, True),
    ],
)
def test_whose_logs_are_shown(words, names, gateway, group, monkeypatch, tmp_path, capsys):
    seen: list[tuple[list[str], LogRequest]] = []

    async def read_logs(
        remotes: Sequence[Remote], request: LogRequest, show: Callable[[str, str], None]
    ) -> list[ClusterError]:
        seen.append(([remote.name for remote in remotes], request))
        if not silent:
            show("a", "a line")
        return []

    async def remotes_of(remotes: Sequence[Remote], replica: str) -> list[Remote]:
        assert replica == "1"
        return [remotes[1]]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "read_logs", read_logs)
    monkeypatch.setattr(logs, "remotes_of", remotes_of)
    (tmp_path / "hosts.json").write_text('[{"ssh": "a"}, {"ssh": "b"}]')
    silent = False
    assert main(["logs", *words]) == 0
    silent = True
    assert main(["logs", *words]) == (0 if group else ExitCode.CONFIG)
    assert ("No host has the log of a gateway" in capsys.readouterr().err) != group
    assert seen[1:] == seen[:1] == [(names, LogRequest(lines=50, follow=False, gateway=gateway, group=group))]


@pytest.mark.parametrize("flag", [("--lines", "5"), ("--tail", "5"), ("-n", "5"), ("-n5",)])
def test_the_number_of_lines_of_a_log_has_the_names_of_other_programs(flag, monkeypatch):
    seen: list[int] = []

    async def read_logs(remotes, request, show):
        seen.append(request.lines)
        return []

    monkeypatch.setattr(logs, "read_logs", read_logs)
    assert main(["logs", "--hosts", "a", *flag]) == 0 and seen == [5]


def test_the_gateways_log_is_of_no_replica(capsys):
    for words in (["--replica", "1"], ["--rank", "0"]):
        assert main(["logs", "--hosts", "a", "gateway", *words]) == ExitCode.CONFIG
        assert "The gateway is of no replica" in capsys.readouterr().err
    assert main(["logs", "--hosts", "a", "0", "--replica", "1"]) == ExitCode.CONFIG
    assert "'0' is named as well" in capsys.readouterr().err


def test_a_second_up_says_only_that_one_runs(monkeypatch, capsys):
    async def examine(groups, remotes, requests, shape):
        taken = CheckResult(check="API port", level="bad", seen="taken", wanted="free", remedy="Stop it.")
        runs = CheckResult(check="running", level="bad", seen="phalanx serve demo (pid 7)", wanted="", remedy="")
        return {"a": [taken, runs], "b": [runs]}

    monkeypatch.setattr(up, "examine", examine)
    hosts = Hostfile(hosts=(Host(ssh="a", ips=("10.0.0.1",)), Host(ssh="b", ips=("10.0.0.2",))))
    with pytest.raises(ClusterError) as raised:
        asyncio.run(up._look_first(Deployment(groups=(Plan(hostfile=hosts),)), Console(stderr=True)))
    assert raised.value.message == (
        "A cluster is running already: a: phalanx serve demo (pid 7); b: phalanx serve demo (pid 7)."
    )
    assert "phalanx down" in raised.value.remedy and "API port" not in capsys.readouterr().err


UP = HostStatus(host="a", role="server", child=5, supervisor=4, health=ServerHealth(ok=True, phase="ok"))


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (HostStatus(host="a"), "down"),
        (UP, "ready"),
        (
            replace(UP, health=ServerHealth(ok=False, phase="loading", step="loading", done=43, total=100)),
            "loading 43%",
        ),
        (replace(UP, health=ServerHealth(ok=False, phase="restarting")), "restarting"),
        (replace(UP, child=None), "restarting"),
        (replace(UP, child=None, supervisor=None), "gone"),
        (replace(UP, child=None, ended=64), "ended (64)"),
        (replace(UP, role="agent", health=None), "waits for rank 0"),
        (replace(UP, role="agent", health=None, children=1), "rank runs"),
    ],
)
def test_phases(status, word):
    assert word in phase(status)


def test_the_last_column_of_status():
    assert says(UP) == ""
    assert "its supervisor is gone" in says(replace(UP, supervisor=None))
    ill = replace(
        UP, health=ServerHealth(ok=False, phase="restarting", reason="b is away"), fault="x: y.", remedy="Do z."
    )
    assert says(ill) == "b is away; x: y. Do z."
    away = ServerHealth(ok=False, phase="restarting", reason="b is away", since="2026-01-02T03:04:05+00:00")
    assert says(replace(UP, health=away)) == "b is away (not ready since 2026-01-02T03:04:05+00:00)"
    assert says(replace(UP, fault="old: fault.")) == "", "a fault of the past is not said of a healthy server"
    planned = ServerHealth(ok=True, phase="ok", predicted={"tokens_per_second": 214.04, "ttft_seconds": 0.312})
    beside = "predicted 214.0 tokens/s, 0.31 s to the first of 512; measured "
    assert says(replace(UP, health=planned)) == f"{beside}nothing yet"
    seen = replace(planned, measured={"tokens_per_second": 199.0})
    assert says(replace(UP, health=seen)) == f"{beside}199.0 tokens/s"
    assert says(replace(UP, health=None, role="agent", last_line="rank 1: joined")) == "rank 1: joined"


def test_down_reports_each_host(capsys):
    results = {
        "a": Stopped(found=["phalanx serve (pid 5)"], before=9 * GB, after=2 * GB),
        "b": Stopped(found=["x"], killed=["x"], before=GB, after=GB),
        "c": Stopped(),
        "d": ClusterError("d: The host is off.", remedy="Switch it on."),
        "e": Stopped(found=["y"], killed=["y"], left=["y"]),
    }
    assert report({name: results[name] for name in "abc"}) == 0
    said = capsys.readouterr().out
    assert "9.00 -> 2.00 GiB (given back)" in said and "b: killed x; the next start waits 30 s" in said
    assert "nothing given back yet" in said and "c: nothing was running" in said
    assert report({name: results[name] for name in "de"}) == 1
    said = capsys.readouterr().out
    assert "Switch it on." in said and "e: still there: y" in said


def test_up_hands_keys_of_flags_and_variables_to_the_gateway_and_its_servers(monkeypatch, capsys):
    """Never on a command line. Where a flag names a file on the host, a variable of this machine does not count."""
    seen: list[Deployment] = []

    async def up_(plan: Plan, divided: Callable[[Plan], Deployment], *_: object, **__: object) -> int:
        seen.append(divided(plan))
        return 0

    monkeypatch.setattr(up, "_up", up_)
    two = ["up", "--hosts", "a,b", "--replicas", "2", "--", "demo"]
    for variable in ("PHALANX_API_KEY", "PHALANX_ADMIN_KEY", "PHALANX_GATEWAY_ADMIN_KEY"):
        monkeypatch.setenv(variable, f"env-{variable[8:]}")

    def keys(*words: str) -> tuple[object, ...]:
        assert main(list(words)) == 0, capsys.readouterr().err
        group, gateway = seen[-1].groups[0], seen[-1].gateway
        return (group.api_keys, group.admin_key), gateway and (gateway.api_keys, gateway.admin_key, gateway.flags)

    servers = ((), "env-ADMIN_KEY")
    assert keys(*two) == (servers, (("env-API_KEY",), "env-GATEWAY_ADMIN_KEY", ()))
    given = keys(*two, "--admin-key=s", "--", "--admin-key", "g", "--api-key", "c")
    assert given == (((), "s"), (("c",), "g", ()))
    files = ("--admin-key-file", "x", "--api-key-file", "y")
    assert keys(*two, "--", *files) == (servers, ((), None, files)) and seen[-1].gateway.asks_for_keys
    one = ["up", "--hosts", "a,b", "--", "demo"]
    assert keys(*one) == ((("env-API_KEY",), "env-ADMIN_KEY"), None)
    assert keys(*one, *files) == (((), None), None)
    for name in ("--api-key", "--admin-key"):
        assert main([*two, "--", name, "k", f"{name}-file", "x"]) == ExitCode.CONFIG
        assert f"{name} and {name}-file exclude each other" in capsys.readouterr().err
    monkeypatch.setenv("PHALANX_GATEWAY_ADMIN_KEY", " ")
    assert main(two) == ExitCode.CONFIG
    assert "PHALANX_GATEWAY_ADMIN_KEY is set, but there is no key" in capsys.readouterr().err
