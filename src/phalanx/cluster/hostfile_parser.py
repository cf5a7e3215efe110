"""Reads, checks and writes hostfiles in the format of `mlx.launch`.

    {"backend": "jaccl", "envs": ["K=V"],
     "hosts": [{"ssh": "studio1", "ips": ["192.168.1.11"], "rdma": [null, "rdma_en5"]}, ...]}

A plain list of hosts is a hostfile without backend and envs. `rdma[j]` of host i names the device or devices of host i
towards host j; null for itself. `gpus`, which mlx.launch does not know, is a host's number of NVIDIA GPUs. `doctor`
finds out whether hosts and devices exist.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.check_results import MAX_GPUS
from phalanx.cluster.replica_layout import MAX_HOSTS
from phalanx.config import Backend, HostConfig
from phalanx.errors import ConfigError
from phalanx.rank_variables import read_variable

NAME_CHARS = 255  # as of a name in DNS
FORBIDDEN = re.compile(r"""[\s'`"$;&<>|(){}]""")
ZONE = re.compile(r"[\w.-]+", re.ASCII)

Devices = str | tuple[str, ...] | None


class Host(Struct, frozen=True, kw_only=True):
    """One machine. The first of `ips` is its address for control connections; a ring uses all of them."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[Devices, ...] = ()
    gpus: int = 0

    @property
    def address(self) -> str:
        """The address at which other hosts reach it: its first IP, else its name."""
        return self.ips[0] if self.ips else self.ssh.rpartition("@")[2]


class Hostfile(Struct, frozen=True, kw_only=True):
    """The machines of a cluster, in rank order."""

    hosts: tuple[Host, ...]
    backend: str | None = None
    envs: tuple[str, ...] = ()

    def first(self, count: int) -> Hostfile:
        """A hostfile of the first `count` hosts.

        Raises:
            ConfigError: there are fewer.
        """
        if not 1 <= count <= len(self.hosts):
            raise ConfigError(
                f"--num-ranks {count}, but there are {len(self.hosts)} hosts.",
                remedy="Every host runs one rank: name more hosts, or lower --num-ranks.",
            )
        return self.part(0, count)

    def part(self, begin: int, end: int) -> Hostfile:
        """A hostfile of the hosts from `begin` on and before `end`, with their part of the device matrix."""
        return replace(self, hosts=tuple(replace(host, rdma=host.rdma[begin:end]) for host in self.hosts[begin:end]))

    def placed(self) -> tuple[HostConfig, ...]:
        """The hosts as the engine's configuration."""
        return tuple(
            HostConfig(
                name=host.ssh, address=host.address, ips=host.ips or (host.address,), rdma=host.rdma, gpus=host.gpus
            )
            for host in self.hosts
        )


def from_names(text: str) -> Hostfile:
    """Parse the value `a,b` of `--hosts`: names or addresses for ssh.

    Raises:
        ConfigError: a name is empty or occurs twice.
    """
    hosts = tuple(Host(ssh=name.strip(), ips=_own_ip(name.strip())) for name in text.split(","))
    return _checked(Hostfile(hosts=hosts), "--hosts")


def _own_ip(name: str) -> tuple[str, ...]:
    text = name.rpartition("@")[2]
    try:
        return (str(ipaddress.ip_address(text)),)
    except ValueError:
        return ()


def parse(text: str, where: str) -> Hostfile:
    """Parse a hostfile.

    Args:
        where: the file's name, for messages.

    Raises:
        ConfigError: names the file, the host and the field, and says what it should be.
    """
    try:
        value = json.loads(text, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}.", remedy="`phalanx hostfile` writes one.") from error
    if isinstance(value, list):
        value = {"hosts": value}
    if not isinstance(value, dict) or not isinstance(value.get("hosts"), list):
        raise ConfigError(f"{where} has no list `hosts`.", remedy="`phalanx hostfile` writes one.")
    unknown = set(value) - {"backend", "envs", "hosts"}
    if unknown:
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}.", remedy="Known: backend, envs, hosts.")
    backend, envs = value.get("backend"), value.get("envs", [])
    if backend is not None and backend not in ("any", *get_args(Backend)):
        raise ConfigError(
            f"{where}: backend {backend!r} is not one.", remedy=f"Known: any, {', '.join(get_args(Backend))}."
        )
    if not isinstance(envs, list) or not all(isinstance(entry, str) for entry in envs):
        raise ConfigError(f"{where}: envs is not a list of NAME=value.")
    for entry in envs:
        read_variable(entry, f"{where}: envs")
    hosts = tuple(_host(entry, f"{where}: host {index}") for index, entry in enumerate(value["hosts"]))
    return _checked(Hostfile(hosts=hosts, backend=None if backend == "any" else backend, envs=tuple(envs)), where)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; one of two fields of the same name would count for nothing."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"a field {twice!r} is there twice in one object")
    return fields


