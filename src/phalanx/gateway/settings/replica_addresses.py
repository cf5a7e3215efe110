"""Addresses that the admin API may not give a replica: protection against SSRF.

Clouds serve a machine's credentials at fixed addresses, where a holder of the admin key could read them through the
gateway. The file and flags may name any address: Thunderbolt networks use 169.254.0.0/16.
"""

from __future__ import annotations

import ipaddress

METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:42::42"),
    )
)
"""Metadata services that are not link-local: Alibaba's, Azure's, Oracle's, Amazon's, Google's and Scaleway's."""


NAT64 = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")))
"""Where a network may translate to the IPv4 address in the last 32 bits (RFC 6052, 8215), and its forerunner."""


def address_fault(address: str) -> str:
    """Why this address is refused; empty if it is not."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # for example 2852039166, which the system takes for 169.254.169.254
        return f"{address} is not an address in its usual form"
    if isinstance(found, ipaddress.IPv6Address):
        found = (
            found.ipv4_mapped or found.sixtofour or _ipv4_in(found) or ipaddress.IPv6Address(int(found))
        )  # no %scope
    if found.is_link_local or found.is_unspecified or found in METADATA:
        kind = "link-local, unspecified or of a cloud's metadata"
        return f"{address} is {kind}: only --replicas or --worker-urls may name it"
    return ""


def _ipv4_in(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if not any(address in network for network in NAT64) or int(address) < 1 << 16:  # ::1 is this machine
        return None
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
