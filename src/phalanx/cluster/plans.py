"""Plans one group of ranks: what each of its hosts starts, with which flags, files and credentials.

`lifecycle.py` brings the plan to the hosts; `deployment.py` combines several groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.argument_flags import flag_value, split_flag
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.shape import shape_of
from phalanx.cluster.ssh import Remote
from phalanx.cluster.supervisor import Spec
from phalanx.config import AGENT_PORT, CREDENTIALS_FILE, DEFAULT_PORT, MAX_RANKS, Backend, ClusterConfig
from phalanx.environment import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from phalanx.errors import ConfigError
from phalanx.rank_variables import read_variable
from phalanx.tls.certificates import Certificate, make_certificate, make_credentials
from phalanx.tls.host_credentials import Credentials

RUN = ".phalanx/run"
CLUSTER_FILE = "cluster.json"
HTTPS_FILE = "server.pem"
LOGS = ".phalanx/logs"
DRAIN_S = "8"  # less than the time after which `down` kills


class Plan(Struct, frozen=True, kw_only=True):
    """One group of ranks, and its server."""

    hostfile: Hostfile
    serve: tuple[str, ...] = ("demo",)  # arguments of `phalanx serve`, without API keys
    api_keys: tuple[str, ...] = ()  # go to the server in its environment: command lines are public
    admin_key: str | None = None  # as these
    https: Certificate | None = None  # of the server, with its key
    backend: str = "auto"
    envs: tuple[str, ...] = ()
    timeout_s: float = 600.0
    log_dir: str = LOGS
    agent_port: int = AGENT_PORT
    python: str = ""  # as `Remote` takes it

    @property
    def asks_for_keys(self) -> bool:
        """Whether the server's clients need a key."""
        return bool(self.api_keys) or flag_value(self.serve, "--api-key-file") is not None

    def remotes(self) -> list[Remote]:
        return [Remote(host.ssh, python=self.python) for host in self.hostfile.hosts]


OURS = ("--cluster", "--backend", "--attach")
"""Flags of `serve` that `up` sets itself."""


def check(plan: Plan) -> Plan:
    """Check a plan, and return it.

    Raises:
        ConfigError: names the flag.
    """
    shape = shape_of(plan.serve)
    for word in shape.rest:
        if word.partition("=")[0] in OURS:
            raise ConfigError(
                f"{word} after `--`: `up` sets it itself.", remedy="Use --num-ranks and --backend before the `--`."
            )
    if max(shape.widths_of(len(plan.hostfile.hosts))) == 1 < shape.stages and plan.backend != "auto":
        raise ConfigError(
            f"--backend {plan.backend} is the collective backend of a stage, but each stage has one host.",
            remedy="Leave it out.",
        )
    if len(plan.hostfile.hosts) > MAX_RANKS:
        raise ConfigError(
            f"{len(plan.hostfile.hosts)} hosts are too many for one group; {MAX_RANKS} at most.",
            remedy="Use --num-ranks, or --replicas for several groups.",
        )
    check_keys(plan.api_keys, "--api-key", plan.serve)
    check_keys([] if plan.admin_key is None else [plan.admin_key], "--admin-key", plan.serve)
    for entry in plan.envs:
        read_variable(entry, "--env")
    port_in(plan.serve, DEFAULT_PORT)
    backend = backend_of(plan)
    if backend not in ("auto", *get_args(Backend)):
        raise ConfigError(f"--backend {backend} is not one.", remedy=f"Known: {', '.join(get_args(Backend))}.")
    if backend in ("jaccl", "jaccl-ring") and not all(host.rdma for host in plan.hostfile.hosts):
        raise ConfigError(
            f"--backend {backend} needs `rdma` for every host in the hostfile.",
            remedy="`phalanx hostfile --hosts ...` finds the devices; or use --backend ring.",
        )
    return plan


def port_in(words: Sequence[str], default: int) -> int:
    """The port that the arguments of `serve` or `gateway` name.

    Raises:
        ConfigError: it is not a port, or 0.
    """
    port = flag_value(words, "--port") or str(default)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--port {port}: a cluster needs a port that is known before.", remedy="Give 1 to 65535.")
    return int(port)


