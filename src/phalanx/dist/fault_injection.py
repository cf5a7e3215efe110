"""Faults on demand, for drills and tests: what a bad fabric or a lost rank looks like, at a chosen rank and step.

`phalanx serve --inject garbage:rank=1,step=40,layer=3`. A fault happens once per start of the group, on the first one
only (`EngineConfig.inject` is dropped at a restart), so that recovery can be watched. Does not know what the ranks
compute.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Literal, cast, get_args

from msgspec import Struct

from phalanx.errors import ConfigError

BufferFault = Literal["garbage", "stale", "zero", "permute"]
RankFault = Literal["kill", "suspend", "wedge", "tamper", "crash", "late", "slow", "version"]
BUFFER_FAULTS = get_args(BufferFault)
RANK_FAULTS = get_args(RankFault)
SLOW_S = 4.0  # between meeting the others and joining the fabric


class Injection(Struct, frozen=True, kw_only=True):
    """One fault: buffers are corrupt at reduction `layer` of the first forward from `step` on, ranks at `step`."""

    kind: BufferFault | RankFault
    rank: int
    step: int = 1
    layer: int = 0


def parse(text: str) -> Injection:
    """`KIND:rank=R,step=S,layer=L`.

    Raises:
        ConfigError: says what is wrong and what kinds there are.
    """
    kind, _, rest = text.partition(":")
    fields: dict[str, int] = {}
    for item in filter(None, rest.split(",")):
        name, _, value = item.partition("=")
        if name not in ("rank", "step", "layer") or not value.isdecimal():
            raise ConfigError(f"--inject {text!r}: {item!r} is not rank=R, step=S or layer=L.")
        fields[name] = int(value)
    if kind not in BUFFER_FAULTS + RANK_FAULTS or "rank" not in fields:
        raise ConfigError(
            f"--inject {text!r} is not KIND:rank=R,step=S[,layer=L].",
            remedy=f"Kinds: {', '.join(BUFFER_FAULTS + RANK_FAULTS)}.",
        )
    return Injection(kind=cast("BufferFault | RankFault", kind), **fields)


def inject(injection: Injection, step: int) -> None:
    """Do to this process what a rank fault says, if this is the step.

    Raises:
        IndexError: the fault is a crash.
    """
    if step != injection.step:
        return
    match injection.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "suspend":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "wedge":
            while True:
                time.sleep(3600)
        case "crash":
            raise IndexError(f"injected at step {step}")  # nothing of ours expects one
        case _:
            return
