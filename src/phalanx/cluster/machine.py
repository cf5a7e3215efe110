"""Reads facts about this machine from the system's own tools: memory, addresses, RDMA ports, bridges.

On macOS: sysctl, vm_stat, ifconfig, networksetup, rdma_ctl, ibv_devices, ibv_devinfo. On Linux: /proc and `ip`. Does
not know which values are good (`checks.py`).
"""

from __future__ import annotations

import ipaddress
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta, Struct

from phalanx.dist.topology import Parts
from phalanx.errors import ClusterError
from phalanx.memory import MachineMemory, read_machine

TOOL_S = 10.0  # for a tool of the system; each answers in a fraction of a second
PARTS_S = 120.0  # to build the largest models from their headers
PAGE = 16384  # bytes, if vm_stat does not say


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface with an IPv4 address."""

    name: str
    address: str
    prefix: Annotated[int, Meta(ge=0, le=32)]  # bits of the network part
    kind: str = ""  # "Wi-Fi", "Thunderbolt 1", ...; "" if the system does not say

    def __post_init__(self) -> None:
        ipaddress.IPv4Address(self.address)  # what a host says becomes part of hostfiles and commands

    @property
    def network(self) -> str:
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


class Port(Struct, frozen=True, kw_only=True):
    """An RDMA port."""

    device: str
    state: str  # from ibv_devinfo: PORT_ACTIVE, PORT_DOWN, ...


class Rdma(Struct, frozen=True, kw_only=True):
    """RDMA on this machine."""

    enabled: bool | None  # None: no rdma_ctl here
    ports: list[Port] = []


class Bridge(Struct, frozen=True, kw_only=True):
    """bridge0 of macOS."""

    up: bool
    members: list[str]


@cache
def is_mac() -> bool:
    """Whether this is macOS, or a test that replaces `sysctl` to look like it."""
    return platform.system() == "Darwin" or tool("sysctl", "-n", "kern.ostype").strip() == "Darwin"


def tool(*command: str) -> str:
    """The output of a system tool; "" if it is not installed, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def wired_bytes() -> int:
    """Bytes of memory that cannot be paged out (macOS, `vm_stat`), or that are in use (Linux)."""
    text = tool("vm_stat") if is_mac() else ""
    found = re.search(r"Pages wired down:\s+(\d+)", text)
    if found is None:
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
    page = re.search(r"page size of (\d+) bytes", text)
    return int(found[1]) * (int(page[1]) if page else PAGE)


def physical_bytes() -> int:
    """Bytes of this machine's memory."""
    text = tool("sysctl", "-n", "hw.memsize") if is_mac() else ""
    return int(text) if text.strip().isdecimal() else int(psutil.virtual_memory().total)


def rank_memory() -> MachineMemory:
    """Memory that a rank could use on this machine, as a separate process asks MLX; without MLX, the host's memory."""
    text = tool(sys.executable, "-P", "-m", "phalanx.model.device_memory")
    try:
        return msgspec.json.decode(text, type=MachineMemory)
    except msgspec.DecodeError:
        return read_machine()


def stage_parts(path: str) -> Parts:
    """The parts of a model that stages divide, as a separate process reads them with MLX.

    Raises:
        ClusterError: it cannot be cut, or read; says why.
    """
    command = [sys.executable, "-P", "-m", "phalanx.model.loading.stage_parts", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"The headers of {path} were not read within {PARTS_S:g} s.") from error
    try:
        return msgspec.json.decode(done.stdout, type=Parts)
    except msgspec.DecodeError as error:
        raise ClusterError(done.stderr.strip().rpartition("\n")[2] or f"{path} cannot be read.") from error


def wired_limit_mb() -> int:
    """macOS's `iogpu.wired_limit_mb`, in MiB; 0 where it is not set."""
    text = tool("sysctl", "-n", "iogpu.wired_limit_mb").strip()
    return int(text) if text.isdecimal() else 0


def interfaces() -> list[Interface]:
    """The interfaces with an IPv4 address, except loopback."""
    found = parse_ifconfig(tool("ifconfig")) if is_mac() else parse_ip(tool("ip", "-j", "-4", "address"))
    kinds = parse_ports(tool("networksetup", "-listallhardwareports")) if is_mac() else {}
    return [
        Interface(name=each.name, address=each.address, prefix=each.prefix, kind=kinds.get(each.name, ""))
        for each in found
        if not each.address.startswith("127.")
    ]


def thunderbolt() -> list[str]:
    """Names of the Thunderbolt interfaces (macOS)."""
    ports = parse_ports(tool("networksetup", "-listallhardwareports"))
    return [name for name, kind in ports.items() if kind.startswith("Thunderbolt") and "Bridge" not in kind]


def bridge() -> Bridge | None:
    """bridge0, if there is one."""
    return parse_bridge(tool("ifconfig", "bridge0")) if is_mac() else None


def rdma() -> Rdma:
    """Whether RDMA is enabled, and its devices; without the tools that say so, not known and none."""
    status = tool("rdma_ctl", "status")
    enabled = (
        None if shutil.which("rdma_ctl") is None else "enabled" in status.lower() and "disabled" not in status.lower()
    )
    return Rdma(enabled=enabled, ports=parse_devinfo(tool("ibv_devinfo")))


# Parsers of the tools' output --------------------------------------------------------------------------------------


def parse_ifconfig(text: str) -> list[Interface]:
    """The interfaces in the output of macOS's `ifconfig`."""
    found, name = [], ""
    for line in text.splitlines():
        if head := re.match(r"(\w+): flags=", line):
            name = head[1]
        elif inet := re.match(r"\s+inet (\S+) netmask (0x[0-9a-f]+)", line):
            found.append(Interface(name=name, address=inet[1], prefix=int(inet[2], 16).bit_count()))
    return found


def parse_bridge(text: str) -> Bridge | None:
    """The flags and members in the output of `ifconfig bridge0`."""
    head = re.match(r"\w+: flags=\w+<([^>]*)>", text)
    if head is None:
        return None
    return Bridge(up="UP" in head[1].split(","), members=re.findall(r"member: (\w+)", text))


def parse_ip(text: str) -> list[Interface]:
    """The interfaces in the output of `ip -j -4 address`."""
    return [
        Interface(name=link["ifname"], address=entry["local"], prefix=entry["prefixlen"])
        for link in (json.loads(text) if text.strip() else [])
        for entry in link.get("addr_info", [])
    ]


def parse_ports(text: str) -> dict[str, str]:
    """Interface -> hardware port, in the output of `networksetup -listallhardwareports`."""
    return {name: kind.strip() for kind, name in re.findall(r"Hardware Port: (.+)\nDevice: (\w+)", text)}


def parse_devinfo(text: str) -> list[Port]:
    """The ports in the output of `ibv_devinfo`."""
    found, device = [], ""
    for line in text.splitlines():
        if head := re.match(r"hca_id:\s*(\S+)", line):
            device = head[1]
        elif state := re.match(r"\s+state:\s*(\S+)", line):
            found.append(Port(device=device, state=state[1]))
    return found


def wifi(found: Sequence[Interface]) -> Interface | None:
    """The Wi-Fi interface, if it has an address."""
    return next((each for each in found if each.kind == "Wi-Fi"), None)
