"""Plans over hosts: what is asked of each, and what is refused in one line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support.planning import group, host, shape, timings

from phalanx.cluster import checks, planner
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.links import LinkSpeed
from phalanx.cluster.network_setup import Pair
from phalanx.cluster.planner import PlanRequest, make_plans
from phalanx.cluster.plans import Plan
from phalanx.cluster.survey import GroupSpeed, HostShape, HostSpeed, ShapeRequest, ShareSpeed, SpeedRequest
from phalanx.errors import ClusterError, ConfigError
from phalanx.types import SelfTest

HOSTS = Hostfile(hosts=(Host(ssh="a", ips=("10.0.0.1",)), Host(ssh="b", ips=("10.0.0.2",))))


class World:
    """Hosts that answer from memory."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.shapes = {name: shape() for name in ("a", "b", "localhost")}
        self.free = {"a": 64.0, "b": 64.0, "localhost": 64.0}
        self.link = LinkSpeed(median_us=100.0, p99_us=200.0, gbit_per_s=10.0)
        self.problem = ""
        self.versions = {name: checks.versions() for name in self.shapes}
        self.dead: set[str] = set()
        self.step_ms: float | None = None  # of the small model; None: the group does not start
        self.groups: list[list[str]] = []

    def remote(self, name: str, *, python: str = "") -> Any:
        async def call(verb: str, request: Any, kind: type, **_: Any) -> Any:
            self.asked.append((name, request))
            if name in self.dead:
                raise ClusterError(f"{name}: gone", remedy="Mend it.")
            if isinstance(request, ShapeRequest):
                found = host(name, self.free[name])
                return HostShape(
                    path="/m", shape=self.shapes[name], memory=found.memory, guard=found.guard, processors=4,
                    versions=self.versions[name],
                )  # fmt: skip
            assert isinstance(request, SpeedRequest)
            return HostSpeed(
                shares=[ShareSpeed(share=share, timings=timings(share.degree)) for share in request.shares],
                groups=[
                    GroupSpeed(stages=stages, width=width, timings=group((width,) * stages))
                    for stages, width in request.groups
                ],
            )

        return SimpleNamespace(name=name, call=call)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    async def measure_pairs(hostfile: Hostfile, remotes: Any, topology: Any) -> list[Pair]:
        return [
            Pair(one="a", other="b", address="x", measured=None if made.problem else made.link, problem=made.problem)
        ]

    async def test_group(plan: Plan, timeout_s: float) -> Any:
        made.groups.append([host.ssh for host in plan.hostfile.hosts])
        if made.step_ms is None:
            raise ClusterError("A cluster is running already.")
        test = SelfTest(summed=2, reductions=16, step_ms=made.step_ms)
        return SimpleNamespace(info=SimpleNamespace(self_test=test))

    monkeypatch.setattr(planner, "Remote", made.remote)
    monkeypatch.setattr(planner, "test_group", test_group)
    monkeypatch.setattr(planner, "measure_pairs", measure_pairs)
    return made


def planned(**kwargs: Any):
    return asyncio.run(make_plans(PlanRequest(model="m", **kwargs)))


def test_every_host_that_does_not_answer_is_named(world: World) -> None:
    world.dead = {"a", "b"}
    with pytest.raises(ClusterError) as failed:
        asyncio.run(make_plans(PlanRequest(model="m", hostfile=HOSTS)))
    assert (failed.value.message, failed.value.remedy) == ("a: gone\nb: gone", "Mend it.")


def test_this_machine_is_asked_for_the_shares_and_groups_of_its_plans(world: World):
    found = planned()
    (_, shape_asked), (_, speed_asked) = world.asked
    assert shape_asked.max_degree == 2
    assert {(share.degree, share.ranks_here) for share in speed_asked.shares} == {(1, 1), (2, 2), (1, 2)}
    assert set(speed_asked.groups) == {(1, 2), (2, 1)}
    assert [plan.candidate.name for plan in found.plans] == ["one rank", "tp 2", "pp 2"]
    assert all(plan.speed is not None for plan in found.plans)


def test_hosts_are_measured_each_alone_and_so_are_their_links(world: World):
    found = planned(hostfile=HOSTS)
    asked = [request for _, request in world.asked if isinstance(request, SpeedRequest)]
    assert [{(share.degree, share.ranks_here) for share in one.shares} for one in asked] == [{(1, 1), (2, 1)}] * 2
    assert all(one.groups == () for one in asked)
    by_name = {plan.candidate.name: plan for plan in found.plans}
    fast = by_name["tp 2"].speed
    world.link = LinkSpeed(median_us=3000.0, p99_us=9000.0, gbit_per_s=0.1)
    slow = {plan.candidate.name: plan for plan in planned(hostfile=HOSTS).plans}["tp 2"].speed
    assert slow is not None and fast is not None
    assert slow.tokens_per_s[1] < fast.tokens_per_s[1] and slow.limit == "link latency"


def test_all_reduces_are_timed_by_the_hosts_as_a_group_where_that_can_start(world: World):
    def speeds() -> dict[str, Any]:
        return {plan.candidate.name: plan.speed for plan in planned(hostfile=HOSTS).plans}

    from_links = speeds()
    world.step_ms = 80.0
    timed = speeds()
    assert world.groups == [["a", "b"]] * 2
    assert timed["tp 2"].tokens_per_s[1] < from_links["tp 2"].tokens_per_s[1] / 2
    assert timed["tp 2"].limit == "link latency" and timed["pp 2"] == from_links["pp 2"]


def test_memory_alone_measures_nothing(world: World):
    found = planned(hostfile=HOSTS, measure=False)
    assert all(isinstance(request, ShapeRequest) for _, request in world.asked)
    assert all(plan.speed is None for plan in found.plans)


def test_a_plan_that_does_not_fit_is_not_measured(world: World):
    world.free = dict.fromkeys(world.free, 6.0)
    found = planned()
    assert all("lacks" in plan.fit.problem for plan in found.plans)
    assert all(isinstance(request, ShapeRequest) for _, request in world.asked)
    assert found.nearest == ["7 more hosts like localhost (tp 4 x pp 2)"]


def test_hosts_with_other_models_are_refused(world: World):
    world.shapes["b"] = replace(shape(), key="other")
    with pytest.raises(ConfigError, match="b has another model of this name than a"):
        planned(hostfile=HOSTS)


@pytest.mark.parametrize(("package", "remedy"), [("phalanx", "phalanx install --upgrade"), ("mlx", "same mlx")])
def test_a_host_with_another_version_is_named_before_anything_is_measured(world: World, package: str, remedy: str):
    world.versions["b"] = {**world.versions["b"], package: "0.0.9"}
    with pytest.raises(ClusterError, match=rf"version of {package}: .*0\.0\.9 on b") as caught:
        planned(hostfile=HOSTS)
    assert remedy in caught.value.remedy
    assert all(isinstance(request, ShapeRequest) for _, request in world.asked)


def test_a_link_that_is_not_there_is_named(world: World):
    world.problem = "no route to host"
    with pytest.raises(ClusterError, match=r"The link from a to b could not be measured: no route"):
        planned(hostfile=HOSTS)
