"""A smaller model as the drafter: computed on the leader, all rows together, on ragged rows of its own.

Its cache rolls back as the target's does, by setting a length, and takes memory by the page where the target's does.
It samples with the target's own noise, parameters and histories, so that a draft model with the same distribution draws
the same token, at any temperature. A new prompt is read in chunks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import mlx.core as mx
from msgspec.structs import replace as with_fields

from phalanx.model.runner import Runner
from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.model.sampling.sampler import sample
from phalanx.sched.admission import round_up
from phalanx.sched.plan import Admit, Forward, Free, Move, Resize
from phalanx.spec.drafters import BUCKETS, Draft, Drafter

ARENA = 0  # the only one of a draft model's runner
MAX_CATCH_UP = 8  # known tokens that a drafting forward feeds per row, at most: as many as a step usually commits

MetadataAfter = Callable[[int, Sequence[int]], SamplingMetadata]
"""(sequence, drafts) -> the metadata with which the target would sample the token after these drafts."""


@dataclass(slots=True)
class _Row:
    tokens: list[int]  # known
    slot: int = -1  # -1: not in the buffers
    computed: int = 0  # known tokens in the cache
    guessed: list[int] = field(default_factory=list)  # tokens in the cache behind all known ones

    @property
    def pending(self) -> list[int]:
        """Known tokens not in the cache: they are fed before the next token can be drawn; at least the last one."""
        return self.tokens[self.computed :]


@dataclass(eq=False)
class DraftModel(Drafter):
    """A `Drafter` that reads prompts."""

    _runner: Runner  # of the draft model, whose rows can roll back
    _vocab_size: int  # of the target; only its tokens are drawn
    _kv_budget: int  # bytes for its rows; sequences beyond it get no drafts
    _metadata_after: MetadataAfter
    _max_logits: int = 256  # most tokens with logits in one forward; one per row at least
    _reserved: tuple[int, int] | None = None  # rows, tokens: buffers that take memory by the page; None: they grow
    _rows: dict[int, _Row] = field(default_factory=dict)
    _slots: list[_Row] = field(default_factory=list)
    _allocated: tuple[int, int] = (0, 0)  # rows, tokens
    computes: bool = True

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        self._rows[key] = _Row(list(tokens))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """Tokens were committed. Those that were guessed are in the cache already; wrong guesses are rolled back."""
        row = self._rows[key]
        pairs = zip(tokens, row.guessed, strict=False)
        row.computed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        row.guessed.clear()
        row.tokens.extend(tokens)

    def end(self, key: int) -> None:
        self._remove(self._rows.pop(key))

    def unread(self, keys: Iterable[int]) -> dict[int, int]:
        """Rows with more pending tokens than a drafting forward feeds; those without memory now are absent."""
        rows = {key: row for key in keys if len((row := self._rows[key]).pending) > self._max_catch_up}
        return {key: len(row.pending) - 1 for key, row in rows.items() if self._size(row, BUCKETS) is not None}

    def read(self, tokens: Mapping[int, int]) -> int:
        """One forward per row."""
        done = 0
        for key, n in tokens.items():
            row = self._rows[key]
            row.guessed.clear()
            if self._reserve(row, 1):
                chunk = row.pending[:-1][:n]
                self._runner.forward(_forward(row.slot, [chunk], sample=False), [row.computed])
                row.computed += len(chunk)
                done += len(chunk)
        return done

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        """Drafts of the wanted lengths for all rows that are read up to `MAX_CATCH_UP` tokens."""
        self._runner.begin(0)  # no step's number is of use; ended rows give their pages back
        rows = {key: self._rows[key] for key, n in wanted.items() if self._reserve(self._rows[key], n)}
        rows = {key: row for key, row in rows.items() if row.slot >= 0}  # making room may have removed some
        for row in rows.values():
            row.guessed.clear()
            row.computed = min(row.computed, len(row.tokens) - 1)
        drafts: dict[int, list[int]] = {key: [] for key, row in rows.items() if len(row.pending) <= self._max_catch_up}
        fed = {key: rows[key].pending for key in drafts}
        while fed:
            for key, token in self._draw(fed, drafts).items():
                drafts[key].append(token)
            fed = {key: draft[-1:] for key, draft in drafts.items() if len(draft) < wanted[key]}
        return {key: Draft(draft, range(len(draft))) for key, draft in drafts.items()}

    @property
    def _max_catch_up(self) -> int:
        """Known tokens per row that a drafting forward may feed. The forward computes logits for each."""
        return max(1, min(MAX_CATCH_UP, self._max_logits // max(1, len(self._slots))))

    def _draw(self, fed: Mapping[int, list[int]], drafts: Mapping[int, list[int]]) -> dict[int, int]:
        """Feed tokens to some rows and draw one for each; rows between them are fed a token that is discarded."""
        rows = {self._rows[key].slot: (key, self._rows[key], tokens) for key, tokens in fed.items()}
        first, last = min(rows), max(rows)
        inputs = [rows[slot][2] if slot in rows else [0] for slot in range(first, last + 1)]
        lengths = [row.computed + len(row.guessed) for row in self._slots[first : last + 1]]
        logits = self._runner.forward(_forward(first, inputs, sample=True), lengths)
        assert logits is not None
        width = max(map(len, inputs))
        ends = mx.array([(slot - first) * width + len(tokens) - 1 for slot, (_, _, tokens) in rows.items()])
        behind = logits.reshape(-1, logits.shape[-1])[ends, : self._vocab_size]
        wanted = [self._metadata_after(key, drafts[key]) for key, _, _ in rows.values()]
        unscored = [replace(entry, sampling=with_fields(entry.sampling, logprobs=None)) for entry in wanted]
        sampled = sample(behind, unscored, self._runner.written_caches())
        for key, row, tokens in rows.values():
            if drafts[key]:
                row.guessed += tokens
            else:
                row.computed += len(tokens)
        return {key: token for (key, _, _), token in zip(rows.values(), sampled.tokens, strict=True)}

    def _size(self, row: _Row, drafts: int) -> tuple[int, int] | None:
        """Rows and tokens of buffers that also hold this row and its drafts, generous if possible; None: no memory."""
        rows, tokens = len(self._slots) + (row.slot < 0), len(row.tokens) + drafts + MAX_CATCH_UP
        had_rows, had_tokens = self._allocated
        facts = self._runner.facts
        if facts.max_len is not None and tokens - MAX_CATCH_UP > facts.max_len:
            return None
        if self._reserved is not None:
            used = tokens + sum(len(other.tokens) + MAX_CATCH_UP for other in self._slots if other is not row)
            fits = used <= self._kv_budget // facts.bytes_per_token
            return self._reserved if fits and rows <= self._reserved[0] and tokens <= self._reserved[1] else None
        if rows <= had_rows and tokens <= had_tokens:
            return self._allocated
        roomy = max(had_rows, 1 << (rows - 1).bit_length()), max(round_up(tokens * 9 // 8), had_tokens)
        tight = rows, max(round_up(tokens), had_tokens)
        most = self._kv_budget // facts.bytes_per_token
        return next((size for size in (roomy, tight) if math.prod(size) <= most), None)

    def _reserve(self, row: _Row, drafts: int) -> bool:
        """Make room in the buffers for the row and this many drafts. Without memory, remove it and return False."""
        if (size := self._size(row, drafts)) is None:
            self._remove(row)
            return False
        if size != self._allocated:
            self._resize(*size)
        if row.slot < 0:
            row.slot = len(self._slots)
            self._slots.append(row)
            self._runner.apply([Admit(ARENA, row.slot, row.slot)])
        return True

    def _remove(self, row: _Row) -> None:
        if row.slot < 0:
            return
        self._runner.apply([Free(ARENA, row.slot)])
        last = self._slots.pop()
        if last is not row:
            self._runner.apply([Move(ARENA, last.slot, ARENA, row.slot)])
            self._slots[row.slot], last.slot = last, row.slot
        row.slot, row.computed = -1, 0
        row.guessed.clear()
        if not self._slots:
            self._resize(0, 0)

    def _resize(self, rows: int, tokens: int) -> None:
        self._runner.apply([Resize(ARENA, rows, tokens)])
        self._allocated = (rows, tokens)


def _forward(start: int, inputs: Sequence[Sequence[int]], *, sample: bool) -> Forward:
    width, rows = max(map(len, inputs)), tuple(range(start, start + len(inputs)))
    tokens = tuple((*row, *(0,) * (width - len(row))) for row in inputs)
    return Forward(ARENA, start, rows, tokens, tuple(map(len, inputs)), sample=sample)
