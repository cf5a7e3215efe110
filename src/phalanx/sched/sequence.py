"""One sequence on the leader: its known tokens, how many are computed, and where its row lives.

There is no prefill phase and no decode phase: *computed* (`kv_len`) catches up with *known* (`tokens`). A row whose
only uncomputed token is the last one is ready to sample; everything before that is prefill.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from phalanx.sched.plan import Commit
from phalanx.types import Finished, FinishReason, SequenceRequest, Timing


def state_digest(rows: Iterable[tuple[int, int, int, int, int]]) -> int:
    """CRC-32 over (arena, slot, seq, computed positions, crc of committed tokens) of every row, in slot order."""
    return zlib.crc32(array("q", [value for row in rows for value in row]).tobytes())


def extend_crc(crc: int, tokens: Iterable[int]) -> int:
    """Extend the CRC-32 of a row's committed tokens, which is part of the row's digest."""
    return zlib.crc32(array("q", tokens).tobytes(), crc)


def limit_length(request: SequenceRequest, room: int) -> SequenceRequest:
    """The request with `max_tokens` limited to the context's `room`."""
    if request.stop.max_tokens <= room:
        return request
    stop = msgspec.structs.replace(request.stop, max_tokens=max(1, room))
    return msgspec.structs.replace(request, stop=stop)


class Hit(NamedTuple):
    """The first `length` tokens of prefix entry `entry` are a prefix of the prompt looked up."""

    entry: int
    length: int


class SequenceEnding(NamedTuple):
    """Why and how a sequence ends."""

    reason: FinishReason
    detail: str = ""
    stop_id: int | None = None
    n_tokens: int | None = None  # output tokens that count, where the server found a stop string; None: all
    keep: bool = True  # whether its computed prefix may be kept


class Sequence:
    """Mutable state of one unfinished sequence. Only the scheduler changes it."""

    def __init__(self, number: int, request: SequenceRequest, now: float) -> None:
        self.number = number
        self.request = request
        self.id = request.id
        self.prompt_len = len(request.prompt)
        self.tokens: list[int] = [*request.prompt, *request.committed]  # known
        self.kv_len = 0  # computed
        self.in_flight = 0  # positions after kv_len that a step in flight computes
        self.ending: SequenceEnding | None = None  # applied when that step returns
        self.crc = 0  # over tokens committed since admission, as in the mirrors
        self.arena = -1
        self.slot = -1  # -1: waiting
        self.room = 0  # tokens with promised memory, if rows take it by the page
        self.decoding = False  # slot lies in the arena's decoding prefix
        self.prefix: Hit | Sequence | None = None  # what its row copies its first tokens from
        self.prefix_len = 0  # tokens to copy
        self.nearest_len = 0  # tokens of the entry that they are from, at least those to copy
        self.arrived = now
        self.deadline = None if request.timeout_s is None else now + request.timeout_s
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.cached_tokens = 0
        self.disk_tokens = 0  # of those, loaded from disk for it
        self.is_loaded = False  # its prefix was loaded from disk for it
        self.looked_on_disk = False
        self.checkpoint = request.checkpoint  # computed tokens at which its prefix is kept; 0: none, or done
        self.load: int | None = None  # the prefix entry that was loaded for it
        self.drafted = 0  # draft tokens verified
        self.accepted = 0  # of those, committed

    @property
    def n_output(self) -> int:
        """Committed output tokens, including those from before an engine restart."""
        return len(self.tokens) - self.prompt_len

    @property
    def to_prefill(self) -> int:
        """Known tokens to compute before the last one can be fed."""
        return max(0, len(self.tokens) - 1 - self.kv_len)

    @property
    def next_chunk(self) -> int:
        """The largest next chunk: it ends at the checkpoint, if that lies ahead."""
        return self.checkpoint - self.kv_len if self.kv_len < self.checkpoint else self.to_prefill

    @property
    def extent(self) -> int:
        """Positions that its row needs, those in flight included."""
        return max(len(self.tokens), self.kv_len + self.in_flight)

    @property
    def wants_scores(self) -> bool:
        """Whether the request asks for prompt log-probabilities, so that every prompt token must be computed."""
        return self.request.prompt_logprobs is not None

    def commit(self, commit: Commit, now: float) -> None:
        """Take in the tokens that a step has verified."""
        self.drafted += commit.computed - len(self.tokens)
        self.accepted += len(commit.tokens) - 1
        self.tokens.extend(commit.tokens)
        self.crc = extend_crc(self.crc, commit.tokens)
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def unplace(self) -> None:
        """The sequence lost its row: all its known tokens must be computed again."""
        self.arena = self.slot = -1
        self.room = 0
        self.decoding = False
        self.prefix = None
        self.prefix_len = self.nearest_len = 0
        self.kv_len = 0
        self.crc = 0

    def finished(self, ending: SequenceEnding, now: float) -> Finished:
        """The last event of the sequence."""
        return Finished(
            id=self.id,
            reason=ending.reason,
            n_tokens=self.n_output,
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            disk_tokens=self.disk_tokens,
            timing=self.timing(now),
            detail=ending.detail,
            stop_id=ending.stop_id,
        )

    def timing(self, now: float) -> Timing:
        """How long the sequence waited, prefilled and decoded until `now`."""
        started = self.first_scheduled if self.first_scheduled is not None else now
        first = self.first_token if self.first_token is not None else now
        last = self.last_token if self.last_token is not None else first
        return Timing(queue_s=started - self.arrived, prefill_s=max(0.0, first - started), decode_s=last - first)
