"""Free ports: different, of the range, not taken."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from phalanx.dist import ports
from phalanx.dist.ports import PORTS, free_ports


def test_they_differ_and_no_outgoing_connection_gets_them():
    found = free_ports(8)
    assert len(set(found)) == 8 and set(found) <= set(PORTS)
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    assert not outgoing.exists() or PORTS[-1] < int(outgoing.read_text().split()[0])


def test_none_is_taken(monkeypatch):
    with ExitStack() as stack:
        here = free_ports(6)
        for port in here[:3]:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        monkeypatch.setattr(ports, "PORTS", here)
        assert set(free_ports(3)) == set(here[3:])
        with pytest.raises(OSError, match=f"all ports from {here[0]} to {here[-1]} of 127.0.0.1 are taken"):
            free_ports(4)


def test_an_address_of_another_machine():
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.1")
