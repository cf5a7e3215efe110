"""Makes a hostfile from the facts about hosts, with the reason for every choice."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from phalanx.cluster.check_results import HostFacts
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.machine import Interface
from phalanx.errors import ConfigError

RDMA = "rdma_"


def discover(facts: Mapping[str, HostFacts]) -> tuple[Hostfile, list[str]]:
    """Make a hostfile. Returns it with a sentence per choice that gives the reason.

    Raises:
        ConfigError: the hosts share no network.
    """
    reasons: list[str] = []
    ips = _common(facts, reasons)
    names = list(facts)
    matrix = [[_device(facts, one, other) for other in names] for one in names]
    whole = all(matrix[i][j] for i in range(len(names)) for j in range(len(names)) if i != j)
    rdma = whole and len(names) > 1
    if rdma:
        pairs = [(i, j) for i in range(len(names)) for j in range(i)]
        reasons += [
            f"{names[j]} - {names[i]}: {matrix[j][i]} and {matrix[i][j]} are the ends of a cable (one /30 network)"
            for i, j in pairs
        ]
        reasons.append("backend jaccl: every two hosts have a cable with RDMA")
    elif len(names) > 1 and all(fact.gpus for fact in facts.values()):
        reasons.append("no backend is fixed: nccl, since MLX can use a GPU on every host")
    else:
        any_device = any(port for fact in facts.values() for port in fact.rdma.ports)
        why = "not every two hosts have a cable with RDMA" if any_device else "no host has RDMA"
        reasons.append(f"no backend is fixed ({why}): mpi on Linux where it is installed, else ring")
    hosts = tuple(
        Host(ssh=name, ips=(ips[name],), rdma=tuple(matrix[index]) if rdma else (), gpus=facts[name].gpus)
        for index, name in enumerate(names)
    )
    return Hostfile(hosts=hosts, backend="jaccl" if rdma else None), reasons


def _common(facts: Mapping[str, HostFacts], reasons: list[str]) -> dict[str, str]:
    """Each host's address in a network that all share: Ethernet rather than Wi-Fi, never a Thunderbolt cable."""
    by_network: dict[str, dict[str, Interface]] = {}
    for name, fact in facts.items():
        for each in fact.interfaces:
            if not each.kind.startswith("Thunderbolt"):
                by_network.setdefault(each.network, {})[name] = each
    shared = {network: interfaces for network, interfaces in by_network.items() if len(interfaces) == len(facts)}
    if not shared:
        seen = "; ".join(f"{name}: {_addresses(fact.interfaces)}" for name, fact in facts.items())
        raise ConfigError(
            f"The hosts share no network ({seen}).",
            remedy="Join them by Ethernet or Wi-Fi: the control connections need it; Thunderbolt cables come on top.",
        )
    network = min(shared, key=lambda n: (any(i.kind == "Wi-Fi" for i in shared[n].values()), ipaddress.ip_network(n)))
    kinds = sorted({each.kind or each.name for each in shared[network].values()})
    reasons.append(f"addresses in {network} ({', '.join(kinds)}): all hosts are in it" + _others(shared, network))
    found = {name: shared[network][name].address for name in facts}
    for name, address in found.items():
        if twins := [other for other in found if found[other] == address and other != name]:
            raise ConfigError(
                f"{name} and {twins[0]} both say that {address} is their address.",
                remedy="Are they two names of one machine? Else correct the address of one of them.",
            )
    return found


def _others(shared: Mapping[str, object], network: str) -> str:
    others = [other for other in shared if other != network]
    return f"; also possible: {', '.join(others)}" if others else ""


def _addresses(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{each.address}/{each.prefix}" for each in interfaces) or "no address"


def _device(facts: Mapping[str, HostFacts], one: str, other: str) -> str | None:
    """The RDMA device of a host towards another: its interface shares a small network (/29 or less) with that host."""
    if one == other:
        return None
    theirs = {each.network for each in facts[other].interfaces}
    devices = {port.device for port in facts[one].rdma.ports}
    for each in facts[one].interfaces:
        if each.prefix >= 29 and each.network in theirs and f"{RDMA}{each.name}" in devices:
            return f"{RDMA}{each.name}"
    return None
