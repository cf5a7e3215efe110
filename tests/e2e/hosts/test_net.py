"""Cables between hosts: set up, verified, measured, undone; and what is never done (F4, F6)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from clusters import ask, assert_nothing_left, health, phalanx
from mac import Mac
from rig import Host, Rig

DELAY_MS = 5.0
TOKENS = 12
NODES = ["--node", "a:en5:10.90.0.1", "--node", "b:en3:10.90.0.2"]


@pytest.fixture
def macs(hosts: Rig) -> Iterator[tuple[Mac, Mac]]:
    """a and b as Macs as they come: a cable between them, its ends in bridge0, the bridge up."""
    with hosts.cable("a", "en5", "b", "en3"):
        made = Mac(hosts["a"], ["en5"]), Mac(hosts["b"], ["en3"])
        yield made
        for mac in made:
            mac.remove()


def addresses(host: Host, interface: str) -> list[str]:
    links = json.loads(host.run(["ip", "-j", "-4", "address", "show", "dev", interface]).stdout)
    return [f"{entry['local']}/{entry['prefixlen']}" for link in links for entry in link.get("addr_info", ())]


def doctor(hosts: Rig) -> dict[str, str]:
    """Checks that complain, by host."""
    done = phalanx(hosts["desk"], "doctor", "macs.json", "--backend", "jaccl", "--json", check=False)
    found = json.loads(done.stdout)["results"]
    return {one["check"]: host for host, ones in found.items() for one in ones if one["level"] != "ok"}


def test_two_macs_are_set_up_and_taken_back(hosts, macs):
    a, b = macs
    shown = phalanx(hosts["desk"], "net", "setup", *NODES, "--dry-run").stdout
    assert shown.splitlines() == [
        "a$ ifconfig bridge0 deletem en5",
        "a$ ifconfig bridge0 down",
        "a$ ifconfig en5 inet 10.90.0.1 netmask 255.255.255.252",
        "b$ ifconfig bridge0 deletem en3",
        "b$ ifconfig bridge0 down",
        "b$ ifconfig en3 inet 10.90.0.2 netmask 255.255.255.252",
    ]
    assert a["members"] == ["en5"] and addresses(hosts["a"], "en5") == []  # a dry run does nothing
    done = phalanx(hosts["desk"], "net", "setup", *NODES).stdout
    assert done.startswith(shown) and "a <-> b: 10.90.0.0/30, both ways" in done
    assert (a["members"], a["bridge_up"]) == ([], False)
    assert addresses(hosts["b"], "en3") == ["10.90.0.2/30"]
    for host in (hosts["a"], hosts["b"]):
        matrix = json.loads((host.home / ".phalanx/devices.json").read_text())
        assert matrix == [[None, "rdma_en5"], ["rdma_en3", None]]
    phalanx(hosts["desk"], "hostfile", "a,b", "-o", "macs.json")
    written = json.loads((hosts["desk"].home / "macs.json").read_text())
    assert written["backend"] == "jaccl"
    assert [host["rdma"] for host in written["hosts"]] == [[None, "rdma_en5"], ["rdma_en3", None]]
    assert [host["ips"] for host in written["hosts"]] == [["10.77.0.1"], ["10.77.0.2"]]
    assert doctor(hosts) == {}
    again = phalanx(hosts["desk"], "net", "setup", *NODES).stdout
    assert "bridge0" not in again
    phalanx(hosts["desk"], "net", "undo", "--hosts", "a,b")
    assert (a["members"], a["bridge_up"]) == (["en5"], True) and b["members"] == ["en3"]
    assert addresses(hosts["a"], "en5") == [] and not (hosts["a"].home / ".phalanx/devices.json").exists()
    never = {("route",), ("networksetup", "-switchtolocation")}
    for mac in macs:
        assert not any(tuple(call[:n]) in never for call in mac["calls"] for n in (1, 2))
        assert not any(call[1] != "bridge0" and call[-1] in ("up", "down") for call in mac["calls"] if len(call) > 1)


def test_a_cable_in_the_wrong_port_is_named(hosts, macs):
    hosts["b"].run(["ip", "link", "set", "en3", "down"])
    done = phalanx(hosts["desk"], "net", "setup", *NODES, check=False)
    assert done.returncode != 0
    assert "a (en5) does not reach b (en3, 10.90.0.2)" in done.stderr and "Re-seat it" in done.stderr


def test_addresses_in_the_wireless_network_are_refused(hosts, macs):
    macs[0]["ports"] = {"eth0": "Wi-Fi", "en5": "Thunderbolt 1"}
    nodes = ["--node", "a:en5:10.77.0.101", "--node", "b:en3:10.77.0.102"]
    done = phalanx(hosts["desk"], "net", "setup", *nodes, check=False)
    assert done.returncode == 64 and "inside its Wi-Fi's network 10.77.0.0/24" in done.stderr
    assert macs[0]["members"] == ["en5"]


def test_linux_hosts_are_set_up(hosts):
    with hosts.cable("a", "tb0", "b", "tb0"):
        nodes = ["--node", "a:tb0:10.91.0.1", "--node", "b:tb0:10.91.0.2"]
        phalanx(hosts["desk"], "net", "setup", *nodes)
        assert addresses(hosts["a"], "tb0") == ["10.91.0.1/30"]
        phalanx(hosts["desk"], "net", "undo", "--hosts", "a,b")
        assert addresses(hosts["a"], "tb0") == []
    nothing = phalanx(hosts["desk"], "net", "undo", "--hosts", "a", check=False)
    assert nothing.returncode != 0 and "No network set-up is known here" in nothing.stdout


def test_links_and_sums_are_measured(hosts):
    said = phalanx(hosts["desk"], "net", "test", "2.json", "--backend", "ring").stdout
    row = next(line.split() for line in said.splitlines() if line.split()[:2] == ["a", "b"])
    assert row[2] == "10.77.0.2" and all(float(figure) > 0 for figure in row[3:6])
    assert "all_sum of 1 ... 2: 3, expected 3" in said
    assert "rank 0 on a: active memory" in said and "rank 1 on b: active memory" in said
    assert_nothing_left(hosts)


def test_a_slow_link_is_seen(hosts):
    assert any(figures(hosts)[2] > 0.25 for _ in range(20)), "a machine that is always too busy to measure"
    limit = "tc qdisc replace dev eth0 root tbf rate 200mbit burst 64kb latency 50ms"
    hosts["a"].run(limit.split())
    try:
        after = figures(hosts)
    finally:
        hosts["a"].run("tc qdisc del dev eth0 root".split())
    assert after[2] < 0.25


def figures(hosts: Rig) -> list[float]:
    said = phalanx(hosts["desk"], "net", "test", "2.json", "--links-only").stdout
    row = next(line.split() for line in said.splitlines() if line.split()[:2] == ["a", "b"])
    return [float(figure) for figure in row[3:6]]


def test_a_link_that_is_cut_is_named(hosts):
    hosts["a"].run(["ip", "route", "add", "unreachable", "10.77.0.2"])
    try:
        done = phalanx(hosts["desk"], "net", "test", "2.json", check=False)
    finally:
        hosts["a"].run(["ip", "route", "del", "unreachable", "10.77.0.2"])
    assert done.returncode != 0 and "The connection to 10.77.0.2 broke: No route to host" in done.stdout


def test_a_link_that_takes_its_time_is_seen_and_changes_no_token(serving):
    """Every frame to b and from b is late, under way as well: of ring, control, agent and ssh alike."""
    hosts = serving.rig
    before = health(hosts)["restarts"]
    text = ask(hosts["desk"], serving.url, tokens=TOKENS)
    with hosts["b"].delayed(DELAY_MS):
        begun = time.monotonic()
        assert ask(hosts["desk"], serving.url, tokens=TOKENS) == text
        assert time.monotonic() - begun > TOKENS * DELAY_MS / 1000
        there_and_back_us = figures(hosts)[0]
        assert there_and_back_us / 1000 / DELAY_MS > 2
        said = health(hosts)
        assert said["status"] == "ok" and said["restarts"] == before
        assert all(rank["mismatches"] == 0 for rank in said["ranks"])
    assert ask(hosts["desk"], serving.url, tokens=TOKENS) == text
