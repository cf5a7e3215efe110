"""Physical memory, the memory guard and the memory budgets.

Computes with numbers that `psutil` reads from the system (/proc/meminfo, sysctl hw.memsize) and, on Linux, with the
limit of the container or service: the kernel kills a process that exceeds that limit, however much memory the host has.
A GPU's limits come from `model/device_memory.py`, in the same form.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct

from phalanx.errors import ConfigError, MemoryShortage

GB = 1 << 30
MIB = 1 << 20
LOGITS_SHARE = 0.05
"""Share of the free memory above the guard: a quarter of what the default split leaves for computing."""
MAX_LOGITS = 1 * GB
"""Enough for 16 rows with 16 drafts each at a vocabulary of 256 k."""
LOGIT_BYTES = 16
"""Bytes per logit: a float32, and three more while the sampler works (scaled logits, noise, probability mass)."""


Kind = Literal["host", "metal", "cuda"]


class MachineMemory(Struct, frozen=True):
    """The memory that a rank's weights and caches lie in, in bytes: of the host, or what its GPU may use."""

    total: int
    available: int
    kind: Kind = "host"
    """`metal`: the part of the host's memory that macOS lets the GPU use. `cuda`: an NVIDIA GPU's own memory."""
    outside: int = 0
    """Memory of the host beyond `total`, which therefore stays free in any case."""
    device: str = ""
    """Tells GPUs of one host apart that have memory of their own."""


class Prediction(Struct, frozen=True):
    """The memory that one rank will need, predicted before it reads weights, and its machine's memory, in bytes."""

    host: str
    rank: int
    weights: int
    working: int
    """Temporary memory while loading: the largest tensor that is being cast, and those read ahead."""
    kv: int
    """The KV budget that the user chose, or the bytes of one short row."""
    guard: int
    machine: MachineMemory

    @property
    def place(self) -> tuple[str, str]:
        """Equal for ranks that share memory."""
        return self.host, self.machine.device

    @property
    def needed(self) -> int:
        """The largest need: working memory is freed before the KV buffers are allocated."""
        return self.weights + max(self.working, self.kv)


