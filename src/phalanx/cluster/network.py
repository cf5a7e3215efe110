"""Plans the network between hosts: static addresses on direct cables, and no bridge that contains them.

A plan is a list of commands per host, which the user sees before they run. This module refuses commands that must never
be run: `route` (kernel panics), taking an interface down or up (breaks the table of RDMA addresses until a reboot),
changing network locations (the Wi-Fi drops), and addresses inside the Wi-Fi's network. Runs nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from msgspec import Struct

from phalanx.cluster.check_results import HostFacts
from phalanx.cluster.hostfile_parser import check_name
from phalanx.cluster.machine import wifi
from phalanx.errors import ConfigError

NAME = "org.phalanx.net"
DAEMON = f"/Library/LaunchDaemons/{NAME}.plist"
LINK = "/etc/systemd/network/10-phalanx-{}.network"
BRIDGE = "bridge0"


class Node(Struct, frozen=True):
    """One end of a cable."""

    host: str
    interface: str
    address: str


class Cable(Struct, frozen=True):
    """A cable between two hosts: its ends share a network of their own."""

    a: Node
    b: Node
    network: str


class Steps(Struct, frozen=True, kw_only=True):
    """The commands of one host, and those that undo them."""

    host: str
    commands: list[list[str]]
    undo: list[list[str]]
    files: dict[str, str] = {}  # path -> text, written before the commands (--persist)
    after: list[list[str]] = []  # commands that activate the files
    undo_after: list[list[str]] = []


def parse_node(text: str) -> Node:
    """Parse `HOST:IFACE:IP`.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, rest = text.partition(":")
    interface, _, address = rest.partition(":")
    try:
        ipaddress.IPv4Address(address)
    except ValueError as error:
        raise ConfigError(
            f"--node {text!r}: {address or 'nothing'!r} is not an IPv4 address.", remedy="Write HOST:IFACE:IP."
        ) from error
    if not host or not interface.isalnum():
        raise ConfigError(f"--node {text!r} is not HOST:IFACE:IP.", remedy="For example studio1:en5:10.90.0.1.")
    check_name(host, "--node")
    return Node(host, interface, address)


