"""Network plans: what is done, what is undone, and what is never done (F6)."""

from __future__ import annotations

import plistlib

import pytest

from phalanx.cluster.check_results import HostFacts
from phalanx.cluster.machine import Bridge, Interface
from phalanx.cluster.network import DAEMON, Node, cables, matrix, parse_node, refuse, steps
from phalanx.errors import ConfigError

WIFI = Interface(name="en0", address="192.168.1.7", prefix=24, kind="Wi-Fi")
NODES = [Node("a", "en5", "10.90.0.1"), Node("b", "en3", "10.90.0.2")]


def mac(*, members: list[str], up: bool) -> HostFacts:
    return HostFacts(
        host="m", system="macOS", clock=0.0, versions={}, interfaces=[WIFI], bridge=Bridge(up=up, members=members)
    )


LINUX = HostFacts(host="l", system="Linux", clock=0.0, versions={}, interfaces=[WIFI])


def test_nodes_are_read():
    assert parse_node("a:en5:10.90.0.1") == NODES[0]
    for text in ("a:en5", "a:en5:ten", ":en5:10.0.0.1", "a:en5;rm:10.0.0.1"):
        with pytest.raises(ConfigError, match="HOST:IFACE:IP"):
            parse_node(text)


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "$(id)", "a b", "a\x1b"])
def test_a_node_is_on_a_host(host):
    with pytest.raises(ConfigError, match=r"--node: .* is not the name of a host"):
        parse_node(f"{host}:en5:10.90.0.1")


def test_two_ends_in_one_network_are_a_cable():
    (cable,) = cables(NODES, 30)
    assert (cable.a.host, cable.b.host, cable.network) == ("a", "b", "10.90.0.0/30")
    assert matrix([cable], ["a", "b"]) == [[None, "rdma_en5"], ["rdma_en3", None]]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (NODES[:1], "10.90.0.0/30 has 1 ends"),
        ([NODES[0], Node("b", "en3", "10.90.0.6")], "has 1 ends"),
        ([NODES[0], Node("a", "en3", "10.90.0.2")], "has 2 ends"),
        ([NODES[0], Node("b", "en3", "10.90.0.3")], "first or last address"),
        ([NODES[0], Node("b", "en3", "10.90.0.1")], "address 10.90.0.1 is there twice"),
        ([*NODES, Node("a", "en5", "10.90.0.5"), Node("b", "en4", "10.90.0.6")], "interface a:en5 is there twice"),
    ],
)
def test_ends_that_make_no_cable(nodes, said):
    with pytest.raises(ConfigError, match=said):
        cables(nodes, 30)


def test_interfaces_leave_the_bridge_and_it_goes_down():
    (plan,) = steps(NODES[:1], 30, {"a": mac(members=["en4", "en5"], up=True)}, persist=False)
    assert plan.commands == [
        ["ifconfig", "bridge0", "deletem", "en5"],
        ["ifconfig", "bridge0", "down"],
        ["ifconfig", "en5", "inet", "10.90.0.1", "netmask", "255.255.255.252"],
    ]
    assert plan.undo == [
        ["ifconfig", "en5", "inet", "10.90.0.1", "delete"],
        ["ifconfig", "bridge0", "addm", "en5"],
        ["ifconfig", "bridge0", "up"],
    ]


def test_a_bridge_that_is_in_order_is_left_alone():
    (plan,) = steps(NODES[:1], 30, {"a": mac(members=[], up=False)}, persist=False)
    assert plan.commands == [["ifconfig", "en5", "inet", "10.90.0.1", "netmask", "255.255.255.252"]]


def test_a_daemon_repeats_the_commands_at_every_start():
    (plan,) = steps(NODES[:1], 30, {"a": mac(members=["en5"], up=True)}, persist=True)
    daemon = plistlib.loads(plan.files[DAEMON].encode())
    assert daemon["RunAtLoad"] is True
    assert daemon["ProgramArguments"][-1].split("; ") == [" ".join(command) for command in plan.commands]
    assert plan.after == [["launchctl", "bootstrap", "system", DAEMON]]


def test_linux_gets_addresses_and_a_networkd_file():
    (plan,) = steps(NODES[:1], 30, {"a": LINUX}, persist=True)
    assert plan.commands == [["ip", "address", "replace", "10.90.0.1/30", "dev", "en5"]]
    assert plan.undo == [["ip", "address", "del", "10.90.0.1/30", "dev", "en5"]]
    (path, text) = next(iter(plan.files.items()))
    assert path.endswith("10-phalanx-en5.network") and "Name=en5" in text and "Address=10.90.0.1/30" in text


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (Node("a", "en5", "192.168.1.9"), "inside its Wi-Fi's network 192.168.1.0/24"),
        (Node("a", "en0", "10.90.0.1"), "en0 of a is its Wi-Fi"),
    ],
)
@pytest.mark.parametrize("facts", [mac(members=[], up=False), LINUX], ids=["macOS", "Linux"])
def test_the_wireless_network_is_never_touched(node, said, facts):
    with pytest.raises(ConfigError, match=said):
        steps([node], 30, {"a": facts}, persist=False)


@pytest.mark.parametrize(
    "command",
    [
        "route add 10.0.0.0/8 10.0.0.1",
        "ip route add default via 10.0.0.1",
        "ifconfig en5 down",
        "ifconfig en5 up",
        "ip link set en5 down",
        "networksetup -switchtolocation Automatic",
        "rm -rf x",
        "sh -c x",
    ],
)
def test_commands_that_must_never_run_are_refused(command):
    with pytest.raises(ConfigError):
        refuse(command.split())
