"""The doctor's checks of memory on one host: leaks, the GPU's limit, whether a shard fits. `diagnosis.py` judges
whether stages fit.

A separate process asks MLX how much a rank could use (`machine.rank_memory`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from msgspec.structs import replace

from phalanx.cluster import machine
from phalanx.cluster.check_results import CheckResult, ExamineRequest, HostFacts, bad, good, warning
from phalanx.cluster.supervisor import RunDirectory
from phalanx.errors import ClusterError, ConfigError
from phalanx.memory import GB, MIB, MachineMemory, guard_bytes, largest_wired_limit_mb, make_room

WIRED_LIMIT = 350 * GB  # about 23 million pages: more means a known leak of wired memory
WIRED_SHARE = 0.7  # of physical memory; the limit on smaller machines


def wired_memory(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """Nothing has leaked: macOS may keep the memory of killed ranks wired."""
    if facts.system != "macOS":
        return
    wired, physical = machine.wired_bytes(), machine.physical_bytes()
    limit = min(WIRED_LIMIT, int(physical * WIRED_SHARE))
    if wired > limit and not run_dir.running():
        yield bad(
            "wired memory", f"{wired / GB:.0f} GiB wired while nothing runs", f"below {limit / GB:.0f} GiB",
            "Memory has leaked after a kill. Reboot this host, then run `phalanx net setup`.",
        )  # fmt: skip
    else:
        yield good("wired memory", f"{wired / GB:.1f} GiB of {physical / GB:.0f} GiB")


def memory(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> Iterator[CheckResult]:
    """The GPU may use enough, and the shard of this host fits."""
    shard = facts.model is not None and not wanted.staged and not run_dir.running()
    if not shard and facts.system != "macOS":
        return
    found = machine.rank_memory()
    if found.kind == "metal":
        yield gpu_limit(found, machine.wired_limit_mb())
    if shard:
        yield shard_fits(wanted, facts, found)


def with_room(wanted: ExamineRequest, facts: HostFacts, run_dir: RunDirectory) -> HostFacts:
    """The facts, with what this host has for a stage, and on the first host what the model's layers need."""
    model = facts.model
    if not wanted.staged or model is None or run_dir.running():
        return facts
    found = machine.rank_memory()
    with contextlib.suppress(ConfigError):  # of the variable that says what stays free; the start says so
        facts = replace(facts, room=max(0, found.available - guard_bytes(found, wanted.guard_gb)))
    if wanted.rank > 0:
        return facts
    try:
        return replace(facts, parts=machine.stage_parts(model.path))
    except ClusterError as error:
        return replace(facts, uncut=error.message)


def gpu_limit(found: MachineMemory, set_mb: int) -> CheckResult:
    """The part of a Mac's memory that the GPU may use, with reasons for and against more, and against wiring it.

    Args:
        found: on Metal.
        set_mb: `iogpu.wired_limit_mb`; 0: macOS's own choice.
    """
    physical = found.total + found.outside
    most = largest_wired_limit_mb(physical)
    seen = f"the GPU may use {found.total / GB:.1f} of {physical / GB:.0f} GiB"
    seen += f" (iogpu.wired_limit_mb={set_mb})" if set_mb else " (macOS's own choice)"
    if set_mb > most:
        return warning(
            "GPU memory", seen, f"at most {most} MiB",
            "macOS itself may run out of memory, and freeze or restart. "
            f"Run `sudo sysctl iogpu.wired_limit_mb={most}`, or 0 for its own choice.",
        )  # fmt: skip
    more = f"For more, run `sudo sysctl iogpu.wired_limit_mb={most}` after every boot. "
    return CheckResult(
        check="GPU memory",
        level="ok",
        seen=f"{seen}; weights and caches are wired in it, else macOS pages them out and steps wait for the disk",
        remedy=(more if found.total < most * MIB else "")
        + "If this machine restarts by itself under load (`prepare count underflow` in its report), serve with "
        "--no-wired-limit.",
    )


def shard_fits(wanted: ExamineRequest, facts: HostFacts, found: MachineMemory) -> CheckResult:
    """An equal share of the model fits into what is free above the guard."""
    try:
        guard = guard_bytes(found, wanted.guard_gb)
    except ConfigError as error:
        return bad("memory", error.message, "a number", error.remedy)
    assert facts.model is not None
    shard = facts.model.bytes // (len(wanted.peers) + 1)
    of_gpu = "" if found.kind == "host" else " to the GPU"
    if shard > found.available - guard:
        return bad(
            "memory", f"{found.available / GB:.1f} GiB available{of_gpu}; {guard / GB:.1f} GiB of it must stay free",
            f"{shard / GB:.1f} GiB for the shard of this host",
            f"{make_room(found) + ', or use' if make_room(found) else 'Use'} more hosts, or a smaller model; "
            "PHALANX_MEMORY_GUARD_GB lowers what stays free.",
        )  # fmt: skip
    return good("memory", f"{found.available / GB:.1f} GiB available{of_gpu} for a shard of {shard / GB:.2f} GiB")
