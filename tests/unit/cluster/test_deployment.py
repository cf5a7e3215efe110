"""Several replicas: which hosts become which, what each host is given, and what is refused before hosts are asked."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from test_plans import shaken

from phalanx.cli.clusters import status_table
from phalanx.cluster import checks
from phalanx.cluster.argument_flags import flag_value
from phalanx.cluster.check_results import ExamineRequest, HostFacts
from phalanx.cluster.deployment import (
    Deployment,
    DeploymentKeys,
    certificate_for_clients,
    deploy,
    new_keys,
    placed,
    split_flags,
    url_of,
    with_https_everywhere,
)
from phalanx.cluster.diagnosis import wanted_of
from phalanx.cluster.host_status import GatewayStatus, HostReport, HostStatus, ServerHealth, api_key
from phalanx.cluster.host_verbs import StopRequest
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.lifecycle import Cluster, Goal, goal_of, goal_of_restart, layout_in, start_all, wait_healthy
from phalanx.cluster.plans import Plan, new_credentials, specs
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import RunDirectory, Stopped, SupervisorStarted
from phalanx.config import ClusterConfig
from phalanx.errors import ClusterError, ConfigError
from phalanx.gateway.settings.replicas_file import parse_replicas

KEYS = DeploymentKeys(
    servers=tuple(f"key-of-server-{number}" for number in range(8)),
    admin=tuple(f"key-of-streams-{number}" for number in range(8)),
    status="key-of-status",
)


def hosts(count: int) -> Hostfile:
    """Hosts h0, h1, ..., with a device of each towards each other one."""
    return Hostfile(
        hosts=tuple(
            Host(
                ssh=f"h{i}", ips=(f"10.0.0.{i + 1}",),
                rdma=tuple(None if i == j else f"rdma_{i}_{j}" for j in range(count)),
            )
            for i in range(count)
        )
    )  # fmt: skip


def divided(count: int, *serve: str, replicas: int = 2, host: str | None = None, flags: tuple[str, ...] = (), **more):
    plan = Plan(hostfile=hosts(count), serve=("demo", *serve), **more)
    return deploy(plan, replicas=replicas, gateway_host=host, flags=flags, keys=())


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 3), st.data())
def test_each_replica_is_what_it_would_be_alone(replicas, size, spare, data):
    """The first hosts, in order; behind addresses and keys that the gateway's own parser finds in its file."""
    count = replicas * size + spare
    at = data.draw(st.integers(0, count - 1))
    found = divided(count, "--port", "9000", "--tp", str(size), replicas=replicas, host=f"h{at}")
    assert [host.ssh for plan in found.groups for host in plan.hostfile.hosts] == [
        f"h{i}" for i in range(replicas * size)
    ]
    everything = placed(found, KEYS)
    assert len(everything) == replicas * size + 1 and everything[-1][0] == f"h{at}"
    read = parse_replicas(everything[-1][1].files["replicas.toml"], "replicas.toml")
    assert [replica.name for replica in read] == [str(number) for number in range(replicas)]
    for number, (plan, replica) in enumerate(zip(found.groups, read, strict=True)):
        group = everything[number * size : (number + 1) * size]
        names = [name for name, _ in group]
        alone = specs(
            replace(plan, api_keys=(KEYS.servers[number],), admin_key=KEYS.admin[number]), new_credentials(names)
        )
        assert [without_secrets(spec) for _, spec in group] == [without_secrets(spec) for spec in alone]
        server = group[0][1]
        assert (flag_value(server.command, "--host"), flag_value(server.command, "--port")) == (
            plan.hostfile.hosts[0].address,
            "9000",
        )
        assert replica.admin_key == server.variables["PHALANX_ADMIN_KEY"]
        assert replica.url == f"http://{plan.hostfile.hosts[0].address}:9000" and replica.key == api_key(server)
        if size > 1:
            made = msgspec.json.decode(server.files["cluster.json"], type=ClusterConfig)
            assert [host.name for host in made.hosts] == names
            for rank, host in enumerate(made.hosts):
                devices = [f"rdma_{number * size + rank}_{number * size + other}" for other in range(size)]
                assert host.rdma == tuple(None if other == rank else name for other, name in enumerate(devices))
    layout = found.layout
    assert layout is not None and all(spec.layout == layout for _, spec in everything)
    assert layout.hosts == tuple(dict.fromkeys(name for name, _ in everything))


