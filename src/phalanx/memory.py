"""Enough memory? The one place that knows physical memory, the guard and the budgets (B2, B3).

Pure arithmetic over numbers that `psutil` reads from the OS (/proc/meminfo, sysctl hw.memsize). Does not know MLX:
callers pass in what the device says.
"""

from __future__ import annotations

import psutil
from msgspec import Struct

from phalanx.errors import MemoryShortage

GB = 1 << 30


class MachineMemory(Struct, frozen=True):
    """Bytes, as the operating system reports them."""

    physical: int
    available: int


class Budget(Struct, frozen=True):
    """What loading and serving may use, in bytes."""

    kv: int
    prefix: int


def read_machine() -> MachineMemory:
    """Physical and available memory of this machine, in bytes."""
    memory = psutil.virtual_memory()
    return MachineMemory(physical=int(memory.total), available=int(memory.available))


def process_rss() -> int:
    """Resident set size of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def guard_bytes(physical: int, override_gb: float | None = None) -> int:
    """Bytes to keep free: `max(10 % of physical, 5 GB)`, or the override in GB (B2)."""
    if override_gb is not None:
        return int(override_gb * GB)
    return max(physical // 10, 5 * GB)


def check_fits(what: str, needed: int, machine: MachineMemory, guard: int) -> None:
    """Refuse work that would cross the guard.

    Raises:
        MemoryShortage: says needed, available and guard in GB, and what to do.
    """
    if needed <= machine.available - guard:
        return
    raise MemoryShortage(
        f"{what} needs {needed / GB:.2f} GB; available {machine.available / GB:.2f} GB of "
        f"{machine.physical / GB:.2f} GB physical, of which the memory guard keeps {guard / GB:.2f} GB free.",
        remedy="Close other programs, choose a smaller or more strongly quantised model, or lower the guard with "
        "--memory-guard-gb (or PHALANX_MEMORY_GUARD_GB).",
    )


def serving_budget(
    machine: MachineMemory, guard: int, kv_gb: float | None, prefix_gb: float | None, *, minimum_kv: int
) -> Budget:
    """Split what is left after loading between running rows and kept prefixes.

    Args:
        machine: read after the weights are in memory.
        guard: bytes that stay free.
        kv_gb, prefix_gb: the user's choice in GB; None takes 60 % and 20 % of what is free above the guard.
        minimum_kv: bytes one row of the smallest useful length takes.

    Raises:
        MemoryShortage: not even one short row fits, or the user's choice does not.
    """
    free = max(0, machine.available - guard)
    kv = int(free * 0.6) if kv_gb is None else int(kv_gb * GB)
    prefix = int(free * 0.2) if prefix_gb is None else int(prefix_gb * GB)
    if kv_gb is not None or prefix_gb is not None:
        check_fits("The KV and prefix cache asked for", max(0, kv) + max(0, prefix), machine, guard)
    if kv < minimum_kv:
        check_fits("The KV cache of one short row", minimum_kv, machine, guard)
        raise MemoryShortage(
            f"The KV budget of {kv / GB:.3f} GB is smaller than one short row needs ({minimum_kv / GB:.3f} GB).",
            remedy="Raise --kv-cache-gb.",
        )
    return Budget(kv=kv, prefix=prefix)
