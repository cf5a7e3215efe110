"""Fault injection: a corrupt buffer, a lost rank or a broken link, at a chosen rank and step.

`phalanx serve --inject garbage:rank=1,step=40,layer=3`. A fault happens once, after the group's first start: a restart
drops `EngineConfig.inject`, so that the recovery can be watched.
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
LinkFault = Literal["cut", "lose", "repeat", "corrupt"]
BUFFER_FAULTS = get_args(BufferFault)
RANK_FAULTS = get_args(RankFault)
LINK_FAULTS = get_args(LinkFault)
SLOW_S = 4.0  # wait of a "slow" rank between the handshake and joining the communicator


Piece = bytes | bytearray | memoryview
"""Bytes sent over a link."""


class Injection(Struct, frozen=True, kw_only=True):
    """One fault: of the rank at `step`, of its all-reduce `layer` in the first forward from there, or of a frame to the
    next stage in `step`."""

    kind: BufferFault | RankFault | LinkFault
    rank: int
    step: int = 1
    layer: int = 0


def parse(text: str) -> Injection:
    """`KIND:rank=R,step=S,layer=L`.

    Raises:
        ConfigError: the text is not of this form; says what is wrong and which kinds there are.
    """
    kind, _, rest = text.partition(":")
    fields: dict[str, int] = {}
    for item in filter(None, rest.split(",")):
        name, _, value = item.partition("=")
        if name not in ("rank", "step", "layer") or not value.isdecimal():
            raise ConfigError(f"--inject {text!r}: {item!r} is not rank=R, step=S or layer=L.")
        fields[name] = int(value)
    kinds = BUFFER_FAULTS + RANK_FAULTS + LINK_FAULTS
    if kind not in kinds or "rank" not in fields:
        raise ConfigError(
            f"--inject {text!r} is not KIND:rank=R,step=S[,layer=L].",
            remedy=f"Kinds: {', '.join(kinds)}.",
        )
    return Injection(kind=cast("BufferFault | RankFault | LinkFault", kind), **fields)


def inject(injection: Injection, step: int) -> None:
    """Inject a rank fault into this process if this is its step.

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
            raise IndexError(f"injected at step {step}")  # an error that no code handles
        case _:
            return


def tampered(injection: Injection, step: int, pieces: list[Piece]) -> list[Piece]:
    """The pieces to send instead of a frame's own, if the rank's link fault is due.

    Raises:
        ConnectionError: the fault is a cut link.
    """
    if step != injection.step:
        return pieces
    match injection.kind:
        case "cut":
            raise ConnectionError(f"injected at step {step}")
        case "lose":
            return []
        case "repeat":
            return pieces * 2
        case "corrupt":
            changed = bytearray(pieces[-1])
            changed[len(changed) // 2] ^= 1
            return [*pieces[:-1], changed]
        case _:
            return pieces
