"""Hosts compared with each other: versions, models, cables; and hostfiles made from what they say (F2, F5)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from phalanx import __version__
from phalanx.cluster.check_results import CheckResult, HostFacts, ModelFacts, worst
from phalanx.cluster.diagnosis import compare
from phalanx.cluster.discovery import discover
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.machine import Interface, Port, Rdma
from phalanx.cluster.shape import shape_of
from phalanx.dist.topology import LayerCost, Parts
from phalanx.errors import ConfigError
from phalanx.memory import GB

VERSIONS = {"python": "3.12.1", "phalanx": __version__, "mlx": "0.32.4", "mlx-lm": "0.32.2"}
PAIR = Hostfile(hosts=(Host(ssh="a", rdma=(None, "rdma_en5")), Host(ssh="b", rdma=("rdma_en3", None))))


def facts(number: int, device: str = "rdma_en5", state: str = "PORT_ACTIVE") -> HostFacts:
    """A Mac with Ethernet, Wi-Fi and one cable."""
    return HostFacts(
        host=f"m{number}",
        system="macOS",
        clock=0.0,
        versions=VERSIONS,
        interfaces=[
            Interface(name="en1", address=f"192.168.1.{number}", prefix=24, kind="Wi-Fi"),
            Interface(name="en0", address=f"192.168.7.{number}", prefix=24, kind="Ethernet"),
            Interface(name=device.removeprefix("rdma_"), address=f"10.90.0.{number}", prefix=30, kind="Thunderbolt 1"),
        ],
        rdma=Rdma(enabled=True, ports=[Port(device=device, state=state)]),
    )


A, B = facts(1), facts(2, "rdma_en3")


def bad(one: HostFacts, other: HostFacts, backend: str = "ring") -> list[CheckResult]:
    return [
        result for result in compare({"a": one, "b": other}, [PAIR], backend, shape_of(())) if result.level == "bad"
    ]


def test_hosts_that_fit_are_not_complained_about():
    assert bad(A, B, "jaccl") == []


@pytest.mark.parametrize("package", ["python", "phalanx", "mlx", "mlx-lm"])
def test_other_versions_are_named_with_their_hosts(package):
    (found,) = bad(A, replace(B, versions={**VERSIONS, package: "0.0.1"}))
    assert found.check == f"version of {package}" and "0.0.1 on b" in found.seen


def test_hosts_with_another_phalanx_than_this_machine_are_named():
    other = {**VERSIONS, "phalanx": "0.0.1"}
    (found,) = bad(replace(A, versions=other), replace(B, versions=other))
    assert found.seen == f"{__version__} on this machine; 0.0.1 on a, b"
    assert "phalanx install --upgrade HOSTS" in found.remedy


PARTS = Parts(LayerCost(2 * GB), (LayerCost(GB, cost=GB, chunk_cost=GB),) * 8, LayerCost(2 * GB, cost=2 * GB))
TRIO = Hostfile(hosts=(Host(ssh="a"), Host(ssh="b"), Host(ssh="c")))


def stages(words: str, *rooms_gb: int | None, **first: Any) -> list[CheckResult]:
    """What is said of stages on hosts with so much room each."""
    hosts = [replace(A, room=None if room is None else room * GB) for room in rooms_gb]
    hosts[0] = replace(hosts[0], **{"parts": PARTS, **first})
    found = compare(dict(zip("abc", hosts, strict=True)), [TRIO], "ring", shape_of(words.split()))
    return [result for result in found if result.check.startswith("stage")]


def test_each_stage_is_compared_with_the_memory_of_its_hosts():
    """Of 12 GB no host has to hold more than its part."""
    assert [(one.check, one.seen) for one in stages("--pp 2 --tp 2,1", 7, 4, 4)] == [
        ("stage 0", "layers 0 to 5 on b, c: 4.00 GiB of 4.0 GiB"),
        ("stage 1", "layers 6 to 7 on a: 4.00 GiB of 7.0 GiB"),
    ]
    (short,) = stages("--pp 2 --tp 2,1 --pp-split 7,1", 7, 4, 4)
    assert short.level == "bad" and "b lacks 0.50 GiB of the 4.50 GiB for stage 0 (layers 0 to 6)" in short.seen
    assert "c lacks 0.50 GiB" in short.seen and "a lacks" not in short.seen and "--pp-split" in short.remedy
    (sum_of,) = stages("--pp 3 --pp-split 3,3,3", 9, 9, 9)
    assert sum_of.level == "bad" and "--pp-split 3,3,3 has 9 layers; the model has 8" in sum_of.seen


def test_a_model_that_cannot_be_cut_is_named_before_the_start():
    (said,) = stages("--pp 3", 9, 9, 9, parts=None, uncut="talkie cannot be cut into stages: why.")
    assert said.level == "bad" and said.seen == "talkie cannot be cut into stages: why." and "--tp" in said.remedy
    assert stages("--pp 3", 9, None, 9) == []  # it serves already, or has no model: another check says so
    assert stages("", 1, 1, 1) == []


def test_other_model_files_are_named():
    one = replace(A, model=ModelFacts(path="m", bytes=1, digest="aa"))
    other = replace(B, model=ModelFacts(path="m", bytes=1, digest="bb"))
    (found,) = bad(one, other)
    assert found.check == "same model" and "aa on a; bb on b" in found.seen and "model push" in found.remedy
    assert bad(one, replace(other, model=one.model)) == []


@pytest.mark.parametrize(
    ("one", "other", "seen"),
    [
        (A, facts(2, "rdma_en3", "PORT_DOWN"), "rdma_en3 of b is PORT_DOWN"),
        (facts(1, state="PORT_DOWN"), B, "rdma_en5 of a is PORT_DOWN"),
        (A, replace(B, rdma=Rdma(enabled=True)), "rdma_en3 of b is missing"),
    ],
)
def test_a_cable_needs_both_ends(one, other, seen):
    (found,) = bad(one, other, "jaccl")
    assert (found.check, found.seen) == ("cable a - b", seen)
    assert "between a and b" in found.remedy and "--backend ring" in found.remedy
    assert bad(one, other, "ring") == []


def test_the_worst_level_counts():
    levels = [CheckResult(check="x", level=level, seen="") for level in ("ok", "bad", "warning")]
    assert worst(levels) == "bad" and worst(levels[::2]) == "warning" and worst([]) == "ok"


def test_a_hostfile_from_two_macs():
    found, reasons = discover({"a": A, "b": B})
    assert found == Hostfile(
        backend="jaccl",
        hosts=(
            Host(ssh="a", ips=("192.168.7.1",), rdma=(None, "rdma_en5")),
            Host(ssh="b", ips=("192.168.7.2",), rdma=("rdma_en3", None)),
        ),
    )
    assert "192.168.7.0/24 (Ethernet)" in reasons[0] and "also possible: 192.168.1.0/24" in reasons[0]
    assert "rdma_en5 and rdma_en3 are the ends of a cable" in reasons[1]


def test_without_a_cable_between_every_two_there_is_no_rdma():
    third = replace(facts(3), interfaces=facts(3).interfaces[:2])
    found, reasons = discover({"a": A, "b": B, "c": third})
    assert found.backend is None and all(host.rdma == () for host in found.hosts)
    assert "not every two hosts have a cable" in reasons[-1]


def test_gpus_are_counted_and_nccl_needs_one_on_every_host():
    one, other = (replace(fact, rdma=Rdma(enabled=None), gpus=count) for fact, count in ((A, 1), (B, 2)))
    found, reasons = discover({"a": one, "b": other})
    assert [host.gpus for host in found.hosts] == [1, 2] and "nccl" in reasons[-1]
    assert "nccl" not in discover({"a": one, "b": replace(other, gpus=0)})[1][-1]


def test_hosts_without_a_common_network():
    with pytest.raises(ConfigError, match=r"share no network .*a: 192.168.1.1/24"):
        discover({"a": A, "b": replace(B, interfaces=B.interfaces[2:])})
