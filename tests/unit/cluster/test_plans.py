"""What is started where, and what is refused before (L1)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import sys

import msgspec
import pytest
from msgspec.structs import replace

from phalanx.cluster.argument_flags import flag_value, split_flag
from phalanx.cluster.deployment import Deployment
from phalanx.cluster.host_status import HostStatus, ServerHealth, api_key, final_error, serve_address
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.lifecycle import Cluster, Goal, final_cause, start_all, wait_healthy
from phalanx.cluster.plans import (
    Plan,
    backend_of,
    check,
    model_of,
    new_credentials,
    specs,
    split_keys,
    with_https,
)
from phalanx.cluster.ssh import ANSWER, Remote, failure, run
from phalanx.cluster.supervisor import Stopped, SupervisorStarted
from phalanx.config import ClusterConfig
from phalanx.errors import ClusterError, ConfigError, StartFailed
from phalanx.tls.certificates import make_credentials

PAIR = Hostfile(
    hosts=(Host(ssh="a", ips=("10.0.0.1",)), Host(ssh="b", ips=("10.0.0.2", "10.9.0.2"))),
    envs=("NCCL_DEBUG=1", "NCCL_ALGO=1"),
)
CREDENTIALS = make_credentials(["a", "b"])
PLAN = Plan(hostfile=PAIR, serve=("demo", "--port", "9"), backend="ring", envs=("NCCL_ALGO=2",))


def test_the_server_is_on_the_first_host_and_agents_on_the_others():
    server, agent = specs(PLAN, CREDENTIALS)
    assert (server.role, agent.role) == ("server", "agent")
    assert server.command[:4] == ["serve", "demo", "--port", "9"]
    assert flag_value(server.command, "--tp") == "2" and flag_value(server.command, "--backend") == "ring"
    assert flag_value(server.command, "--drain-seconds") == "8"
    assert agent.command[:5] == ["agent", "--host", "10.0.0.2", "--port", "32330"]
    assert server.variables == agent.variables == {"NCCL_DEBUG": "1", "NCCL_ALGO": "2"}
    assert [server.credentials, agent.credentials] == CREDENTIALS
    assert (server.log, agent.log) == (".phalanx/logs/rank-0.log", ".phalanx/logs/rank-1.log")
    cluster = msgspec.json.decode(server.files["cluster.json"], type=ClusterConfig)
    assert [host.ips for host in cluster.hosts] == [("10.0.0.1",), ("10.0.0.2", "10.9.0.2")]
    assert cluster.envs == ("NCCL_DEBUG=1", "NCCL_ALGO=2")


def test_keys_are_on_no_command_line_and_in_no_other_file():
    for spec in specs(PLAN, CREDENTIALS):
        others = msgspec.json.encode(replace(spec, credentials=None))
        assert b"PRIVATE" not in others and b"CERTIFICATE" not in others


@pytest.mark.parametrize(("serve", "model"), [(("big", "--port", "9"), "big"), (("--port", "9"), "demo"), ((), "demo")])
def test_which_model_is_served(serve, model):
    assert model_of(replace(PLAN, serve=serve)) == model


def test_one_host_is_an_ordinary_server():
    (server,) = specs(replace(PLAN, hostfile=PAIR.first(1)), new_credentials(["a"]))
    assert flag_value(server.command, "--tp") is None and server.files == {} and server.credentials is None


def test_the_users_drain_wins():
    server, _ = specs(replace(PLAN, serve=("demo", "--drain-seconds=3")), CREDENTIALS)
    assert flag_value(server.command, "--drain-seconds") == "3"


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (("demo", "--tp", "4"), "--tp 4 needs 4 hosts, not 2"),
        (("demo", "--backend=ring"), "`up` sets it itself"),
        (("demo", "--port", "0"), "--port 0"),
        (("demo", "--port=http"), "--port http"),
    ],
)
def test_flags_that_up_cannot_pass_on(serve, said):
    with pytest.raises(ConfigError, match=said):
        check(replace(PLAN, serve=serve))


@pytest.mark.parametrize("entry", ["PHALANX_API_KEY=x", "PYTHONPATH=/x", "NCCL_DEBUG=x\n", "NCCL_DEBUG=x\0", "A"])
def test_variables_that_up_does_not_hand_out(entry):
    with pytest.raises(ConfigError, match=r"^--env: "):
        check(replace(PLAN, envs=("NCCL_ALGO=1", entry)))


KEYS = ("--api-key", "one", "--host", "0.0.0.0", "--api-key=two")


def test_keys_are_on_no_command_line():
    serve, keys = split_keys(("demo", *KEYS))
    assert (serve, keys) == (("demo", "--host", "0.0.0.0"), ("one", "two"))
    server, agent = specs(replace(PLAN, serve=serve, api_keys=keys), CREDENTIALS)
    assert server.variables == {**agent.variables, "PHALANX_API_KEY": "one two"}
    assert not {"one", "two"} & {*server.command, *agent.command} and api_key(server) == "one"
    assert split_flag(("demo", "--admin-key=x", "--admin-key", "y"), "--admin-key") == (("demo",), ("x", "y"))
    server, agent = specs(replace(PLAN, admin_key="three"), CREDENTIALS)
    assert server.variables == {**agent.variables, "PHALANX_ADMIN_KEY": "three"}


def test_https_with_a_certificate_of_its_own(tmp_path):
    """A client that trusts it reaches the server by each of its addresses, and by no other."""
    server, _ = specs(with_https(PLAN), CREDENTIALS)
    assert flag_value(server.command, "--ssl-certfile") == ".phalanx/run/server.pem"
    file = tmp_path / "server.pem"
    file.write_text(server.files["server.pem"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    client = ssl.create_default_context(cafile=file)
    for name in ("a", "10.0.0.1", "localhost"):
        assert shaken(client, context, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shaken(client, context, "10.0.0.2")
    with pytest.raises(ConfigError, match="--ssl and --ssl-certfile exclude"):
        with_https(replace(PLAN, serve=("demo", "--ssl-certfile=x")))


def shaken(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> bool:
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)
    done = [False, False]
    for _ in range(3):
        for index, end in enumerate(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done[index] = True
    return all(done)


@pytest.mark.parametrize("key", ["", " x", "x y", "x\ny", "x\0"])
def test_keys_that_cannot_be_handed_on(key):
    with pytest.raises(ConfigError, match="--api-key: a key is empty, or has spaces") as refused:
        check(replace(PLAN, api_keys=(key,)))
    assert not key or key not in str(refused.value)
    with pytest.raises(ConfigError, match="--admin-key: a key is empty, or has spaces"):
        check(replace(PLAN, admin_key=key))


def test_keys_come_from_one_place():
    with pytest.raises(ConfigError, match="exclude each other"):
        check(replace(PLAN, serve=("demo", "--api-key-file", "x"), api_keys=("k",)))
    with pytest.raises(ConfigError, match="--admin-key and --admin-key-file exclude each other"):
        check(replace(PLAN, serve=("demo", "--admin-key-file", "x"), admin_key="k"))


def test_rdma_needs_devices():
    with pytest.raises(ConfigError, match="jaccl needs `rdma` for every host"):
        check(replace(PLAN, backend="jaccl"))
    assert check(PLAN) == PLAN


def test_the_flag_wins_over_the_hostfile():
    file = replace(PAIR, backend="mpi")
    assert backend_of(replace(PLAN, hostfile=file)) == "ring"
    assert backend_of(replace(PLAN, hostfile=file, backend="auto")) == "mpi"
    assert backend_of(replace(PLAN, backend="auto")) == "auto"


def test_stages_of_one_host_each_need_no_collective_backend():
    """A hostfile for RDMA serves them as well; serve would refuse --backend there."""
    staged = replace(PLAN, hostfile=replace(PAIR, backend="ring"), serve=("demo", "--pp", "2"), backend="auto")
    server, _ = specs(check(staged), new_credentials(["a", "b"]))
    assert flag_value(server.command, "--pp") == "2" and flag_value(server.command, "--backend") == "auto"
    with pytest.raises(ConfigError, match="--backend ring is the collective backend of a stage, but each"):
        check(replace(staged, backend="ring"))


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("serve demo", ("127.0.0.1", 8000)),
        ("serve demo --host 0.0.0.0 --port 81", ("127.0.0.1", 81)),
        ("serve demo --host=10.0.0.1 --port=82 --port 83", ("10.0.0.1", 83)),
    ],
)
def test_where_a_server_answers(words, address):
    assert serve_address(words.split()) == address


STATUS = HostStatus(host="h", role="server", log="the log")


def test_a_starting_host_has_no_final_cause():
    assert final_cause("a", STATUS) is None
    assert final_cause("a", replace(STATUS, health=ServerHealth(ok=False, phase="restarting", reason="x"))) is None


def test_a_failed_engine_is_final_and_its_fault_is_explained():
    reason = "rank 1 was ended by SIGKILL (out of memory, or killed by hand)"
    cause = final_cause("a", replace(STATUS, health=ServerHealth(ok=False, phase="failed", reason=reason)))
    assert cause is not None and reason in cause.message and "out of memory, or it was killed" in cause.message
    assert "phalanx doctor" in cause.remedy


def test_an_ended_process_is_final():
    cause = final_cause("b", replace(STATUS, role="agent", ended=64, last_line="it said so"))
    assert cause is not None and "b: its agent ended with status 64: it said so" in cause.message
    assert cause.remedy == "`phalanx logs` shows its log (the log there)."


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["error: No such directory: './x'.", "  Check the path."], "No such directory: './x'. Check the path."),
        (["error: one", "more", "error: two"], "two"),
        (["Traceback", "ValueError: x"], "ValueError: x"),
        (
            ["Try 'phalanx serve -h'", "╭─ Error ─╮", "│ Invalid value for │", "│ '--x'. │", "╰─────────╯"],
            "Invalid value for '--x'.",
        ),
        (
            ["rank 0: x", "phalanx could not start: big does not fit.", "    host  rank", "   Use more.", "stopped"],
            "phalanx could not start: big does not fit. host rank Use more.",
        ),
        ([], "it said nothing"),
    ],
)
def test_last_words(lines, words):
    assert final_error(lines) == words


# starting ---------------------------------------------------------------------------------------------------------


def test_hosts_start_at_once_and_all_or_none(monkeypatch):
    calls: list[tuple[str, str]] = []
    both = asyncio.Event()

    async def call(remote: Remote, verb: str, *_: object, **__: object) -> SupervisorStarted | Stopped:
        calls.append((remote.name, verb))
        if verb == "stop":
            return Stopped()
        if len(calls) == 2:
            both.set()
        await both.wait()  # in turn, this would wait for ever
        if remote.name == "b":
            raise ClusterError("b: Something is running here already")
        return SupervisorStarted(pid=7)

    monkeypatch.setattr(Remote, "call", call)
    with pytest.raises(ClusterError, match="b: Something"):
        asyncio.run(asyncio.wait_for(start_all(Deployment(groups=(PLAN,))), 60.0))
    assert sorted(calls[:2]) == [("a", "start"), ("b", "start")]
    assert calls[2:] == [("a", "stop")], "what did not start is not ours to stop"


@pytest.mark.parametrize(
    ("health", "problems", "said"),
    [
        ("The agent of b at 10.0.0.2 cannot be used: no answer.", {}, "0.1 s: The agent of b at 10.0.0.2"),
        ("joining", {"b": "b: The host is off"}, "0.1 s: joining b: The host is off"),
        ("joining", {"a": "a: The host is off"}, "0.1 s: a: The host is off"),
        (None, {}, "0.1 s: no status came"),
    ],
)
def test_a_late_up_names_the_reason(health, problems, said):
    cluster = Cluster(PLAN.remotes())
    if health is not None:
        cluster.statuses["a"] = replace(STATUS, health=ServerHealth(ok=False, phase="starting", reason=health))
    cluster.problems |= problems
    with pytest.raises(ClusterError) as late:
        asyncio.run(wait_healthy(Goal(hosts=("a", "b"), servers=("a",)), cluster, lambda _: None, timeout_s=0.1))
    assert f"Not healthy after {said}" in late.value.message


def test_a_crash_during_the_start_ends_it():
    """The supervisor starts a crashed process again, so that its health alone would never say so."""
    cluster, looks = Cluster(PLAN.remotes()), itertools.count(1)

    def show(cluster: Cluster) -> None:
        cluster.statuses["a"] = replace(STATUS, child=next(looks))

    with pytest.raises(StartFailed, match=r"a: .*crashed while it started"):
        asyncio.run(wait_healthy(Goal(hosts=("a", "b"), servers=("a",)), cluster, show, timeout_s=60))


# ssh --------------------------------------------------------------------------------------------------------------


def test_this_machine_is_not_reached_by_ssh():
    assert Remote("localhost").command("host", "status") == [sys.executable, "-P", "-m", "phalanx", "host", "status"]


def test_other_machines_are_never_asked_for_a_password():
    words = Remote("b", python="/a b/python").command("host", "status")
    assert words[0] == "ssh" and "BatchMode=yes" in words and words[-2] == "b"
    assert "'/a b/python'" in words[-1].replace("'\"'\"'", "'") and "phalanx host status" in words[-1]


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("ssh: connect to host b port 22: Connection refused", "ssh-refused"),
        ("me@b: Permission denied (publickey).", "ssh-key-refused"),
        ("noise\nbash: line 1: exec: phalanx: not found", "phalanx-missing"),
    ],
)
def test_known_faults_of_ssh_are_named(said, fault):
    error = failure("b", 255, said, doing="phalanx host status")
    assert error.message.startswith("b: ") and fault in error.message and error.remedy


def test_what_is_not_known_is_quoted():
    error = failure("b", 3, "one\ntwo\n" + ANSWER + "{}", doing="phalanx host status")
    assert error.message == "b: `phalanx host status` ended with status 3 there: one / two"
    error = failure("b", 255, "", doing="phalanx host status")
    assert error.message == "b: ssh failed (`phalanx host status`): it said nothing"
    error = failure("b", 1, "motd\nerror: Nothing was started here.\n  Use `phalanx up`.\n", doing="x")
    assert (error.message, error.remedy) == ("b: Nothing was started here.", "Use `phalanx up`.")


def test_a_host_that_does_not_answer_in_time():
    with pytest.raises(
        ClusterError, match=r"b gave no answer to `phalanx version` within 0.1 s. What it said: nothing"
    ):
        asyncio.run(run(["sleep", "30"], b"", 0.1, "b", doing="phalanx version"))
    with pytest.raises(ClusterError, match="/nowhere/ssh cannot be run"):
        asyncio.run(run(["/nowhere/ssh"], b"", 1.0, "b", doing="phalanx version"))
