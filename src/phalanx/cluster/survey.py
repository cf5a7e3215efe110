"""A host's side of planning: what a model needs, what this machine can give, and how fast it is, measured in seconds.

Processes of their own use MLX to read headers and to measure. `planning/` lists the plans.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from phalanx.catalog.local_models import HUB_ID, find
from phalanx.catalog.short_names import DEMO, repository_of
from phalanx.cluster import checks, machine
from phalanx.config import RUN_PHALANX
from phalanx.environment import child_environment
from phalanx.errors import ClusterError, ModelNotFound
from phalanx.memory import MachineMemory, guard_bytes
from phalanx.planning.calibration_store import CalibrationStore
from phalanx.planning.fit import Measured, fit
from phalanx.planning.group_overhead import overhead, serving_cost
from phalanx.planning.model_shape import ModelShape
from phalanx.planning.timings import GroupTimings, Learned, RankTimings, ServedSteps, ServingCost
from phalanx.types import ModelInfo

SHAPE_S = 120.0  # to build the largest models from their headers, once for each degree
MEASURE_S = 300.0  # for one line of a measurement
ASKING = 30 << 20  # bytes of the process that asks MLX how much memory there is
GROUP_S = 120.0  # for a small model's group to start and test itself
LEARNED = "learned"
MAX_LEARNED = 2.0  # a larger factor has another cause, such as another program or a throttled processor
PACKAGES = ("phalanx", "phalanx-cpu", "mlx", "mlx-lm")


class ShapeRequest(Struct, frozen=True, kw_only=True):
    """What does a model need?"""

    model: str
    max_degree: int
    """Ranks that may share a layer."""
    guard_gb: float | None = None


class HostShape(Struct, frozen=True, kw_only=True):
    """The model and the machine."""

    path: str
    shape: ModelShape
    memory: MachineMemory
    guard: int
    processors: int
    versions: dict[str, str]
    """By package."""


class RankShare(Struct, frozen=True, kw_only=True):
    """A rank's part of the model, and how many ranks are on its machine."""

    degree: int
    ranks_here: int


class SpeedRequest(Struct, frozen=True, kw_only=True):
    """How fast is this machine?"""

    path: str
    key: str
    """`ModelShape.key`."""
    shares: tuple[RankShare, ...]
    groups: tuple[tuple[int, int], ...] = ()
    """Stages and width of groups of this machine alone."""
    plans: tuple[str, ...] = ()
    """`Candidate.key` of those whose server would run here."""
    again: bool = False
    """Measure even what is known."""


class ShareSpeed(Struct, frozen=True, kw_only=True):
    share: RankShare
    timings: RankTimings


class GroupSpeed(Struct, frozen=True, kw_only=True):
    stages: int
    width: int
    timings: GroupTimings


class HostSpeed(Struct, frozen=True, kw_only=True):
    """What was measured, now or earlier."""

    shares: list[ShareSpeed]
    groups: list[GroupSpeed]
    serving: ServingCost = ServingCost()
    learned: dict[str, Learned] = {}
    """By plan, where one has been started."""


class SelfTestOutput(Struct, frozen=True, kw_only=True):
    """The part of `phalanx selftest --json` that is needed here."""

    info: ModelInfo


def shape_here(request: ShapeRequest) -> HostShape:
    """What the model needs and this machine has.

    Raises:
        ModelNotFound, ModelError: the model is neither on this machine, nor can its headers be fetched.
        ClusterError: it cannot be served; says why.
        ConfigError: the guard is not a number.
    """
    path = _directory(request.model)
    found = machine.rank_memory()
    if found.kind == "host":
        free = found.available + ASKING + _held_here()
        found = msgspec.structs.replace(found, available=min(found.total, free))
    command = [sys.executable, "-P", "-m", "phalanx.engine.model_shape_reader", str(path), str(request.max_degree)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SHAPE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"The headers of {path} were not read within {SHAPE_S:g} s.") from error
    try:
        shape = msgspec.json.decode(done.stdout, type=ModelShape)
    except msgspec.DecodeError as error:
        raise ClusterError(done.stderr.strip().rpartition("\n")[2] or f"{path} cannot be read.") from error
    guard = guard_bytes(found, request.guard_gb)
    return HostShape(
        path=str(path), shape=shape, memory=found, guard=guard, processors=_processors(), versions=checks.versions()
    )


def _held_here() -> int:
    """Bytes of the processes that ask and end before a start: this one, and its parent if that is phalanx."""
    here = psutil.Process()
    parent = here.parent()
    total = 0
    for process in (here, *(() if parent is None else (parent,))):
        with contextlib.suppress(psutil.Error):
            if process == here or any("phalanx" in word for word in process.cmdline()[:5]):
                total += int(process.memory_full_info().uss)
    return total


def _directory(model: str) -> Path:
    """The model's directory; of one that is not downloaded, of its headers."""
    try:
        return find(model).path
    except ModelNotFound:
        if not HUB_ID.fullmatch(repository := repository_of(model)) or "/" not in repository:
            raise
    from phalanx.catalog.headers import headers_of  # noqa: PLC0415 - needs the engine's packages

    return headers_of(repository)


