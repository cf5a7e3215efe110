"""How many drafts fit: memory, the step's token budget and the end of the answer limit them.

A rectangle is as wide as its widest row, and the padding of the other rows is written into their buffers too, so every
row of an arena needs room for the longest draft. Drafts never take memory from a row: they are cut to free memory. Does
not know drafters, nor how many drafts pay (`spec/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from phalanx.sched.admission import Admission
from phalanx.sched.arena import ArenaLayout
from phalanx.sched.page_admission import PageAdmission
from phalanx.sched.sequence import Sequence

Drafts = Mapping[int, Seq[int]]
"""Sequence number -> tokens that may follow its last known one."""


def after_next(seq: Sequence) -> int:
    """Tokens that `max_tokens` still allows after the next one."""
    return max(0, seq.request.stop.max_tokens - seq.n_output - 1)


def useful_drafts(seq: Sequence) -> int:
    """Most drafts that the request allows and `max_tokens` leaves room for; the token sampled after them counts too."""
    most = seq.request.max_drafts
    return after_next(seq) if most is None else min(after_next(seq), most)


def fit_drafts(
    layout: ArenaLayout, admission: Admission | PageAdmission, drafts: Drafts, max_tokens: int
) -> dict[int, tuple[int, ...]]:
    """The drafts of decoding rows, cut to what this step can feed; grows arenas where memory is free.

    Args:
        max_tokens: of all rectangles together, padding included, since every token has logits over the vocabulary.

    Returns:
        Sequence number -> at least one token; rows without drafts are absent.
    """
    fitted: dict[int, tuple[int, ...]] = {}
    if not drafts:
        return fitted
    widest = max_tokens // max(1, len(layout.rows())) - 1
    for arena in layout.arenas:
        wanted = {
            row.number: tuple(drafts[row.number][: max(0, min(widest, useful_drafts(row)))])
            for row in arena.rows[: arena.n_decoding]
            if row.number in drafts
        }
        most = max(map(len, wanted.values()), default=0)
        room = admission.draft_room(arena, most) if most else 0
        fitted.update((number, cut) for number, tokens in wanted.items() if (cut := tokens[:room]))
    return fitted
