"""Decides whether `MLX_METAL_FAST_SYNCH=1` pays on a group of Macs, from the time of a step with it and without.

With it Metal and the processor wait for each other in shared memory: several times faster on some machines, but MLX's
authors call it buggy (rare deadlocks, which the watchdog ends). It matters for JACCL, whose all-reduces are short.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from phalanx.config import Backend

VARIABLE = "MLX_METAL_FAST_SYNCH"
PAYS = 1.2
"""How many times faster a step has to be for the risk of a deadlock."""


class FastSynch(Struct, frozen=True, kw_only=True):
    """The median time of a decoding step of the self-test, in ms, without the variable and with it.

    None where the self-test failed; `problem` says why.
    """

    off_ms: float | None
    on_ms: float | None
    problem: str = ""


def concerns(backend: Backend | str) -> bool:
    """Whether the variable matters for a group over this backend."""
    return backend.startswith("jaccl")


def is_on(envs: Sequence[str]) -> bool:
    """Whether `NAME=value` entries switch it on; of several, the last one counts."""
    values = [value for name, _, value in (entry.partition("=") for entry in envs) if name == VARIABLE]
    return values[-1:] not in ([], [""], ["0"])


def with_value(envs: Sequence[str], on: bool) -> tuple[str, ...]:
    """The entries with the variable switched on or off."""
    others = [entry for entry in envs if entry.partition("=")[0] != VARIABLE]
    return (*others, f"{VARIABLE}={int(on)}")


def advise(found: FastSynch) -> str:
    """The entry for the hostfile, with the reason."""
    on, off = 'write "envs": ["MLX_METAL_FAST_SYNCH=1"] into the hostfile', f"leave {VARIABLE} out of the hostfile"
    if found.on_ms is None:
        return f"{off}: with it the self-test failed ({found.problem.rstrip('.')})."
    if found.off_ms is None:
        return f"{on}: without it the self-test failed ({found.problem.rstrip('.')})."
    gain = found.off_ms / found.on_ms
    times = f"a step takes {found.on_ms:.2f} ms with it and {found.off_ms:.2f} ms without"
    if gain >= PAYS:
        return f"{on}: {times}. Take it out again if steps time out: MLX's authors call it buggy."
    return f"{off}: {times}, which is not worth the risk of a deadlock."
