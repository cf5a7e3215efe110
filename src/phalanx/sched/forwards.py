"""Groups rows into rectangles: the forwards of one step, once `scheduler.py` has decided what each row computes.

A forward runs over neighbouring slots of one arena and feeds the same number of tokens to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from phalanx.sched.arena import Arena, ArenaLayout
from phalanx.sched.plan import Forward
from phalanx.sched.sequence import Sequence


def prefill_forwards(
    layout: ArenaLayout, rows: list[Sequence], chunks: Mapping[int, int], *, pad: bool
) -> list[Forward]:
    """Prefill forwards for these rows.

    Args:
        chunks: sequence number -> tokens to compute, >= 1 for every row.
        pad: whether rows of different chunk lengths may share a rectangle (not with recurrent state).
    """
    groups: list[list[Sequence]] = []
    for row in sorted(rows, key=lambda row: (row.arena, row.slot)):
        if pad and groups and _joins(layout, groups[-1], row, chunks):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_chunk_forward(group, chunks) for group in groups]


def decode_forwards(
    arena: Arena, drafts: Mapping[int, Seq[int]], *, fresh_alone: bool, pack_above: int | None = None
) -> list[Forward]:
    """Sampling forwards over an arena's decoding rows: one, unless rows without any state must be fed alone.

    Args:
        drafts: sequence number -> tokens to verify; the arena has room for the longest draft behind every row.
        fresh_alone: rows that have computed nothing get a forward of their own (recurrent state).
        pack_above: as in `SchedulerConfig`.
    """
    runs: list[list[Sequence]] = []
    joinable = False
    for row in arena.rows[: arena.n_decoding]:
        alone = fresh_alone and row.kv_len == 0 and len(row.tokens) == 1
        if joinable and not alone:
            runs[-1].append(row)
        else:
            runs.append([row])
        joinable = not alone
    return [_decode_forward(arena, run, drafts, pack_above) for run in runs]


def computed(rows: int, tokens: int, widest: int, *, pack_above: int | None) -> int:
    """Tokens that a sampling forward computes, padding included.

    Args:
        rows: that the forward feeds.
        tokens: fed to all rows together.
        widest: tokens fed to the row with the longest draft.
        pack_above: as in `SchedulerConfig`.
    """
    return tokens if _is_packed(rows, tokens, widest, pack_above) else rows * widest


def _is_packed(rows: int, tokens: int, widest: int, pack_above: int | None) -> bool:
    """Whether the forward is fed without padding: a packed call is never replayed, so a small one stays padded."""
    return pack_above is not None and tokens < rows * widest > pack_above


def _joins(layout: ArenaLayout, group: list[Sequence], row: Sequence, chunks: Mapping[int, int]) -> bool:
    """Whether a row's chunk may share the group's rectangle: neighbours, little padding, room for the padding."""
    last = group[-1]
    if row.arena != last.arena or row.slot != last.slot + 1 or row.wants_scores or last.wants_scores:
        return False
    members = [*group, row]
    sizes = [chunks[r.number] for r in members]
    width = max(sizes)
    if 4 * sum(sizes) < 3 * width * len(sizes):
        return False
    capacity = layout.arenas[row.arena].capacity
    return all(r.kv_len + width <= capacity for r in members)


def _chunk_forward(rows: list[Sequence], chunks: Mapping[int, int]) -> Forward:
    sizes = tuple(chunks[row.number] for row in rows)
    width = max(sizes)
    tokens = tuple(
        (*row.tokens[row.kv_len : row.kv_len + n], *(0,) * (width - n)) for row, n in zip(rows, sizes, strict=True)
    )
    return Forward(
        arena=rows[0].arena,
        start=rows[0].slot,
        seqs=tuple(row.number for row in rows),
        tokens=tokens,
        valid=sizes,
        sample=False,
        score=rows[0].wants_scores and rows[0].kv_len + 1 < rows[0].prompt_len,
    )


def _decode_forward(
    arena: Arena, rows: list[Sequence], drafts: Mapping[int, Seq[int]], pack_above: int | None
) -> Forward:
    fed = [(row.tokens[-1], *drafts.get(row.number, ())) for row in rows]
    valid = tuple(map(len, fed))
    width = max(valid)
    return Forward(
        arena=arena.index,
        start=rows[0].slot,
        seqs=tuple(row.number for row in rows),
        tokens=tuple((*tokens, *(0,) * (width - len(tokens))) for tokens in fed),
        valid=valid,
        sample=True,
        packed=_is_packed(len(rows), sum(valid), width, pack_above),
    )
