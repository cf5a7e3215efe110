"""Rows into rectangles: the forwards of one step, once it is decided what each row computes.

A forward runs over neighbouring slots of one arena, as many tokens for each. Knows slots and lengths; which rows run
and how many tokens they get is decided in `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from phalanx.sched.arena import Arena, Layout
from phalanx.sched.plan import Forward
from phalanx.sched.sequence import Sequence

REPLAYED = 32
"""Tokens up to which ranks keep a rectangle's call and do it again; they build every call that is packed."""


def prefill_forwards(layout: Layout, rows: list[Sequence], chunks: Mapping[int, int], *, pad: bool) -> list[Forward]:
    """The chunks of these rows.

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
    arena: Arena, drafts: Mapping[int, Seq[int]], *, fresh_alone: bool, packs: bool = False
) -> list[Forward]:
    """Sampling forwards over an arena's decoding rows: one, unless rows without any state must be fed alone.

    Args:
        drafts: sequence number -> tokens to verify; the arena has room for the longest behind every row.
        packs: whether the ranks can leave out what pads rows.
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
    return [_decode_forward(arena, run, drafts, packs=packs) for run in runs]


def computed(rows: int, tokens: int, widest: int, *, packs: bool) -> int:
    """Tokens that a sampling forward computes for rows that are fed so many together, and so many at most."""
    return tokens if packs and _is_packed(rows, tokens, widest) else rows * widest


def _is_packed(rows: int, tokens: int, widest: int) -> bool:
    """Whether leaving padding out is worth a call that is built anew."""
    return tokens < rows * widest > REPLAYED


def _joins(layout: Layout, group: list[Sequence], row: Sequence, chunks: Mapping[int, int]) -> bool:
    """Whether a row's chunk may share a rectangle: neighbours, little padding, room for the padding."""
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


def _decode_forward(arena: Arena, rows: list[Sequence], drafts: Mapping[int, Seq[int]], *, packs: bool) -> Forward:
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
        packed=packs and _is_packed(len(rows), sum(valid), width),
    )