def cables(nodes: Sequence[Node], prefix: int) -> list[Cable]:
    """Find the cables: two ends whose addresses are in one network of `prefix` bits.

    Raises:
        ConfigError: a network does not have exactly two ends on two hosts, an address is a network or broadcast
            address, or an address or interface occurs twice.
    """
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        network = ipaddress.ip_network(f"{node.address}/{prefix}", strict=False)
        if prefix < 31 and node.address in (str(network.network_address), str(network.broadcast_address)):
            raise ConfigError(
                f"{node.address} of {node.host} is the first or last address of {network}, which no host may have.",
                remedy=f"Use {network.network_address + 1} and {network.network_address + 2}.",
            )
        groups.setdefault(str(network), []).append(node)
    for field, values in (
        ("address", [node.address for node in nodes]),
        ("interface", [f"{node.host}:{node.interface}" for node in nodes]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"The {field} {twice} is there twice.", remedy="Every end of a cable has its own.")
    for name, ends in groups.items():
        if len(ends) != 2 or ends[0].host == ends[1].host:
            raise ConfigError(
                f"{name} has {len(ends)} ends: {', '.join(f'{e.host}:{e.interface}:{e.address}' for e in ends)}.",
                remedy="A cable joins two hosts, and needs a network of its own.",
            )
    return [Cable(ends[0], ends[1], name) for name, ends in groups.items()]


def steps(nodes: Sequence[Node], prefix: int, facts: Mapping[str, HostFacts], *, persist: bool) -> list[Steps]:
    """The plan of every host. With `persist`, it also applies after a reboot.

    Raises:
        ConfigError: an interface or address is the Wi-Fi's, or in its network; names host and interface.
    """
    plans = []
    for host in dict.fromkeys(node.host for node in nodes):
        own = [node for node in nodes if node.host == host]
        _refuse_wireless(own, prefix, facts[host])
        plan = _mac(host, own, prefix, facts[host]) if facts[host].system == "macOS" else _linux(host, own, prefix)
        if persist:
            plan = _persistent(plan, own, prefix, mac=facts[host].system == "macOS")
        for command in (*plan.commands, *plan.undo, *plan.after, *plan.undo_after):
            refuse(command)
        plans.append(plan)
    return plans


def _refuse_wireless(nodes: Sequence[Node], prefix: int, facts: HostFacts) -> None:
    wireless = wifi(facts.interfaces)
    if wireless is None:
        return
    for node in nodes:
        if node.interface == wireless.name:
            raise ConfigError(
                f"{node.interface} of {node.host} is its Wi-Fi.", remedy="Name a Thunderbolt or Ethernet interface."
            )
        network = ipaddress.ip_network(f"{node.address}/{prefix}", strict=False)
        if network.overlaps(ipaddress.ip_network(wireless.network)):
            raise ConfigError(
                f"{node.address} of {node.host} is inside its Wi-Fi's network {wireless.network}.",
                remedy="Take addresses that nothing else uses, such as 10.90.0.1 and 10.90.0.2.",
            )


def _mac(host: str, nodes: Sequence[Node], prefix: int, facts: HostFacts) -> Steps:
    mask = str(ipaddress.ip_network(f"0.0.0.0/{prefix}").netmask)
    commands, undo = [], []
    if facts.bridge is not None:
        bridged = [node.interface for node in nodes if node.interface in facts.bridge.members]
        commands += [["ifconfig", BRIDGE, "deletem", name] for name in bridged]
        undo += [["ifconfig", BRIDGE, "addm", name] for name in bridged]
        if facts.bridge.up:
            commands.append(["ifconfig", BRIDGE, "down"])
            undo.append(["ifconfig", BRIDGE, "up"])
    for node in nodes:
        commands.append(["ifconfig", node.interface, "inet", node.address, "netmask", mask])
        undo.insert(0, ["ifconfig", node.interface, "inet", node.address, "delete"])
    return Steps(host=host, commands=commands, undo=undo)


def _linux(host: str, nodes: Sequence[Node], prefix: int) -> Steps:
    addresses = [(f"{node.address}/{prefix}", node.interface) for node in nodes]
    return Steps(
        host=host,
        commands=[["ip", "address", "replace", address, "dev", name] for address, name in addresses],
        undo=[["ip", "address", "del", address, "dev", name] for address, name in addresses],
    )


def _persistent(plan: Steps, nodes: Sequence[Node], prefix: int, *, mac: bool) -> Steps:
    """The plan, with files that apply it at every start of the machine."""
    if mac:
        return Steps(
            host=plan.host,
            commands=plan.commands,
            undo=plan.undo,
            files={DAEMON: daemon(plan.commands)},
            after=[["launchctl", "bootstrap", "system", DAEMON]],
            undo_after=[["launchctl", "bootout", f"system/{NAME}"]],
        )
    files = {
        LINK.format(node.interface): f"[Match]\nName={node.interface}\n\n[Network]\nAddress={node.address}/{prefix}\n"
        "KeepConfiguration=static\n"
        for node in nodes
    }
    reload = [["networkctl", "reload"]]
    return Steps(host=plan.host, commands=plan.commands, undo=plan.undo, files=files, after=reload, undo_after=reload)


def daemon(commands: Sequence[Sequence[str]]) -> str:
    """A LaunchDaemon that runs commands once at every start of the machine, and ignores their failures."""
    script = "; ".join(" ".join(command) for command in commands)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">\n'
        f'<plist version="1.0"><dict>\n  <key>Label</key><string>{NAME}</string>\n'
        "  <key>ProgramArguments</key><array>\n    <string>/bin/sh</string><string>-c</string>\n"
        f"    <string>{script}</string>\n  </array>\n  <key>RunAtLoad</key><true/>\n</dict></plist>\n"
    )


def refuse(command: Sequence[str]) -> None:
    """Check that a command may be run. A host checks again before it runs one.

    Raises:
        ConfigError: it must never be run, or it is not a command of plans.
    """
    words = list(command)
    match words:
        case ["route", *_] | ["ip", "route", *_]:
            raise ConfigError("`route` is never run: it has crashed machines.", remedy="/30 networks need no routes.")
        case ["networksetup", *_]:
            raise ConfigError("Network locations and services are never changed: the Wi-Fi would drop.")
        case ["ifconfig", name, "down" | "up"] if name != BRIDGE:
            raise ConfigError(
                f"{name} is never taken down or up: that makes its RDMA addresses invalid until a reboot (errno 96)."
            )
        case ["ip", "link", "set", *_]:
            raise ConfigError("Interfaces are never taken down or up.")
        case ["ifconfig", *_] | ["ip", "address", "replace" | "del", *_]:
            return
        case ["launchctl", "bootstrap" | "bootout", *_] | ["networkctl", "reload"]:
            return
    raise ConfigError(f"{' '.join(words)} is not a command of a network plan.")


def matrix(joined: Sequence[Cable], names: Sequence[str]) -> list[list[str | None]]:
    """The device matrix: `[i][j]` is host i's RDMA device towards host j. macOS names a device after its interface."""
    rows: list[list[str | None]] = [[None] * len(names) for _ in names]
    for cable in joined:
        for one, other in ((cable.a, cable.b), (cable.b, cable.a)):
            rows[names.index(one.host)][names.index(other.host)] = f"rdma_{one.interface}"
    return rows
