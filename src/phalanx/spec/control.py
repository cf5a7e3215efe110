"""Whether speculation pays, and how many tokens are worth a try: what is asked of whoever decides k.

Pure: time comes in as measured seconds, nothing is left to chance; the same calls give the same answers. Does not know
who drafts, or what tokens mean. `balance.py` weighs costs; `rules.py` has fixed rules, and builds what is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from phalanx.spec.drafters import Draft

Committed = Mapping[int, Sequence[int]]


class Took(NamedTuple):
    """How long a step took, in seconds."""

    all: float | None
    """Drafting, the decoding forwards, sampling and verification; without prefill and reading. None where rows were
    moved or buffers resized as well, so that it says nothing about such steps."""
    drafting: float = 0.0
    """Of those, the drafter's."""
    telling: float = 0.0
    """What asking the control took since the last `observe`, and that itself."""


class Control(Protocol):
    """Chooses k per sequence and step. Calls come in this order, once per step that decodes:

    `read` -> (drafter) -> `has_read` -> `want` -> (drafter) -> `choose` -> (forward, verify, commit) -> `observe`;
    `end` when a sequence is over. The first two only where the drafter is behind.

    A step that may have no drafts whatever comes is none of the control's business: of such it hears (`hear`), before
    the next call of another kind, what was committed.

    Where a step without drafts can begin before the tokens of the one before are known, `rests` is asked before
    `observe`; if it does, the next step has begun, and `forgo` takes the place of `choose`. Where even asking would
    cost too much, the control takes a nap (`naps`).
    """

    def read(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        """How many tokens to let the drafter read in this step.

        Args:
            room: as for `want`.
            behind: sequence -> tokens, >= 1, that it has to read before it can draft for it.

        Returns: sequence -> tokens, 1 .. those it is behind; those that are not worth reading now are absent.
        """
        ...

    def has_read(self, tokens: int, seconds: float) -> None:
        """So many of them were read (fewer for want of memory), and it took so long."""
        ...

    def want(self, room: Mapping[int, int], *, bound: bool = False) -> dict[int, int]:
        """How many tokens to ask the drafter for.

        Args:
            room: every decoding sequence of the step -> tokens that may be drafted for it at most (length, capacity);
                0 for those that the drafter has not read.
            bound: the step has begun without drafts; what is asked for can only be compared with what comes.

        Returns: sequence -> tokens, >= 1; those that are not worth a draft now are absent.
        """
        ...

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        """How many of the drafted tokens to verify in this step, k >= 1; sequences with k = 0 are absent."""
        ...

    def rests(self, keys: Collection[int]) -> bool:
        """Whether no draft would be verified in the next step of these decoding sequences, however good it looks, and
        no drafter asked that computes."""
        ...

    def forgo(self, drafts: Mapping[int, Draft]) -> None:
        """The step takes no drafts. These may be compared with what comes."""
        ...

    def observe(self, committed: Committed, verified: Mapping[int, int], took: Took) -> None:
        """What the step came to.

        Args:
            committed: every decoding sequence of the step -> the tokens committed for it, clipped as the commit was.
            verified: sequence -> drafted tokens that were fed: as many as chosen, or fewer for want of memory.
            took: how long.
        """
        ...

    def hear(self, committed: Committed) -> None:
        """These tokens were committed in steps that could have no drafts, and are as long ago as they are."""
        ...

    def naps(self, keys: Collection[int]) -> int:
        """For how many steps of these sequences nobody need ask or tell anything, for it would come to nothing.

        Asked after `observe`. When that many are over, or the sequences are others, `slept` says so; no call but
        `end` comes before.
        """
        ...

    def slept(self, keys: Collection[int], steps: int) -> None:
        """So many plain steps are over, each of which began early where that can be."""
        ...

    def end(self, key: int) -> None:
        """The sequence is over; unknown ones are ignored."""
        ...


def in_turn(behind: Mapping[int, int], most: int) -> dict[int, int]:
    """So many tokens shared out, one sequence after the other."""
    reads: dict[int, int] = {}
    for key, tokens in behind.items():
        if most > 0:
            reads[key] = min(tokens, most)
            most -= reads[key]
    return reads