def split_keys(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of `serve` or `gateway` without `--api-key`, and the keys that it gave."""
    return split_flag(words, "--api-key")


def with_https(plan: Plan) -> Plan:
    """The plan with a new certificate, for all names and addresses of the first host.

    Raises:
        ConfigError: the server is to have a certificate of the user's.
    """
    if flag_value(plan.serve, "--ssl-certfile") is not None:
        raise ConfigError("--ssl and --ssl-certfile exclude each other.", remedy="Give one of them.")
    return replace(plan, https=certificate_of(plan.hostfile.hosts[0]))


def certificate_of(host: Host) -> Certificate:
    """A new certificate for all names and addresses of a host."""
    name = host.ssh.rpartition("@")[2]
    addresses = [name, host.address, *host.ips, "localhost", "127.0.0.1", "::1"]
    return make_certificate(name, addresses=addresses)


def check_keys(keys: Sequence[str], name: str, words: Sequence[str]) -> None:
    """Check that the keys of a flag can be passed in an environment variable, which counts only without a file.

    Args:
        words: the other arguments of `serve` or `gateway`.

    Raises:
        ConfigError: one cannot, which is not shown, or there is a file too.
    """
    if keys and flag_value(words, f"{name}-file") is not None:
        raise ConfigError(f"{name} and {name}-file exclude each other for `up`.", remedy="Give one of them.")
    for key in keys:
        if not key.isprintable() or len(key.split()) != 1 or key.strip() != key:
            raise ConfigError(
                f"{name}: a key is empty, or has spaces or control characters.",
                remedy="Choose another, such as `openssl rand -hex 16` prints.",
            )


def backend_of(plan: Plan) -> str:
    """The backend of the flag, else of the hostfile, else auto. Stages of one host need no all-reduce, and
    the hostfile's does not matter."""
    if plan.backend != "auto":
        return plan.backend
    has_sums = max(shape_of(plan.serve).widths_of(len(plan.hostfile.hosts))) > 1
    return (plan.hostfile.backend if has_sums else None) or "auto"


def model_of(plan: Plan) -> str:
    """The model to serve: the first word after `--`, unless that is a flag; else the demo."""
    return "demo" if not plan.serve or plan.serve[0].startswith("-") else plan.serve[0]


def specs(plan: Plan, credentials: Sequence[Credentials]) -> list[Spec]:
    """The specification of each host's supervisor, in rank order.

    Args:
        credentials: of each host; unused for a single one, which connects to no other.
    """
    hosts = plan.hostfile.placed()
    variables = dict(entry.partition("=")[::2] for entry in (*plan.hostfile.envs, *plan.envs))
    cluster = ClusterConfig(
        hosts=hosts, agent_port=plan.agent_port, envs=tuple(f"{name}={value}" for name, value in variables.items())
    )
    serve = ["serve", *plan.serve]
    if flag_value(serve, "--drain-seconds") is None:
        serve += ["--drain-seconds", DRAIN_S]
    files = {}
    if len(hosts) > 1:
        shape = shape_of(serve)
        serve = [*shape.rest, *shape.flags(len(hosts))]
        serve += ["--backend", backend_of(plan), "--cluster", f"{RUN}/{CLUSTER_FILE}"]
        files[CLUSTER_FILE] = msgspec.json.encode(cluster).decode()
    log = f"{plan.log_dir}/rank-{{}}.log"
    if plan.https is not None:
        serve += ["--ssl-certfile", f"{RUN}/{HTTPS_FILE}"]
        files[HTTPS_FILE] = plan.https.certificate + plan.https.key
    keys = {API_KEY_VARIABLE: " ".join(plan.api_keys)} if plan.api_keys else {}
    keys |= {} if plan.admin_key is None else {ADMIN_KEY_VARIABLE: plan.admin_key}
    specs = [Spec(role="server", command=serve, variables=variables | keys, log=log.format(0), files=files)]
    for rank, host in enumerate(hosts[1:], 1):
        command = ["agent", "--host", host.address, "--port", str(plan.agent_port), "--directory", f"{RUN}/agent"]
        command += ["--credentials", f"{RUN}/{CREDENTIALS_FILE}"]
        specs.append(Spec(role="agent", command=command, variables=variables, log=log.format(rank)))
    return with_credentials(specs, credentials)


def new_credentials(names: Sequence[str]) -> list[Credentials]:
    """Credentials for every host of a cluster, which no earlier cluster knew; none for a single host."""
    return make_credentials(names) if len(names) > 1 else []


def with_credentials(specs: Sequence[Spec], credentials: Sequence[Credentials]) -> list[Spec]:
    """The specifications, each with the credentials of its host; without any, if there are none."""
    return [replace(spec, credentials=own) for spec, own in zip_longest(specs, credentials)]
