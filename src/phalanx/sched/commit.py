"""Turns verified tokens into committed tokens; no other file does.

The `Commit` returned is the only source of client events, token history, KV length, proposer history and counters.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from phalanx.sched.plan import Commit
from phalanx.sched.sequence import Sequence
from phalanx.sched.stop import clip


def accept(drafts: Seq[int], sampled: Seq[int]) -> Seq[int]:
    """The verified tokens: the drafts that equal the token sampled in their place, then the first sampled one.

    Args:
        drafts: [k].
        sampled: [k + 1], the token sampled behind y and behind each draft; those behind a wrong draft mean nothing.

    Returns:
        1..k + 1 tokens.
    """
    right = 0
    while right < len(drafts) and drafts[right] == sampled[right]:
        right += 1
    return sampled[: right + 1]


def commit_tokens(seq: Sequence, kv_len: int, fed: int, verified: Seq[int]) -> Commit:
    """Commit the outcome of a sampling forward.

    Args:
        kv_len: valid KV length before the sampling forward.
        fed: tokens that forward computed for the row: the last known token y and the drafts d1..dk, so k + 1.
        verified: the accepted drafts and the token sampled after them; 1..k+1 tokens, or fewer if no token was left.

    The m committed tokens mean that y and the first m - 1 drafts were right, so m positions became valid.
    """
    kept = clip(seq.request.stop, seq.n_output, verified, constrained=bool(seq.request.grammar))
    return Commit(
        seq=seq.number,
        tokens=tuple(verified[: kept.keep]),
        computed=kv_len + fed,
        kv_len=kv_len + kept.keep,
        finish=kept.finish,
        stop_id=kept.stop_id,
    )


def commit_chunk(seq: Sequence, kv_len: int, computed: int) -> Commit:
    """Commit a prefill chunk: `computed` more known tokens are in the KV cache, no token is new."""
    return Commit(seq=seq.number, tokens=(), computed=kv_len + computed, kv_len=kv_len + computed)