def speed_here(request: SpeedRequest, store: CalibrationStore | None = None) -> HostSpeed:
    """How fast the model's layers are here; measures what is not known yet.

    Raises:
        ClusterError: a measurement failed; has its last line.
    """
    store = store or CalibrationStore(Path.home() / ".phalanx", machine_key())
    learned = {plan: found for plan in request.plans if (found := store.get((LEARNED, request.key, plan), Learned))}
    if request.again:
        store = store.from_now_on()
        for plan in learned:  # it was relative to what was measured before
            learned[plan] = Learned()
            store.put((LEARNED, request.key, plan), learned[plan])
    shares = [
        ShareSpeed(share=share, timings=_timings(request.path, request.key, share, store)) for share in request.shares
    ]
    serving = _serving(store)
    groups = [
        GroupSpeed(stages=stages, width=width, timings=_group(stages, width, serving, store))
        for stages, width in request.groups
    ]
    return HostSpeed(shares=shares, groups=groups, serving=serving, learned=learned)


def learn(model: str, plan: str, found: Learned, store: CalibrationStore | None = None) -> None:
    """Keep what a start of a plan measured over what was predicted, within MAX_LEARNED.

    Args:
        model: `ModelShape.key`.
        plan: `Candidate.key`.

    Raises:
        OSError: it cannot be written.
    """
    store = store or CalibrationStore(Path.home() / ".phalanx", machine_key())
    rate, ttft = (min(MAX_LEARNED, max(1 / MAX_LEARNED, one)) for one in (found.rate, found.ttft))
    store.put((LEARNED, model, plan), Learned(rate=rate, ttft=ttft))


def machine_key() -> tuple[str, ...]:
    """What decides how fast this machine is: processor, number of processors, versions."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return (platform.system(), platform.machine(), _processor(), f"{_processors()} processors", *versions)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The processor's name."""
    if machine.is_mac():
        return machine.tool("sysctl", "-n", "machdep.cpu.brand_string").strip()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _timings(path: str, key: str, share: RankShare, store: CalibrationStore) -> RankTimings:
    what = ("rank", key, f"degree {share.degree}", f"{share.ranks_here} ranks here")
    known = store.get(what, RankTimings)
    if known is not None:
        return known
    measured = _measure(path, share)
    store.put(what, measured)
    return measured


def _measure(path: str, share: RankShare) -> RankTimings:
    """Measure with as many processes as ranks share the machine.

    Ranks that share layers decode at the same time, those of stages one after the other; prompts are read by all at
    once in either case.
    """
    request = {"path": path, "degree": share.degree, "ranks_here": share.ranks_here}
    benches = [_Bench(request) for _ in range(share.ranks_here)]
    try:
        for bench in benches:
            bench.answer()
        together = share.degree > 1
        decoding = _asked("decode", benches if together else benches[:1])
        prompts = _asked("prompt", benches)
    finally:
        for bench in benches:
            bench.end()
    return fit(share.degree, decoding, prompts)


class _Bench:
    """A process that measures."""

    def __init__(self, request: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.engine.calibration"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
        )  # fmt: skip
        self.ask(msgspec.json.encode(request).decode())

    def ask(self, line: str) -> None:
        """Send a line; what is wrong shows in the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def answer(self) -> str:
        """The next line.

        Raises:
            ClusterError: the process ended; has what it said.
        """
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._process.stderr.read().strip().rpartition("\n")[2]
            raise ClusterError(f"The measurement failed: {last or 'it ended without a word'}.")
        return line

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _asked(what: str, benches: list[_Bench]) -> list[Measured]:
    for bench in benches:
        bench.ask(what)
    return [msgspec.json.decode(bench.answer(), type=Measured) for bench in benches]


def _group(stages: int, width: int, serving: ServingCost, store: CalibrationStore) -> GroupTimings:
    """What a group of this machine adds to a small model's steps, and its all-reduces as its self-test times them."""
    what = ("group", f"{stages} stages", f"{width} wide")
    known = store.get(what, GroupTimings)
    if known is not None:
        return known
    small, timings = _small(stages, width, store)
    command = [sys.executable, *RUN_PHALANX, "selftest", DEMO, "--json", "--tp", str(width), "--pp", str(stages)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GROUP_S, check=False)
        info = msgspec.json.decode(done.stdout, type=SelfTestOutput).info
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise ClusterError(
            f"A group of {stages * width} ranks did not pass its self-test here.",
            remedy=f"`phalanx selftest {DEMO} --tp {width} --pp {stages}` says why.",
        ) from error
    served = _served(stages, width)
    found = overhead((width,) * stages, served, serving, info.self_test, timings, small)
    store.put(what, found)
    return found


def _serving(store: CalibrationStore) -> ServingCost:
    """What a server on this machine adds to what its ranks compute: a small model's steps, less what one computes."""
    known = store.get(("serving",), ServingCost)
    if known is not None:
        return known
    small, timings = _small(1, 1, store)
    found = serving_cost(_served(1, 1), timings, small)
    store.put(("serving",), found)
    return found


def _served(stages: int, width: int) -> ServedSteps:
    """What the bundled model's steps take when a group of this machine serves it."""
    from phalanx.cluster.small_server import timed_steps  # noqa: PLC0415 - needs httpx, which an install's seed lacks

    return timed_steps(stages, width)


def _small(stages: int, width: int, store: CalibrationStore) -> tuple[ModelShape, RankTimings]:
    """The small model, and a rank's times with it."""
    small = shape_here(ShapeRequest(model=DEMO, max_degree=width))
    share = RankShare(degree=width, ranks_here=stages * width)
    return small.shape, _timings(small.path, small.shape.key, share, store)
