"""Readers of what system tools print."""

from __future__ import annotations

from phalanx.cluster.machine import (
    Bridge,
    Interface,
    Port,
    parse_bridge,
    parse_devinfo,
    parse_ifconfig,
    parse_ip,
    parse_ports,
)

IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
en5: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tether 36:c0:00:00:00:01
\tinet6 fe80::1%en5 prefixlen 64 scopeid 0xa
\tinet 10.90.0.1 netmask 0xfffffffc broadcast 10.90.0.3
"""
BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tmember: en2 flags=3<LEARNING,DISCOVER>
\tmember: en5 flags=3<LEARNING,DISCOVER>
\tstatus: inactive
"""
DEVINFO = """hca_id:\trdma_en5
\ttransport:\t\t\tThunderbolt (5)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
hca_id:\trdma_en3
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
"""
PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt 1
Device: en5
"""


def test_ifconfig():
    assert parse_ifconfig(IFCONFIG) == [
        Interface(name="lo0", address="127.0.0.1", prefix=8),
        Interface(name="en5", address="10.90.0.1", prefix=30),
    ]
    assert parse_ifconfig(IFCONFIG)[1].network == "10.90.0.0/30"


def test_bridge():
    assert parse_bridge(BRIDGE) == Bridge(up=True, members=["en2", "en5"])
    assert parse_bridge(BRIDGE.replace("<UP,", "<")) == Bridge(up=False, members=["en2", "en5"])
    assert parse_bridge("") is None


def test_ip():
    text = '[{"ifname": "eth0", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}]}, {"ifname": "eth1"}]'
    assert parse_ip(text) == [Interface(name="eth0", address="10.0.0.1", prefix=24)]
    assert parse_ip("") == []


def test_hardware_ports():
    assert parse_ports(PORTS) == {"en0": "Ethernet", "en1": "Wi-Fi", "en5": "Thunderbolt 1"}


def test_devinfo():
    assert parse_devinfo(DEVINFO) == [
        Port(device="rdma_en5", state="PORT_ACTIVE"),
        Port(device="rdma_en3", state="PORT_DOWN"),
    ]
