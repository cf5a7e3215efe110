"""Makes the plans for a model on some hosts: asks each what it has, which of the plans fit, and how fast those are.

`survey.py` measures a host, `planning/` computes a plan's speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster.diagnosis import same_versions
from phalanx.cluster.hostfile_parser import Host, Hostfile
from phalanx.cluster.network_setup import Pair, measure_pairs, test_group
from phalanx.cluster.plans import Plan
from phalanx.cluster.ssh import Remote, from_all
from phalanx.cluster.survey import GroupSpeed, HostShape, HostSpeed, RankShare, ShapeRequest, SpeedRequest
from phalanx.dist.topology import Topology
from phalanx.errors import ClusterError, ConfigError, PhalanxError
from phalanx.planning.candidates import Candidate, Fit, PlanHost, candidates, fit_memory
from phalanx.planning.group_overhead import all_reduce_of_steps, from_links
from phalanx.planning.model_shape import ModelShape
from phalanx.planning.nearest import nearest
from phalanx.planning.predictor import CONTEXT, Speed, predict
from phalanx.planning.recommendation import GroupPlan
from phalanx.planning.timings import GroupTimings, Learned, RankTimings

SHAPE_S = 180.0  # for a host's answer about a model
GROUP_S = 90.0  # for a small model's group on several hosts to start and test itself; after that, links are used
SPEED_S = 900.0  # for a host to measure itself; minutes on a busy machine
THIS_MACHINE = "localhost"


class PlanRequest(Struct, frozen=True, kw_only=True):
    """Which plans are wanted."""

    model: str
    hostfile: Hostfile | None = None
    """None: this machine."""
    ranks_here: int = 2
    """Ranks on this machine at most, where it is alone."""
    max_len: int | None = None
    kv_gb: float | None = None
    context: int = CONTEXT
    """Tokens of a decoding row whose speed is predicted."""
    guard_gb: float | None = None
    replicas: bool = True
    """Whether several groups are plans."""
    measure: bool = True
    """Whether speeds are wanted."""
    again: bool = False
    """Measure even what is known."""
    python: str = ""


class Planned(Struct, frozen=True, kw_only=True):
    """The plans, and what they were made of."""

    shape: ModelShape
    hosts: list[PlanHost]
    plans: list[GroupPlan]
    nearest: list[str] = []
    """Where no plan fits: the changes with which one does."""


async def make_plans(request: PlanRequest) -> Planned:
    """All plans, in the order of their numbers of ranks.

    Raises:
        ClusterError: hosts do not answer, lack the model, differ in versions, or cannot measure themselves.
        ConfigError: hosts have different models.
    """
    named = request.hostfile.hosts if request.hostfile is not None else (Host(ssh=THIS_MACHINE),)
    remotes = [Remote(host.ssh, python=request.python) for host in named]
    most = len(named) if len(named) > 1 else request.ranks_here
    asked = ShapeRequest(model=request.model, max_degree=most, guard_gb=request.guard_gb)
    answers = await from_all(
        remote.call("plan-shape", asked, HostShape, timeout_s=SHAPE_S, whole=True) for remote in remotes
    )
    shapes = {remote.name: answer for remote, answer in zip(remotes, answers, strict=True)}
    _check_versions(shapes)
    shape = replace(_same_shape(shapes), name=request.model)
    hosts = {name: PlanHost(name=name, memory=one.memory, guard=one.guard) for name, one in shapes.items()}
    here = min(request.ranks_here, answers[0].processors)
    found = [one for one in candidates(shape, list(hosts), ranks_here=here) if request.replicas or one.replicas == 1]
    fits = [fit_memory(shape, one, hosts, max_len=request.max_len, kv_gb=request.kv_gb) for one in found]
    if all(fit.problem for fit in fits):
        ways = nearest(shape, found, [*hosts.values()], max_len=request.max_len, kv_gb=request.kv_gb)
        return Planned(shape=shape, hosts=[*hosts.values()], plans=[GroupPlan(fit=fit) for fit in fits], nearest=ways)
    if not request.measure:
        return Planned(shape=shape, hosts=[*hosts.values()], plans=[GroupPlan(fit=fit) for fit in fits])
    able = [fit.candidate for fit in fits if not fit.problem]
    speeds = await _speeds(request, remotes, shapes, able)
    links = Links()
    if request.hostfile is not None and len(named) > 1:
        links = Links(await _links(request.hostfile, remotes), await _all_reduces(request, able, speeds))
    plans = [GroupPlan(fit=fit, speed=_speed(shape, fit, speeds, links, request.context)) for fit in fits]
    return Planned(shape=shape, hosts=[*hosts.values()], plans=plans)


class Links(NamedTuple):
    """What was measured between hosts."""

    pairs: Sequence[Pair] = ()
    all_reduce_s: Mapping[int, float] = {}
    """Of a small all-reduce, by its number of hosts."""


def _check_versions(shapes: Mapping[str, HostShape]) -> None:
    """What one version measures says nothing about another, nor would they start together."""
    for result in same_versions({name: one.versions for name, one in shapes.items()}):
        if result.level == "bad":
            raise ClusterError(f"{result.check}: {result.seen}.", remedy=result.remedy)


def _same_shape(shapes: Mapping[str, HostShape]) -> ModelShape:
    """The model, which is the same on all hosts."""
    (first, shape), *others = ((name, one.shape) for name, one in shapes.items())
    for name, other in others:
        if other.key != shape.key:
            raise ConfigError(
                f"{name} has another model of this name than {first}, or would load it in another type.",
                remedy="Run `phalanx model push` from the host that has the right one.",
            )
    return shape


async def _speeds(
    request: PlanRequest, remotes: Sequence[Remote], shapes: Mapping[str, HostShape], able: Sequence[Candidate]
) -> dict[str, HostSpeed]:
    """What each host measures for the plans that it is in."""

    async def ask(remote: Remote) -> HostSpeed:
        own = [one for one in able if remote.name in one.hosts]
        shares = dict.fromkeys((one.width, one.ranks_here) for one in own)
        groups = [(one.stages, one.width) for one in own if one.size > 1 and one.ranks_here == one.size]
        wanted = SpeedRequest(
            path=shapes[remote.name].path, key=shapes[remote.name].shape.key,
            shares=tuple(RankShare(degree=degree, ranks_here=count) for degree, count in shares),
            groups=tuple(groups), plans=tuple(one.key for one in own if one.hosts[0] == remote.name),
            again=request.again,
        )  # fmt: skip
        return await remote.call("plan-speed", wanted, HostSpeed, timeout_s=SPEED_S)

    answers = await from_all(map(ask, remotes))
    return {remote.name: answer for remote, answer in zip(remotes, answers, strict=True)}


async def _links(hostfile: Hostfile, remotes: Sequence[Remote]) -> list[Pair]:
    """The speed of every link.

    Raises:
        ClusterError: one could not be measured.
    """
    pairs = await measure_pairs(hostfile, remotes, Topology((len(hostfile.hosts),)))
    for pair in pairs:
        if pair.measured is None:
            raise ClusterError(
                f"The link from {pair.one} to {pair.other} could not be measured: {pair.problem}",
                remedy="`phalanx net test --links-only` shows all links.",
            )
    return pairs


async def _all_reduces(
    request: PlanRequest, able: Sequence[Candidate], speeds: Mapping[str, HostSpeed]
) -> dict[int, float]:
    """Seconds of a small all-reduce in the self-test of the first hosts as a group, for each width of a plan.

    Where such a group cannot start, because a cluster runs there already or the small model has too few heads, the
    plan's all-reduces follow from its links.
    """
    assert request.hostfile is not None
    found = {}
    for width in sorted({one.width for one in able if one.width > 1 and one.ranks_here < one.size}):
        plan = Plan(hostfile=request.hostfile.first(width), serve=("demo",), python=request.python)
        with contextlib.suppress(PhalanxError):
            test = (await test_group(plan, GROUP_S)).info.self_test
            alone_s = max(speeds[host.ssh].serving.small_step_s for host in plan.hostfile.hosts)
            if test is not None and (seconds := all_reduce_of_steps(test, alone_s)) is not None:
                found[width] = seconds
    return found


def _speed(shape: ModelShape, fit: Fit, speeds: Mapping[str, HostSpeed], links: Links, context: int) -> Speed | None:
    candidate = fit.candidate
    if fit.problem:
        return None
    share = RankShare(degree=candidate.width, ranks_here=candidate.ranks_here)
    timings: dict[str, RankTimings] = {}
    for host in candidate.hosts:
        timings[host] = next(one.timings for one in speeds[host].shares if one.share == share)
    first = speeds[candidate.hosts[0]]
    return predict(
        shape, fit, timings, _group(candidate, speeds, links),
        serving=first.serving, learned=first.learned.get(candidate.key, Learned()), context=context,
    )  # fmt: skip


def _group(candidate: Candidate, speeds: Mapping[str, HostSpeed], links: Links) -> GroupTimings | None:
    """What being a group adds, on one machine as measured, else as its links and all-reduces say."""
    if candidate.size == 1:
        return None
    widths = (candidate.width,) * candidate.stages
    if candidate.ranks_here == candidate.size:
        own: list[GroupSpeed] = speeds[candidate.hosts[0]].groups
        return next(one.timings for one in own if (one.stages, one.width) == (candidate.stages, candidate.width))
    inside = [
        pair.measured
        for pair in links.pairs
        if pair.measured is not None and {pair.one, pair.other} <= {*candidate.hosts}
    ]
    return from_links(
        widths, [one.median_us / 1e6 for one in inside], [one.gbit_per_s * 1e9 / 8 for one in inside],
        links.all_reduce_s.get(candidate.width),
    )  # fmt: skip
