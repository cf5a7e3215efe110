"""Plans what `phalanx up` starts: one group of ranks with a server, or several groups (replicas) behind a gateway.

The first hosts become groups of equal size, in the hostfile's order, each planned as if alone (`plans.py`). Each
server listens where the other hosts reach it, with a key that the gateway reads from its file of replicas.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.argument_flags import flag_value
from phalanx.cluster.host_status import serve_address
from phalanx.cluster.hostfile_parser import Host
from phalanx.cluster.plans import (
    DRAIN_S,
    HTTPS_FILE,
    Plan,
    certificate_of,
    check,
    check_keys,
    new_credentials,
    port_in,
    specs,
    with_https,
)
from phalanx.cluster.replica_layout import REPLICAS_FILE, ReplicaLayout
from phalanx.cluster.shape import Shape, shape_of
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import GATEWAY, Spec
from phalanx.config import DEFAULT_PORT, GATEWAY_PORT
from phalanx.environment import API_KEY_VARIABLE, GATEWAY_ADMIN_KEY_VARIABLE
from phalanx.errors import ConfigError
from phalanx.tls.certificates import Certificate

GATEWAY_RUN = f".phalanx/{GATEWAY}"
WORKERS_FILE = "workers.pem"
OURS = (
    "--replicas", "--worker-urls", "--worker-key", "--worker-key-file", "--worker-admin-key", "--worker-admin-key-file"
)  # fmt: skip
"""Flags of `gateway` that `up` sets itself."""
GATEWAY_DEFAULTS = {"--health-check-interval-secs": "1", "--shutdown-grace-period-secs": DRAIN_S}
"""Unless the user gives others. A check costs a server of ours next to nothing, and a second is soon enough."""


class GatewayPlan(Struct, frozen=True, kw_only=True):
    """A gateway to start before several replicas."""

    host: Host
    flags: tuple[str, ...] = ()  # arguments of `phalanx gateway`, without keys
    api_keys: tuple[str, ...] = ()  # of clients
    admin_key: str | None = None  # of its /admin
    https: Certificate | None = None  # with its key

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients need a key."""
        files = (flag_value(self.flags, name) for name in ("--keys", "--api-key-file"))
        return bool(self.api_keys) or any(file is not None for file in files)


class Deployment(Struct, frozen=True, kw_only=True):
    """See the module's docstring. Group i is the replica of this name; without a gateway there is one group."""

    groups: tuple[Plan, ...]
    gateway: GatewayPlan | None = None

    @property
    def layout(self) -> ReplicaLayout | None:
        """The layout that hosts keep of several replicas; None without a gateway."""
        if self.gateway is None:
            return None
        replicas = {
            str(number): tuple(host.ssh for host in plan.hostfile.hosts) for number, plan in enumerate(self.groups)
        }
        return ReplicaLayout(replicas=replicas, gateway=self.gateway.host.ssh)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host, once: those of the groups, then the gateway's if it is another one."""
        found = [host for plan in self.groups for host in plan.hostfile.hosts]
        if self.gateway is not None and self.gateway.host.ssh not in [host.ssh for host in found]:
            found.append(self.gateway.host)
        return tuple(found)

    def remotes(self) -> list[Remote]:
        """How to reach every host."""
        return [Remote(host.ssh, python=self.groups[0].python) for host in self.hosts]


class DeploymentKeys(Struct, frozen=True, kw_only=True):
    """Secrets of one cluster of replicas, made anew by each `up`. No server has another one's."""

    servers: tuple[str, ...]  # API key of each replica's server, where the user gives them none
    admin: tuple[str, ...]  # likewise; with it the gateway moves streams from one server to another
    status: str  # API key with which `status` asks the gateway, where clients' keys are in a file


def new_keys(replicas: int) -> DeploymentKeys:
    """Keys that no earlier cluster knew."""
    servers, admin = (tuple(secrets.token_hex(32) for _ in range(replicas)) for _ in range(2))
    return DeploymentKeys(servers=servers, admin=admin, status=secrets.token_hex(32))


