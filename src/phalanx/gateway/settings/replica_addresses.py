"""Which addresses a replica may have that the admin API adds.

At fixed addresses clouds tell a machine its own secrets, for which an admin of the gateway could ask through it. A file
and flags may name any address: Thunderbolt networks use 169.254.0.0/16.
"""

from __future__ import annotations

import ipaddress

METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:42::42"),
    )
)
"""Alibaba's, Azure's, Oracle's, Amazon's, Google's and Scaleway's beside the link-local ones."""


def address_fault(address: str) -> str:
    """What is wrong with an address that is connected to, in words; empty if nothing is."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # for example 2852039166, which the system takes for 169.254.169.254
        return f"{address} is not an address as it is usually written"
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or ipaddress.IPv6Address(int(found))  # without its %scope
    if found.is_link_local or found.is_unspecified or found in METADATA:
        kind = "link-local, unspecified or of a cloud's metadata"
        return f"{address} is {kind}: only --replicas or --worker-urls may name it"
    return ""