def without_secrets(spec):
    return replace(spec, credentials=None, layout=None)


def test_one_group_has_no_gateway_and_no_key_of_its_own():
    plan = Plan(hostfile=hosts(2), backend="ring")
    found = placed(Deployment(groups=(plan,)), KEYS)
    assert [name for name, _ in found] == ["h0", "h1"]
    assert [without_secrets(spec) for _, spec in found] == [without_secrets(spec) for spec in specs(plan, [])]
    assert all(spec.layout is None and spec.variables == {} for _, spec in found)


def test_no_key_is_on_a_command_line_and_only_the_gateway_has_those_of_all():
    found = deploy(
        Plan(hostfile=hosts(4), serve=("demo",), api_keys=("own",)),
        replicas=2, gateway_host="h3", flags=("--keys", "keys.toml"), keys=("client",), admin_key="adm",
    )  # fmt: skip
    everything = placed(found, KEYS)
    for name, spec in everything:
        assert not {"own", "client", "adm", *KEYS.servers, *KEYS.admin, KEYS.status} & set(spec.command), name
        assert spec.role == "gateway" or "client" not in str(spec.variables)
    servers = [spec for _, spec in everything if spec.role == "server"]
    assert [api_key(spec) for spec in servers] == ["own", "own"]
    assert all("key-of-streams" not in str(spec.variables) for _, spec in everything if spec.role != "server")
    (gateway,) = [spec for _, spec in everything if spec.role == "gateway"]
    assert gateway.variables == {
        "PHALANX_API_KEY": f"client {KEYS.status}", "PHALANX_GATEWAY_ADMIN_KEY": "adm"
    }  # fmt: skip
    assert [replica.key for replica in parse_replicas(gateway.files["replicas.toml"], "x")] == ["own", "own"]
    one, other = new_keys(2), new_keys(2)
    assert len({*one.servers, *one.admin, one.status, *other.servers, *other.admin, other.status}) == 10


def test_a_server_has_no_key_of_another_replica():
    """Its host may be taken over: it is not to ask another replica, nor to take up that one's streams."""
    everything = placed(divided(4, replicas=2, host="h0"), KEYS)
    servers = [spec for _, spec in everything if spec.role == "server"]
    for own, other in (servers, servers[::-1]):
        for variable in ("PHALANX_API_KEY", "PHALANX_ADMIN_KEY"):
            assert own.variables[variable] not in str(msgspec.to_builtins(other))


def test_what_stands_after_a_second_pair_of_dashes_is_the_gateways():
    assert split_flags(("demo", "--tp", "2", "--", "--port", "9", "--")) == (
        ("demo", "--tp", "2"),
        ("--port", "9", "--"),
    )
    assert split_flags(("demo",)) == (("demo",), ())
    found = divided(2, flags=("--policy", "cache_aware", "--health-check-interval-secs=3"))
    gateway = placed(found, KEYS)[-1][1]
    assert gateway.command[:3] == ["gateway", "--policy", "cache_aware"] and gateway.variables == {}
    assert flag_value(gateway.command, "--health-check-interval-secs") == "3"
    assert flag_value(gateway.command, "--shutdown-grace-period-secs") == "8"


@pytest.mark.parametrize(
    ("count", "serve", "more", "said"),
    [
        (7, ("--tp", "4"), {}, "--replicas 2 of --tp 4 need 8 hosts, but there are 7"),
        (7, ("-tp", "4"), {}, "need 8 hosts"),
        (7, ("--tensor-parallel-size=2", "--tp=4"), {}, "need 8 hosts"),
        (4, ("--tp", "0"), {}, "--tp 0 is not whole numbers, 1 or more"),
        (4, ("--tp", "two"), {}, "--tp two is not"),
        (3, (), {}, "3 hosts cannot be divided among --replicas 2"),
        (1, (), {}, "1 host cannot be divided among --replicas 2"),
        (34, (), {}, "17 hosts are too many for one group; 16 at most"),
        (4, (), {"host": "z"}, "--gateway-host z: there is no such host"),
        (4, ("--host", "0.0.0.0"), {}, "--host after `--`: with --replicas, servers listen where"),
        (4, ("--api-key-file", "keys"), {}, "has to know a key of the servers"),
        (4, ("--admin-key-file=key",), {}, "--admin-key-file after `--`: with --replicas, the gateway has to know"),
        (4, (), {"flags": ("--worker-admin-key-file", "x")}, "`up` sets it itself"),
        (4, ("--backend=ring",), {}, "--backend=ring after `--`: `up` sets it itself"),
        (4, (), {"api_keys": ("ключ",)}, "not ASCII"),
        (4, (), {"flags": ("--replicas", "mine.toml")}, "--replicas after the second `--`: `up` sets it itself"),
        (4, (), {"flags": ("--worker-urls=x",)}, "`up` sets it itself"),
        (4, (), {"flags": ("--port", "0")}, "--port 0: a cluster needs a port"),
        (4, (), {"flags": ("--port", "8000")}, "the gateway's port is that of the server on h0"),
        (4, ("--port", "8080"), {"host": "h2"}, "the gateway's port is that of the server on h2"),
        (4, (), {"host": "h3", "flags": ("--port=32330",)}, "the gateway's port is that of the agent on h3"),
    ],
)
def test_what_cannot_be_is_refused_before_hosts_are_asked(count, serve, more, said):
    with pytest.raises(ConfigError, match=said):
        divided(count, *serve, **more)


