"""A host's side of planning: what a model needs, what this machine can give, and how fast it is, measured in seconds.

Processes of their own use MLX to read headers and to measure. `planning/` lists the plans.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.catalog.local_models import find
from phalanx.cluster import machine
from phalanx.config import RUN_PHALANX
from phalanx.environment import child_environment
from phalanx.errors import ClusterError
from phalanx.memory import MachineMemory, guard_bytes
from phalanx.planning.calibration_store import CalibrationStore
from phalanx.planning.fit import Measured, fit
from phalanx.planning.group_overhead import overhead
from phalanx.planning.model_shape import ModelShape
from phalanx.planning.timings import GroupTimings, RankTimings
from phalanx.types import ModelInfo

SHAPE_S = 120.0  # to build the largest models from their headers, once for each degree
MEASURE_S = 300.0  # for one line of a measurement
GROUP_S = 120.0  # for a small model's group to start and test itself
SMALL = "demo"  # the model whose group is measured
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


class SelfTestOutput(Struct, frozen=True, kw_only=True):
    """The part of `phalanx selftest --json` that is needed here."""

    info: ModelInfo


def shape_here(request: ShapeRequest) -> HostShape:
    """What the model needs and this machine has.

    Raises:
        ModelNotFound: the model is not on this machine.
        ClusterError: it cannot be served; says why.
        ConfigError: the guard is not a number.
    """
    path = find(request.model).path
    found = machine.rank_memory()
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
    return HostShape(path=str(path), shape=shape, memory=found, guard=guard, processors=_processors())


def speed_here(request: SpeedRequest, store: CalibrationStore | None = None) -> HostSpeed:
    """How fast the model's layers are here; measures what is not known yet.

    Raises:
        ClusterError: a measurement failed; has its last line.
    """
    store = store or CalibrationStore(Path.home() / ".phalanx", machine_key())
    shares = [
        ShareSpeed(share=share, timings=_timings(request.path, request.key, share, store, again=request.again))
        for share in request.shares
    ]
    groups = [
        GroupSpeed(stages=stages, width=width, timings=_group(stages, width, store, again=request.again))
        for stages, width in request.groups
    ]
    return HostSpeed(shares=shares, groups=groups)


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


def _timings(path: str, key: str, share: RankShare, store: CalibrationStore, *, again: bool) -> RankTimings:
    what = ("rank", key, f"degree {share.degree}", f"{share.ranks_here} ranks here")
    known = None if again else store.get(what, RankTimings)
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


def _group(stages: int, width: int, store: CalibrationStore, *, again: bool) -> GroupTimings:
    """What a group of this machine adds to a step: its self-test's, less what its ranks compute."""
    what = ("group", f"{stages} stages", f"{width} wide")
    known = None if again else store.get(what, GroupTimings)
    if known is not None:
        return known
    small = shape_here(ShapeRequest(model=SMALL, max_degree=width))
    share = RankShare(degree=width, ranks_here=stages * width)
    timings = _timings(small.path, small.shape.key, share, store, again=again)
    command = [sys.executable, *RUN_PHALANX, "selftest", SMALL, "--json", "--tp", str(width), "--pp", str(stages)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GROUP_S, check=False)
        info = msgspec.json.decode(done.stdout, type=SelfTestOutput).info
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise ClusterError(
            f"A group of {stages * width} ranks did not pass its self-test here.",
            remedy=f"`phalanx selftest {SMALL} --tp {width} --pp {stages}` says why.",
        ) from error
    found = overhead((width,) * stages, info.self_test, timings, small.shape)
    store.put(what, found)
    return found
