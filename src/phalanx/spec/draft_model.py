"""A smaller model as the drafter: computed on the leader, all rows together, on ragged rows of its own.

Its cache follows the target's in the same way: what was guessed wrong is cut off by setting a length. It draws with
the target's own noise, parameters and histories, so that a draft model which agrees about the distribution also
agrees about the token, at any temperature. A new prompt is read in chunks first. Does not know whether it pays.
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

ARENA = 0
AT_ONCE = 8  # known tokens that a first drafting forward may feed at most: as many as a row usually gains in a step

Place = Callable[[int, Sequence[int]], SamplingMetadata]  # where a sequence draws its next token after more drafts


@dataclass(slots=True)
class _Row:
    tokens: list[int]  # known
    slot: int = -1  # -1: not in the buffers
    computed: int = 0  # known tokens in the cache
    guessed: list[int] = field(default_factory=list)  # tokens in the cache behind all known ones

    @property
    def pending(self) -> list[int]:
        """Known tokens to feed before the next one can be drawn: the last one, at least."""
        return self.tokens[self.computed :]


@dataclass(eq=False)
class DraftModel(Drafter):
    """A `Drafter` that reads."""

    _runner: Runner  # the draft model; one whose rows roll back
    _vocab_size: int  # of the target; no other token is drawn
    _kv_budget: int  # bytes for its rows; a sequence that would need more is not drafted for
    _place: Place  # the target's own sampling position
    _largest_logits: int = 256  # tokens x vocabulary of one forward, with one token per row at least
    _rows: dict[int, _Row] = field(default_factory=dict)
    _slots: list[_Row] = field(default_factory=list)
    _allocated: tuple[int, int] = (0, 0)  # rows, tokens
    computes: bool = True

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        self._rows[key] = _Row(list(tokens))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """Tokens were committed: as far as they were guessed they are computed already; other guesses are cut off."""
        row = self._rows[key]
        pairs = zip(tokens, row.guessed, strict=False)
        row.computed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        row.guessed.clear()
        row.tokens.extend(tokens)

    def end(self, key: int) -> None:
        self._remove(self._rows.pop(key))

    def unread(self, keys: Iterable[int]) -> dict[int, int]:
        """All but what a first drafting forward may feed; rows for which there is no memory now are not read."""
        rows = {key: row for key in keys if len((row := self._rows[key]).pending) > self._at_once}
        return {key: len(row.pending) - 1 for key, row in rows.items() if self._size(row, BUCKETS) is not None}

    def read(self, tokens: Mapping[int, int]) -> int:
        """One forward per row."""
        done = 0
        for key, n in tokens.items():
            row = self._rows[key]
            row.guessed.clear()
            if self._enters(row, 1):
                chunk = row.pending[:-1][:n]
                self._runner.forward(_forward(row.slot, [chunk], sample=False), [row.computed])
                row.computed += len(chunk)
                done += len(chunk)
        return done

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        """Drafts of the lengths wanted for all rows that were read far enough."""
        rows = {key: self._rows[key] for key, n in wanted.items() if self._enters(self._rows[key], n)}
        rows = {key: row for key, row in rows.items() if row.slot >= 0}  # one may have given way to another
        for row in rows.values():
            row.guessed.clear()
            row.computed = min(row.computed, len(row.tokens) - 1)
        at_once = self._at_once
        drafts: dict[int, list[int]] = {key: [] for key, row in rows.items() if len(row.pending) <= at_once}
        fed = {key: rows[key].pending for key in drafts}
        while fed:
            for key, token in self._draw(fed, drafts).items():
                drafts[key].append(token)
            fed = {key: draft[-1:] for key, draft in drafts.items() if len(draft) < wanted[key]}
        return {key: Draft.by_position(draft) for key, draft in drafts.items()}

    @property
    def _at_once(self) -> int:
        """Tokens of each row that a drafting forward may feed: each has logits, though only a row's last are of use."""
        return max(1, min(AT_ONCE, self._largest_logits // max(1, len(self._slots))))

    def _draw(self, fed: Mapping[int, list[int]], drafts: Mapping[int, list[int]]) -> dict[int, int]:
        """Feed tokens to some rows and draw one for each; rows between take part with a token that never counts."""
        rows = {self._rows[key].slot: (key, self._rows[key], tokens) for key, tokens in fed.items()}
        first, last = min(rows), max(rows)
        inputs = [rows[slot][2] if slot in rows else [0] for slot in range(first, last + 1)]
        lengths = [row.computed + len(row.guessed) for row in self._slots[first : last + 1]]
        logits = self._runner.forward(_forward(first, inputs, sample=True), lengths)
        assert logits is not None
        width = max(map(len, inputs))
        ends = mx.array([(slot - first) * width + len(tokens) - 1 for slot, (_, _, tokens) in rows.items()])
        behind = logits.reshape(-1, logits.shape[-1])[ends, : self._vocab_size]
        places = [_unscored(self._place(key, drafts[key])) for key, _, _ in rows.values()]
        sampled = sample(behind, places, self._runner.settle())
        for key, row, tokens in rows.values():
            if drafts[key]:
                row.guessed += tokens
            else:
                row.computed += len(tokens)
        return {key: token for (key, _, _), token in zip(rows.values(), sampled.tokens, strict=True)}

    def _size(self, row: _Row, drafts: int) -> tuple[int, int] | None:
        """Rows and tokens of buffers that hold this row and its drafts too, generous if possible; None: no room."""
        rows, tokens = len(self._slots) + (row.slot < 0), len(row.tokens) + drafts + AT_ONCE
        had_rows, had_tokens = self._allocated
        facts = self._runner.facts
        if facts.max_len is not None and tokens - AT_ONCE > facts.max_len:
            return None
        if rows <= had_rows and tokens <= had_tokens:
            return self._allocated
        roomy = max(had_rows, 1 << (rows - 1).bit_length()), max(round_up(tokens * 9 // 8), had_tokens)
        tight = rows, max(round_up(tokens), had_tokens)
        most = self._kv_budget // facts.bytes_per_token
        return next((size for size in (roomy, tight) if math.prod(size) <= most), None)

    def _enters(self, row: _Row, drafts: int) -> bool:
        """Whether the row is in the buffers, with room for its tokens and that many drafts; makes room if it can."""
        size = self._size(row, drafts)
        if size is None:
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


def _unscored(position: SamplingMetadata) -> SamplingMetadata:
    """The same without log-probabilities."""
    return replace(position, sampling=with_fields(position.sampling, logprobs=None))