def _host(value: Any, where: str) -> Host:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not an object.", remedy='Write {"ssh": NAME, "ips": [ADDRESS]}.')
    unknown = set(value) - {"ssh", "ips", "rdma", "gpus"}
    if unknown:
        raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}.", remedy="Known: ssh, ips, rdma, gpus.")
    ssh, ips, rdma, gpus = value.get("ssh"), value.get("ips", []), value.get("rdma", []), value.get("gpus", 0)
    if not isinstance(ssh, str) or not ssh:
        raise ConfigError(f"{where}: `ssh` is not a name.", remedy="It is what you would type after `ssh`.")
    if not isinstance(ips, list) or not all(_is_ip(ip) for ip in ips):
        raise ConfigError(f"{where} ({ssh}): `ips` is not a list of IP addresses: {ips!r}.")
    if not isinstance(rdma, list):
        raise ConfigError(f"{where} ({ssh}): `rdma` is not a list.")
    if type(gpus) is not int or not 0 <= gpus <= MAX_GPUS:
        raise ConfigError(f"{where} ({ssh}): `gpus` is not a number of GPUs: {gpus!r}.")
    devices = tuple(_devices(entry, f"{where} ({ssh})") for entry in rdma)
    return Host(ssh=ssh, ips=tuple(ips), rdma=devices, gpus=gpus)


def _is_ip(value: Any) -> bool:
    """Whether it is an address that one machine can have."""
    try:
        ip = ipaddress.ip_address(value) if isinstance(value, str) else None
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None and not ZONE.fullmatch(ip.scope_id):
        return False
    return ip is not None and not ip.is_unspecified and not ip.is_multicast


def _devices(value: Any, where: str) -> Devices:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, list) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise ConfigError(f"{where}: `rdma` has {value!r}.", remedy="Each entry is null, a device, or a list of devices.")


def _checked(hostfile: Hostfile, where: str) -> Hostfile:
    """Check what concerns several hosts or fields together."""
    hosts = hostfile.hosts
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise ConfigError(f"{where} names {len(hosts)} hosts; 1 to {MAX_HOSTS} make a cluster.")
    for name in (host.ssh for host in hosts):
        if not name:
            raise ConfigError(f"{where}: a host has no name.", remedy="Write a,b,c.")
        check_name(name, where)
    ips = [str(ipaddress.ip_address(ip)) for host in hosts for ip in host.ips]  # ::1 has many spellings
    for field, values in (("ssh", [host.ssh for host in hosts]), ("ips", ips)):
        if twice := next((value for value, count in Counter(values).items() if count > 1), None):
            raise ConfigError(f"{where}: {field} {twice!r} is there twice.", remedy="Every host runs one rank.")
    if any(host.rdma for host in hosts) or (hostfile.backend or "").startswith("jaccl"):
        check_matrix([list(host.rdma) for host in hosts], [host.ssh for host in hosts], where)
    return hostfile


def check_name(name: str, where: str) -> None:
    """Check a host's name. Those of other characters are refused as newer versions of ssh refuse them: ssh puts a name
    into the shell commands of the user's ProxyCommand.

    Raises:
        ConfigError: names `where` and the host.
    """
    user, _, host = name.removeprefix("ssh://").rpartition("@")
    odd = FORBIDDEN.search(name) or "\\" in host or "-" in (user[:1], host[:1])  # DOMAIN\\user is a user
    if len(name) > NAME_CHARS or not name.isprintable() or odd:
        raise ConfigError(
            f"{where}: {name[:80]!r} is not the name of a host.", remedy="It is what you would type after `ssh`."
        )


def check_matrix(matrix: Sequence[Sequence[object]], names: Sequence[str], where: str) -> None:
    """Check a device matrix: N x N, null on its diagonal, and devices at both ends of a cable or at none.

    Raises:
        ConfigError: names the two hosts.
    """
    size = len(names)
    for i, row in enumerate(matrix):
        if len(row) != size:
            raise ConfigError(
                f"{where}: `rdma` of {names[i]} has {len(row)} entries for {size} hosts.",
                remedy="Entry j names the device towards host j, null for the host itself.",
            )
        if row[i] is not None:
            raise ConfigError(f"{where}: `rdma` of {names[i]} names a device towards itself.", remedy="Write null.")
    for i in range(size):
        for j in range(i):
            if (matrix[i][j] is None) != (matrix[j][i] is None):
                has, lacks = (i, j) if matrix[j][i] is None else (j, i)
                raise ConfigError(
                    f"{where}: {names[has]} has an RDMA device towards {names[lacks]}, but not the other way round.",
                    remedy="A cable has two ends; name the device of each.",
                )


def render(hostfile: Hostfile) -> str:
    """The hostfile's text, which `parse` and `mlx.launch` read."""
    value: dict[str, Any] = {} if hostfile.backend is None else {"backend": hostfile.backend}
    value["envs"] = list(hostfile.envs)
    lines = []
    for host in hostfile.hosts:
        entry: dict[str, Any] = {"ssh": host.ssh, "ips": list(host.ips)}
        if host.rdma:
            entry["rdma"] = list(host.rdma)
        if host.gpus:
            entry["gpus"] = host.gpus
        lines.append("    " + json.dumps(entry))
    head = json.dumps(value)[1:-1]
    return "{" + head + ',\n  "hosts": [\n' + ",\n".join(lines) + "\n  ]}\n"
