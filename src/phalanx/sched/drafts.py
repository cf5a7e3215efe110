"""How many drafts fit: memory, the step's budget and the answer's end limit what a plan feeds beside known tokens.

A rectangle is as wide as its widest row, and what pads the others is written into their buffers too, so every row of
an arena needs room for the longest draft. Drafts never take memory from anybody: where there is none left, they are
cut. Who drafts, and how much of it pays, is decided in `spec/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from phalanx.sched.admission import Admission
from phalanx.sched.arena import Arena, Layout
from phalanx.sched.sequence import Sequence

Drafts = Mapping[int, Seq[int]]
"""Sequence number -> tokens that may follow its last known one."""


def after_next(seq: Sequence) -> int:
    """Output tokens that may follow the next one."""
    return max(0, seq.request.stop.max_tokens - seq.n_output - 1)


def useful_drafts(seq: Sequence) -> int:
    """Drafts that its request allows and that could be committed: the token sampled after them is an output token as
    well."""
    most = seq.request.most_drafts
    return after_next(seq) if most is None else min(after_next(seq), most)


def fit_drafts(layout: Layout, admission: Admission, drafts: Drafts, most_tokens: int) -> dict[int, tuple[int, ...]]:
    """The drafts of decoding rows, cut to what this step can feed; grows arenas where memory is free.

    Args:
        most_tokens: of all rectangles together, what pads them included: each has logits (a vocabulary wide).

    Returns:
        Sequence number -> at least one token.
    """
    fitted: dict[int, tuple[int, ...]] = {}
    if not drafts:
        return fitted
    widest = most_tokens // max(1, len(layout.rows())) - 1
    for arena in layout.arenas:
        wanted = {
            row.number: tuple(drafts[row.number][: max(0, min(widest, useful_drafts(row)))])
            for row in arena.rows[: arena.n_decoding]
            if row.number in drafts
        }
        room = _room(arena, admission, max(map(len, wanted.values()), default=0))
        fitted.update((number, cut) for number, tokens in wanted.items() if (cut := tokens[:room]))
    return fitted


def _room(arena: Arena, admission: Admission, wanted: int) -> int:
    """Tokens that every row of the arena can take beyond its known ones, `wanted` at most."""
    if not wanted:
        return 0
    longest = max(len(row.tokens) for row in arena.rows)
    admission.widen(arena, longest + wanted)
    return max(0, min(wanted, arena.capacity - longest))
