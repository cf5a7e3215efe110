"""The interface of a control: how many tokens to draft, and how many of them to verify.
`adaptive.py` weighs costs against gains; `rules.py` has the fixed rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from phalanx.spec.drafters import Draft

Committed = Mapping[int, Sequence[int]]  # decoding sequence -> the tokens of a step


class DraftPrefill(NamedTuple):
    """A sequence that a draft model has to read before it can draft for it."""

    tokens: int  # to read, >= 1
    useful: int  # output tokens that may be drafted


class StepTime(NamedTuple):
    """Durations of a step, in seconds; all but the first two are sums since the last `observe`."""

    step_s: float | None  # without prefill and reading; None where rows were moved or buffers resized as well
    drafting_s: float = 0.0  # of `step_s`
    overhead_s: float = 0.0  # calls of the control, besides drafting
    tokens_read: int = 0
    reading_s: float = 0.0
    skipped: int = 0  # steps without a call of the control (backoff)


class Control(Protocol):
    """Chooses k per sequence. A decoding step calls `request`, `choose` if there are drafts, `can_overlap` under async
    scheduling, and `observe`. All methods change state."""

    def request(
        self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
    ) -> dict[int, int]:
        """How many tokens, >= 1, the drafter should read of unread sequences and draft for others; the rest are absent.

        Args:
            room: decoding sequence -> tokens that may be drafted for it; 0 where it is unread or ends.
            unread: sequences to be read first; those that still prefill are not in `room`.
            overlapped: the step was dispatched without drafts; new drafts can only be compared with its tokens.
        """

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        """How many drafted tokens to verify in this step, >= 1; sequences with none are absent."""

    def can_overlap(self, keys: Collection[int]) -> bool:
        """Whether the next step of these sequences may be dispatched now, without drafts."""

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        """A step is over. Returns the backoff: how many steps of the same sequences to skip before the next call.

        Args:
            verified: sequence -> drafted tokens that were fed: as many as chosen, or fewer if memory is short.
            time: None for a step that was not allowed to have drafts: it does not change the budget.
        """

    def end(self, key: int) -> None:
        """The sequence is over; unknown ones are ignored."""


def share_out(unread: Mapping[int, DraftPrefill], most: int) -> dict[int, int]:
    """Up to `most` tokens to read, one sequence after the other."""
    reads: dict[int, int] = {}
    for key, (tokens, _) in unread.items():
        reads[key] = min(tokens, most - sum(reads.values()))
    return {key: tokens for key, tokens in reads.items() if tokens}