def split_flags(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of `serve`, and those of `gateway`, which stand after a second `--`."""
    at = list(words).index("--") if "--" in words else len(words)
    return tuple(words[:at]), tuple(words[at + 1 :])


def deploy(
    plan: Plan,
    *,
    replicas: int,
    gateway_host: str | None,
    flags: Sequence[str],
    keys: Sequence[str],
    admin_key: str | None = None,
) -> Deployment:
    """Divide the hosts of a plan among replicas, and check everything that can be checked before hosts are asked.

    Args:
        plan: its `serve` may have --tp and --pp, the hosts of one replica.
        replicas: 2 or more.
        gateway_host: a host of the plan; None: the first.
        flags: of `gateway`, without keys.
        keys: of clients.
        admin_key: of the gateway's /admin.

    Raises:
        ConfigError: names the flag, and what is needed.
    """
    shape = shape_of(plan.serve)
    _check_serve(shape.rest)
    hosts = plan.hostfile.hosts
    size = _size(shape, replicas, len(hosts))
    serve = shape.rest if shape.stages == 1 else (*shape.rest, *shape.flags(size))
    groups = []
    for number in range(replicas):
        part = plan.hostfile.part(number * size, (number + 1) * size)
        words = (*serve, "--host", part.hosts[0].address)
        groups.append(check(replace(plan, hostfile=part, serve=words)))
    name = gateway_host or hosts[0].ssh
    host = next((host for host in hosts if host.ssh == name), None)
    if host is None:
        raise ConfigError(
            f"--gateway-host {name}: there is no such host.",
            remedy=f"The gateway runs on one of {', '.join(host.ssh for host in hosts)}.",
        )
    gateway = GatewayPlan(host=host, flags=tuple(flags), api_keys=tuple(keys), admin_key=admin_key)
    _check_gateway(gateway, groups)
    return Deployment(groups=tuple(groups), gateway=gateway)


def _check_serve(words: Sequence[str]) -> None:
    """Refuse what would keep the gateway from its servers."""
    if flag_value(words, "--host") is not None:
        raise ConfigError(
            "--host after `--`: with --replicas, servers listen where the gateway reaches them.",
            remedy="What concerns clients is the gateway's, and stands after a second `--`: `-- MODEL -- --host ...`.",
        )
    for name in ("--api-key", "--admin-key"):
        if flag_value(words, f"{name}-file") is not None:
            raise ConfigError(
                f"{name}-file after `--`: with --replicas, the gateway has to know a key of the servers.",
                remedy=f"Leave it out, and they get a key of their own; or use {name}.",
            )


def _size(shape: Shape, replicas: int, n_hosts: int) -> int:
    """Hosts of one replica: --tp and --pp, else an equal share of all."""
    if size := sum(shape.widths):
        if replicas * size > n_hosts:
            stages = f" --pp {shape.stages}" if shape.stages > 1 else ""
            raise ConfigError(
                f"--replicas {replicas} of --tp {','.join(map(str, dict.fromkeys(shape.widths)))}{stages} need "
                f"{replicas * size} hosts, but there are {n_hosts}.",
                remedy="Every host runs one rank: name more hosts, or lower one of them.",
            )
        return size
    if n_hosts % replicas:
        raise ConfigError(
            f"{'1 host' if n_hosts == 1 else f'{n_hosts} hosts'} cannot be divided among --replicas {replicas}.",
            remedy="Say after `--` how many hosts one has: `-- MODEL --tp N`.",
        )
    return n_hosts // replicas


def _check_gateway(gateway: GatewayPlan, groups: Sequence[Plan]) -> None:
    for word in gateway.flags:
        if word.partition("=")[0] in OURS:
            raise ConfigError(f"{word} after the second `--`: `up` sets it itself.")
    check_keys(gateway.api_keys, "--api-key", gateway.flags)
    check_keys([] if gateway.admin_key is None else [gateway.admin_key], "--admin-key", gateway.flags)
    port = port_in(gateway.flags, GATEWAY_PORT)
    for plan in groups:
        if not all(key.isascii() for key in (*plan.api_keys, plan.admin_key or "")):
            raise ConfigError("A key of the servers is not ASCII.", remedy="The gateway could not send it.")
        server, *others = plan.hostfile.hosts
        taken = {server.ssh: port_in(plan.serve, DEFAULT_PORT), **{host.ssh: plan.agent_port for host in others}}
        if taken.get(gateway.host.ssh) == port:
            what = "server" if gateway.host.ssh == server.ssh else "agent"
            raise ConfigError(
                f"--port {port}: the gateway's port is that of the {what} on {gateway.host.ssh}.",
                remedy="Give the gateway another one: `-- MODEL -- --port N`.",
            )


def with_https_everywhere(deployment: Deployment) -> Deployment:
    """The deployment with new certificates: of the server, or of all servers and the gateway.

    Raises:
        ConfigError: there is to be a certificate of the user's.
    """
    groups = tuple(with_https(plan) for plan in deployment.groups)
    gateway = deployment.gateway
    if gateway is None:
        return replace(deployment, groups=groups)
    for name in ("--ssl-certfile", "--worker-ca"):
        if flag_value(gateway.flags, name) is not None:
            raise ConfigError(f"--ssl and {name} exclude each other.", remedy="Give one of them.")
    return Deployment(groups=groups, gateway=replace(gateway, https=certificate_of(gateway.host)))


def certificate_for_clients(deployment: Deployment) -> str:
    """The certificate for clients to trust, PEM, if `with_https_everywhere` made it."""
    https = deployment.groups[0].https if deployment.gateway is None else deployment.gateway.https
    assert https is not None
    return https.certificate


def url_of(deployment: Deployment) -> str:
    """The URL for clients; ends in /v1."""
    plan, gateway = deployment.groups[0], deployment.gateway
    if gateway is None:
        return _url(plan.hostfile.hosts[0], plan.serve, DEFAULT_PORT, secure=plan.https is not None) + "/v1"
    return _url(gateway.host, gateway.flags, GATEWAY_PORT, secure=gateway.https is not None) + "/v1"


def _url(host: Host, words: Sequence[str], default: int, *, secure: bool) -> str:
    bound, port = flag_value(words, "--host") or "127.0.0.1", serve_address(words, default)[1]
    where = host.address if bound in ("0.0.0.0", "::") else bound
    scheme = "https" if secure or flag_value(words, "--ssl-certfile") is not None else "http"
    return f"{scheme}://{f'[{where}]' if ':' in where else where}:{port}"


def placed(deployment: Deployment, keys: DeploymentKeys) -> list[tuple[str, Spec]]:
    """Every host with the specification of a supervisor there, group by group in rank order; last the gateway's."""
    layout = deployment.layout
    found: list[tuple[str, Spec]] = []
    for number, plan in enumerate(deployment.groups):
        names = [host.ssh for host in plan.hostfile.hosts]
        keyed = plan if layout is None else _keyed(plan, keys, number)
        for name, spec in zip(names, specs(keyed, new_credentials(names)), strict=True):
            found.append((name, replace(spec, layout=layout)))
    if deployment.gateway is not None:
        found.append((deployment.gateway.host.ssh, _gateway_spec(deployment, deployment.gateway, keys)))
    return found


def _keyed(plan: Plan, keys: DeploymentKeys, number: int) -> Plan:
    """The plan of a replica with keys of its server, which the gateway needs."""
    own, admin = plan.api_keys or (keys.servers[number],), plan.admin_key or keys.admin[number]
    return replace(plan, api_keys=own, admin_key=admin)


def _gateway_spec(deployment: Deployment, gateway: GatewayPlan, keys: DeploymentKeys) -> Spec:
    words = list(gateway.flags)
    for name, value in GATEWAY_DEFAULTS.items():
        if flag_value(words, name) is None:
            words += [name, value]
    words += ["--replicas", REPLICAS_FILE]
    files = {PurePosixPath(REPLICAS_FILE).name: replicas_text(deployment, keys)}
    if gateway.https is not None:
        words += ["--ssl-certfile", f"{GATEWAY_RUN}/{HTTPS_FILE}", "--worker-ca", f"{GATEWAY_RUN}/{WORKERS_FILE}"]
        files[HTTPS_FILE] = gateway.https.certificate + gateway.https.key
        files[WORKERS_FILE] = "".join(plan.https.certificate for plan in deployment.groups if plan.https is not None)
    accepted = gateway.api_keys
    if flag_value(words, "--keys") is not None:
        accepted = (*accepted, keys.status)
    variables = {API_KEY_VARIABLE: " ".join(accepted)} if accepted else {}
    variables |= {} if gateway.admin_key is None else {GATEWAY_ADMIN_KEY_VARIABLE: gateway.admin_key}
    return Spec(
        role=GATEWAY,
        command=[GATEWAY, *words],
        variables=variables,
        log=f"{deployment.groups[0].log_dir}/{GATEWAY}.log",
        files=files,
        layout=deployment.layout,
    )


def replicas_text(deployment: Deployment, keys: DeploymentKeys) -> str:
    """The gateway's file of replicas, TOML."""
    tables = []
    for number, plan in enumerate(deployment.groups):
        url = _url(plan.hostfile.hosts[0], plan.serve, DEFAULT_PORT, secure=plan.https is not None)
        keyed = _keyed(plan, keys, number)
        pairs = {"name": str(number), "url": url, "key": keyed.api_keys[0], "admin_key": keyed.admin_key}
        lines = [f"{name} = {json.dumps(value)}" for name, value in pairs.items()]  # JSON of ASCII is TOML as well
        tables.append("\n".join(["[[replica]]", *lines]) + "\n")
    return "\n".join(tables)