def test_equal_ports_on_different_hosts_are_no_conflict():
    divided(4, "--port", "8080", host="h1")
    divided(5, "--port", "8080", "--tp", "2", host="h4")


@pytest.mark.parametrize(
    ("flags", "url"),
    [((), "http://127.0.0.1:8080/v1"), (("--host", "0.0.0.0", "--port=9"), "http://10.0.0.4:9/v1"),
     (("--host=10.9.9.9", "--ssl-certfile", "x"), "https://10.9.9.9:8080/v1")],
)  # fmt: skip
def test_where_clients_ask(flags, url):
    assert url_of(divided(4, host="h3", flags=flags)) == url


# HTTPS ------------------------------------------------------------------------------------------------------------


def test_https_reaches_from_clients_to_the_gateway_and_from_there_to_servers(tmp_path):
    found = with_https_everywhere(divided(4, host="h3", flags=("--host", "0.0.0.0")))
    assert url_of(found) == "https://10.0.0.4:8080/v1"
    everything = placed(found, KEYS)
    gateway = everything[-1][1]
    assert flag_value(gateway.command, "--worker-ca") == ".phalanx/gateway/workers.pem"
    clients = ssl.create_default_context(cadata=certificate_for_clients(found))
    workers = ssl.create_default_context(cadata=gateway.files["workers.pem"])
    assert shaken(clients, context(tmp_path, gateway.files["server.pem"]), "10.0.0.4")
    for replica in parse_replicas(gateway.files["replicas.toml"], "x"):
        (server,) = (
            spec for _, spec in everything if replica.url == f"https://{flag_value(spec.command, '--host')}:8000"
        )
        assert shaken(workers, context(tmp_path, server.files["server.pem"]), str(flag_value(server.command, "--host")))
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(clients, context(tmp_path, server.files["server.pem"]), str(flag_value(server.command, "--host")))


def context(folder, pem: str) -> ssl.SSLContext:
    (folder / "server.pem").write_text(pem)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(folder / "server.pem")
    return made


@pytest.mark.parametrize("name", ["--ssl-certfile", "--worker-ca"])
def test_a_certificate_of_the_users_and_a_new_one(name):
    with pytest.raises(ConfigError, match=f"--ssl and {name} exclude each other"):
        with_https_everywhere(divided(4, flags=(name, "x")))


# Checks before the start ------------------------------------------------------------------------------------------


def test_each_host_is_asked_about_its_part():
    asked = wanted_of(divided(5, "--tp", "2", "--port", "81", host="h2", flags=("--port", "82")))
    assert [(one.host.name, one.rank, one.has_rank, one.gateway) for one in asked] == [
        ("h0", 0, True, None), ("h1", 1, True, None), ("h2", 0, True, "127.0.0.1"), ("h3", 1, True, None)
    ]  # fmt: skip
    assert [[peer.name for peer in one.peers] for one in asked] == [["h1"], ["h0"], ["h3", "h0"], ["h2"]]
    assert (asked[2].api_host, asked[2].api_port, asked[2].gateway_port) == ("10.0.0.3", 81, 82)


def test_a_host_with_the_gateway_alone_needs_no_engine():
    *_, alone = wanted_of(divided(5, "--tp", "2", host="h4"))
    assert (alone.host.name, alone.has_rank, [peer.name for peer in alone.peers]) == ("h4", False, ["h0", "h2"])
    assert checks.engine not in checks.CHECKS_OF_A_GATEWAY and checks.ports in checks.CHECKS_OF_A_GATEWAY