class MemoryBudget(Struct, frozen=True):
    """The memory budgets of serving, in bytes."""

    kv: int
    prefix: int
    logits: int
    """For the logits of one step and the sampler's temporaries; a part of the memory that `kv` and `prefix` leave."""

    def max_logits(self, vocab_size: int) -> int:
        """The largest number of tokens in one step for which logits fit, at least 1."""
        return max(1, self.logits // (LOGIT_BYTES * max(1, vocab_size)))


def read_machine(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> MachineMemory:
    """Physical and available memory of this machine, or of the control group that limits this process, in bytes.

    Args:
        membership, mount: Linux's file with this process's control groups, and where they are mounted.
    """
    memory = psutil.virtual_memory()
    limits = [
        MachineMemory(total=int(memory.total), available=int(memory.available)),
        *(limit for group in _control_groups(membership, mount) if (limit := _limit_of(group)) is not None),
    ]
    return MachineMemory(total=min(limit.total for limit in limits), available=min(limit.available for limit in limits))


def _control_groups(membership: Path, mount: Path) -> list[Path]:
    """Directories of this process's memory control groups, from its own up to the mount's root."""
    if not membership.exists():
        return []
    folders = {mount, mount / "memory"}  # in a container, the process's group is usually the root of the mount
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount  # cgroup v1 has one hierarchy per controller, v2 only one
        own = root / path.lstrip("/")
        folders |= {own, *(parent for parent in own.parents if parent.is_relative_to(root))}
    return sorted(folder for folder in folders if folder.is_dir())


def _limit_of(group: Path) -> MachineMemory | None:
    """A control group's limit and the memory that is left; inactive file pages count as free. None without a limit."""
    for limit_file, usage_file, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (group / limit_file).read_text().strip()
            usage = int((group / usage_file).read_text())
            stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            used = max(0, usage - int(stat.get(inactive, 0)))
            return MachineMemory(total=int(limit), available=max(0, int(limit) - used))
    return None


def process_rss() -> int:
    """Resident set size of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def trim_heap() -> None:
    """Return freed heap memory to the system. (glibc keeps it otherwise.)"""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do not have it
        if trim is not None:
            trim(0)


def guard_bytes(machine: MachineMemory, override_gb: float | None = None) -> int:
    """Bytes of `machine` to keep free: `max(10 % of the host's memory, 5 GiB)`, or the override in GiB.

    Memory that the GPU may not use stays free already, so it counts. An NVIDIA GPU's own memory holds no other programs
    that need 5 GiB: 10 % of it stay free.

    Raises:
        ConfigError: the override is not a number of GiB.
    """
    if override_gb is not None:
        wanted = _bytes("--memory-guard-gb", override_gb)
    else:
        wanted = machine.total // 10 if machine.kind == "cuda" else _of_host(machine.total + machine.outside)
    return max(0, wanted - machine.outside)


def _of_host(physical: int) -> int:
    return max(physical // 10, 5 * GB)


def largest_wired_limit_mb(physical: int) -> int:
    """The value of macOS's `iogpu.wired_limit_mb` that leaves the system what the guard would, in MiB."""
    return max(0, physical - _of_host(physical)) // MIB


def check_fits(purpose: str, needed: int, machine: MachineMemory, guard: int) -> None:
    """Refuse work that would cross the guard.

    Raises:
        MemoryShortage: gives the needed and available memory and the guard in GiB, and a remedy.
    """
    if needed <= machine.available - guard:
        return
    raise MemoryShortage(
        f"{purpose} needs {needed / GB:.2f} GiB; available {machine.available / GB:.2f} GiB of "
        f"{machine.total / GB:.2f} GiB {_TOTAL_IS[machine.kind]}, of which the memory guard keeps "
        f"{guard / GB:.2f} GiB free.",
        remedy=f"{make_room(machine) or 'Use more machines'}, choose a smaller or more strongly quantised model, or "
        "lower the guard with --memory-guard-gb (or PHALANX_MEMORY_GUARD_GB).",
    )


_TOTAL_IS: dict[Kind, str] = {
    "host": "physical",
    "metal": "that macOS lets the GPU use",
    "cuda": "of the GPU",
}


def make_room(machine: MachineMemory) -> str:
    """How the user makes more memory available, as the beginning of a sentence; "" where nothing does."""
    match machine.kind:
        case "host":
            return "Close other programs"
        case "cuda":
            return "End other programs on the GPU (`nvidia-smi` lists them)"
        case "metal":
            most = largest_wired_limit_mb(machine.total + machine.outside)
            lower = machine.total < most * MIB
            return f"Let the GPU use more (`sudo sysctl iogpu.wired_limit_mb={most}`)" if lower else ""


def check_group(model: str, predictions: Sequence[Prediction]) -> None:
    """Refuse to load if the ranks that share a memory would together cross its guard.

    Raises:
        MemoryShortage: names the machines; contains the table of all ranks.
    """
    short = []
    caches: list[float] = []
    rooms: dict[str, list[str]] = {}
    for ranks in _by_place(predictions).values():
        needed, free = sum(rank.needed for rank in ranks), _free(ranks)
        if needed > free:
            short.append(f"{ranks[0].host} lacks {(needed - free) / GB:.2f} GiB")
            rooms.setdefault(make_room(ranks[0].machine), []).append(ranks[0].host)
            caches.append(_max_cache_gb(ranks))
    rooms.pop("", None)
    if short:
        room = [f"{what} on {' and '.join(dict.fromkeys(hosts))}. " for what, hosts in rooms.items()]
        cache = [f"--kv-cache-gb {least:g} fits. "] if (least := min(caches)) else []
        raise MemoryShortage(
            f"{model} does not fit: {', '.join(short)}.\n{prediction_table(predictions)}\n",
            remedy="".join([*cache, *room, _GROUP_REMEDY]),
        )


def ranks_beside(predictions: Sequence[Prediction], rank: int) -> int:
    """Number of ranks, this one among them, whose memory is that of `rank`."""
    return next(len(ranks) for ranks in _by_place(predictions).values() if any(one.rank == rank for one in ranks))


def _by_place(predictions: Sequence[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    places: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        places.setdefault(prediction.place, []).append(prediction)
    return places


def _max_cache_gb(ranks: Sequence[Prediction]) -> float:
    """The largest --kv-cache-gb, in tenths, with which the ranks of one place fit; 0.0 if even none would do."""
    free = _free(ranks)
    if sum(rank.weights + rank.working for rank in ranks) > free:
        return 0.0
    return (free - sum(rank.weights for rank in ranks)) * 10 // (len(ranks) * GB) / 10


def _free(ranks: Sequence[Prediction]) -> int:
    """Memory that the ranks of one place may use: the least available memory reported, minus the largest guard."""
    return min(rank.machine.available for rank in ranks) - max(rank.guard for rank in ranks)


_GROUP_REMEDY = (
    "Use more machines (a larger --tp), a smaller or more strongly quantised model, or lower the guard with "
    "--memory-guard-gb (or PHALANX_MEMORY_GUARD_GB)."
)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """A table with one line per rank, in GiB."""
    cells = [["host", "rank", "weights", "working", "KV", "guard", "free", "total", "memory"]]
    for p in sorted(predictions, key=lambda p: p.rank):
        sizes = (p.weights, p.working, p.kv, p.guard, p.machine.available, p.machine.total)
        cells.append([p.host, str(p.rank), *(f"{size / GB:.2f}" for size in sizes), _MEMORY_OF[p.machine.kind]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, "(GiB; ranks of one host share its memory, and that of a GPU that they share)"])


_MEMORY_OF: dict[Kind, str] = {"host": "host's", "metal": "GPU's part", "cuda": "GPU's"}


def serving_budget(
    machine: MachineMemory, guard: int, kv_gb: float | None, prefix_gb: float | None, *, minimum_kv: int
) -> MemoryBudget:
    """Split the memory that is left after loading between running rows and cached prefixes.

    Args:
        machine: read after the weights were loaded.
        guard: bytes that must stay free.
        kv_gb, prefix_gb: the user's choices in GiB; None: 60 % and 20 % of the free memory above the guard, or less if
            the other choice leaves less.
        minimum_kv: bytes of one row of the smallest useful length.

    Raises:
        ConfigError: a choice is not a number of GiB.
        MemoryShortage: the user's choice does not fit, or not even one short row does.
    """
    free = max(0, machine.available - guard)
    kv_asked = None if kv_gb is None else _bytes("--kv-cache-gb", kv_gb)
    prefix_asked = None if prefix_gb is None else _bytes("--prefix-cache-gb", prefix_gb)
    if kv_asked is not None or prefix_asked is not None:
        check_fits("The KV and prefix cache asked for", (kv_asked or 0) + (prefix_asked or 0), machine, guard)
    kv = kv_asked if kv_asked is not None else min(int(free * 0.6), free - (prefix_asked or 0))
    prefix = prefix_asked if prefix_asked is not None else min(int(free * 0.2), free - kv)
    if kv < minimum_kv:
        check_fits("The KV cache of one short row", minimum_kv, machine, guard)
        raise MemoryShortage(
            f"The KV budget of {kv / GB:.3f} GiB is smaller than one short row needs ({minimum_kv / GB:.3f} GiB).",
            remedy="Raise --kv-cache-gb, or lower --prefix-cache-gb.",
        )
    return MemoryBudget(kv=kv, prefix=prefix, logits=min(int(free * LOGITS_SHARE), MAX_LOGITS))


def _bytes(flag: str, gb: float) -> int:
    if not (math.isfinite(gb) and gb >= 0.0):
        raise ConfigError(f"{flag} {gb} is not a number of GiB.", remedy=f"Give {flag} 0 or more.")
    return int(gb * GB)