def test_a_taken_port_of_the_gateway_is_found(tmp_path):
    facts = HostFacts(host="h", system="Linux", clock=0.0, versions={})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (host,) = hosts(1).placed()
        asked = ExamineRequest(host=host, rank=0, has_rank=False, gateway="127.0.0.1", gateway_port=port)
        (found,) = checks.ports(asked, facts, RunDirectory(tmp_path))
    assert (found.check, found.level, found.seen) == ("gateway port", "bad", f"{port} is taken")
    assert "--port after the second `--`" in found.remedy


# Start, status, restart -------------------------------------------------------------------------------------------

LAYOUT = ReplicaLayout(replicas={"0": ("a", "b"), "1": ("c", "d")}, gateway="a")
UP = HostStatus(host="h", role="server", supervisor=4, child=5, health=ServerHealth(ok=True, phase="ok"))
AGENT = replace(UP, role="agent", children=1, health=None)
GATEWAY = GatewayStatus(process=replace(UP, role="gateway"), replicas={"0": "ok", "1": "ok"})


def test_a_start_that_fails_ends_what_it_started_and_nothing_else(monkeypatch):
    """On h0 a server runs already, of another cluster; the gateway, which was started there, is ended."""
    stopped: list[tuple[str, object]] = []

    async def call(remote: Remote, verb: str, request: object, *_: object, **__: object):
        if verb == "stop":
            assert isinstance(request, StopRequest)
            stopped.append((remote.name, request.only))
            return Stopped()
        if remote.name == "h0" and getattr(request, "role", "") == "server":
            raise ClusterError("h0: Something is running here already")
        return SupervisorStarted(pid=7)

    monkeypatch.setattr(Remote, "call", call)
    with pytest.raises(ClusterError, match="h0: Something"):
        asyncio.run(start_all(divided(2)))
    assert sorted(stopped) == [("h0", "gateway"), ("h1", "group")]


def waited(cluster: Cluster, goal: Goal) -> str:
    """Why it is late; "" if it is healthy."""
    try:
        asyncio.run(wait_healthy(goal, cluster, lambda _: None, timeout_s=0.0))
    except ClusterError as error:
        return str(error)
    return ""


def test_a_cluster_is_healthy_when_the_gateway_uses_all_replicas():
    found = divided(4)
    cluster = Cluster(found.remotes())
    cluster.statuses = dict(zip(cluster.statuses, (UP, AGENT, replace(UP, health=None), AGENT), strict=True))
    assert "no status came" in waited(cluster, goal_of(found))
    cluster.statuses["h2"] = UP
    assert "no status of the gateway came" in waited(cluster, goal_of(found))
    down = ServerHealth(ok=True, phase="ok", reason="replica 1 cannot be reached")
    cluster.gateway = GatewayStatus(process=replace(GATEWAY.process, health=down), replicas={"0": "ok", "1": "away"})
    assert "the gateway: replica 1 cannot be reached" in waited(cluster, goal_of(found))
    cluster.gateway = GATEWAY
    assert waited(cluster, goal_of(found)) == ""


@pytest.mark.parametrize("problem", ["off", "rebooted"])
def test_a_gateway_that_is_gone_holds_no_replica_up(problem):
    cluster = Cluster([Remote(name) for name in ("c", "d", "a")])
    cluster.statuses |= {"c": UP, "d": AGENT}
    if problem == "off":
        cluster.problems["a"] = "a: The host is off"
    else:
        gone = replace(GATEWAY.process, supervisor=None, child=None)
        cluster.gateway = GatewayStatus(process=gone)
    assert waited(cluster, goal_of_restart(LAYOUT, "1", ["a", "b", "c", "d"])) == ""


def test_a_restart_is_not_ended_by_what_it_does_not_concern():
    cluster = Cluster([Remote("a")])
    cluster.statuses["a"] = replace(UP, ended=64, last_line="the model is gone")
    cluster.gateway = GATEWAY
    assert waited(cluster, goal_of_restart(LAYOUT, "gateway", ["a"])) == ""
    assert "a: its server ended with status 64" in waited(cluster, Goal(hosts=("a",), servers=("a",)))
    cluster.gateway = GatewayStatus(process=replace(GATEWAY.process, ended=64, last_line="port 8080 is taken"))
    assert "a: its gateway ended with status 64: port 8080" in waited(
        cluster, Goal(hosts=("a",), servers=(), gateway="a")
    )


def test_which_hosts_a_restart_concerns():
    names = ["a", "b", "c", "d", "spare"]
    assert goal_of_restart(LAYOUT, None, names) == Goal(
        hosts=("a", "b", "c", "d"), servers=("a", "c"), gateway="a", replicas=("0", "1")
    )
    assert goal_of_restart(LAYOUT, "1", ["c", "d"]) == Goal(hosts=("c", "d"), servers=("c",), replicas=("1",))
    assert goal_of_restart(LAYOUT, "gateway", names) == Goal(hosts=("a",), servers=(), gateway="a")
    assert goal_of_restart(None, None, ["a", "b"]) == Goal(hosts=("a", "b"), servers=("a",))


@pytest.mark.parametrize(
    ("layout", "part", "names", "said"),
    [
        (LAYOUT, "2", ["a", "b", "c", "d"], "There is no replica '2'. There are 0, 1."),
        (LAYOUT, "1", ["a", "b", "c"], "d must be named as well. The cluster has a, b, c, d."),
        (LAYOUT, None, ["a", "b"], "c, d must be named as well"),
        (None, "1", ["a", "b"], "There is no replica '1'. `phalanx up --replicas N` starts several."),
    ],
)
def test_what_cannot_be_restarted(layout, part, names, said):
    with pytest.raises(ConfigError) as refused:
        goal_of_restart(layout, part, names)
    assert said in f"{refused.value.message} {refused.value.remedy}"


def test_hosts_whose_processes_run_know_the_replicas_best():
    old = HostReport(
        status=HostStatus(host="x", role="agent"), layout=ReplicaLayout(replicas={"9": ("x",)}, gateway="x")
    )
    new = HostReport(status=UP, layout=LAYOUT)
    assert layout_in([old, ClusterError("off"), new]) == LAYOUT
    assert layout_in([HostReport(status=UP)]) is None


def rows(*arguments) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=200).print(status_table(*arguments))
    return out.getvalue().splitlines()


def test_status_says_which_replica_is_down_and_why():
    found = {"a": UP, "b": AGENT, "c": ClusterError("c: The host is off."), "d": AGENT, "spare": HostStatus(host="s")}
    lost = replace(GATEWAY.process, health=ServerHealth(ok=True, phase="ok", reason="replica 1 cannot be reached"))
    said = rows(found, LAYOUT, GatewayStatus(process=lost, replicas={"0": "ok", "1": "cannot be reached"}))
    assert [line.split()[:2] for line in said] == [
        ["replica:rank", "host"], ["0:0", "a"], ["0:1", "b"], ["1:0", "c"], ["1:1", "d"], ["gateway", "a"]
    ]  # fmt: skip
    assert "unreachable" in said[3] and "The host is off" in said[3]
    assert "1 of 2 replicas" in said[5] and "replica 1 cannot be reached" in said[5]


@pytest.mark.parametrize(
    ("host", "word"), [(UP, "down"), (ClusterError("a: off"), "unreachable"), (None, "connecting")]
)
def test_a_gateway_that_says_nothing_has_a_row(host, word):
    (line,) = (line for line in rows({"a": host}, LAYOUT, None) if line.startswith("gateway"))
    assert word in line


def test_the_table_of_one_group_is_as_it_was():
    said = rows({"a": UP, "b": AGENT})
    assert [line.split()[:2] for line in said] == [["rank", "host"], ["0", "a"], ["1", "b"]]


def test_status_says_which_host_has_which_stage_and_layers():
    ranks = [{"rank": 0, "stage": 1, "layers": [20, 60]}, {"rank": 1, "stage": 0, "layers": [0, 19]}]
    staged = replace(UP, health=ServerHealth(ok=True, phase="ok", ranks=ranks))
    said = rows({"a": staged, "b": AGENT})
    assert "1: layers 20 to 60  a" in said[1] and "0: layers 0 to 19   b" in said[2]
    said = rows({"a": UP, "b": AGENT, "c": staged, "d": AGENT}, LAYOUT, GATEWAY)
    assert "0: layers 0 to 19   d" in said[4] and [line.split()[1] for line in said[1:3]] == ["a", "b"]
    assert len(rows({"a": staged})) == 2  # of one host that is asked alone
