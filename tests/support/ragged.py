"""Drives a Runner as a scheduler would, but at random: rows that join, finish, move, swap, grow, roll back and share
prefixes. Greedy output must equal mlx-lm's own, one sequence at a time, whatever happens in between.

The scheduler is not used, so that a failure here is a fault of the cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from phalanx.model.runner import Runner
from phalanx.sched.plan import Admit, Evict, Forward, Free, Move, Resize, Restore, RowOp, Share, Store, Swap

VOCAB = 512


def make_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths, some sharing their beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(longest)]
    prompts = []
    for i in range(count):
        length = rng.randint(1, longest) if i else longest
        kept = rng.choice([0, length // 2, max(0, length - 2)])
        prompts.append(shared[:kept] + [rng.randrange(3, VOCAB) for _ in range(length - kept)])
    return prompts


@dataclass
class Row:
    """One sequence that the driver generates."""

    index: int
    prompt: list[int]
    wanted: int
    reference: list[int]
    kv_len: int = 0
    output: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    @property
    def prefilled(self) -> bool:
        return self.kv_len >= len(self.prompt) - 1


class Driver:
    """Generates all prompts together; the output of prompt i must equal `references[i]`."""

    def __init__(
        self, runner: Runner, prompts: Sequence[list[int]], references: Sequence[list[int]], seed: int
    ) -> None:
        self.runner = runner
        self.rng = random.Random(seed)
        self.waiting = [
            Row(i, list(p), len(r) - (i * 5) % 8, list(r))
            for i, (p, r) in enumerate(zip(prompts, references, strict=True))
        ]
        self.decoding: list[Row] = []
        self.prefilling: list[Row] = []
        self.done: dict[int, list[int]] = {}
        self.entries: dict[int, list[int]] = {}
        self.rows, self.capacity = 0, 0
        self.counts = dict.fromkeys(["rollbacks", "restores", "shares", "swaps", "resizes", "packed"], 0)

    def run(self) -> list[list[int]]:
        """Step until every row has ended. Returns the outputs in the order of the prompts."""
        while self.waiting or self.decoding or self.prefilling:
            self.join()
            self.grow()
            self.decode()
            self.prefill()
            self.promote()
        self.runner.apply([Resize(arena=0, rows=0, capacity=0), *[Evict(entry=e) for e in self.entries]])
        return [self.done[i] for i in sorted(self.done)]

    # One step --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        if not self.waiting or len(self.decoding) + len(self.prefilling) >= 6 or self.rng.random() < 0.4:
            return
        row = self.waiting.pop(0)
        slot = len(self.decoding) + len(self.prefilling)
        self.ensure(slot + 1, len(row.prompt) + 1)
        self.prefilling.append(row)
        ops: list[RowOp] = [Admit(arena=0, slot=slot, seq=row.index)]
        entry, length = self.best_entry(row.prompt)
        if entry is not None and length:
            ops.append(Restore(arena=0, slot=slot, entry=entry, length=length))
            row.kv_len = length
            self.counts["restores"] += 1
        elif self.runner.facts.supports_rollback and self.decoding:
            src = self.rng.randrange(len(self.decoding))
            length = min(common(self.decoding[src].known, row.prompt), self.decoding[src].kv_len, len(row.prompt) - 1)
            if length:
                ops.append(Share(src_arena=0, src=src, arena=0, slot=slot, length=length))
                row.kv_len = length
                self.counts["shares"] += 1
        self.runner.apply(ops)

    def best_entry(self, prompt: list[int]) -> tuple[int | None, int]:
        best: tuple[int | None, int] = (None, 0)
        for entry, tokens in self.entries.items():
            length = min(common(tokens, prompt), len(prompt) - 1)
            if self.runner.facts.recurrent and length != len(tokens):
                continue
            if length > best[1]:
                best = (entry, length)
        return best

    def grow(self) -> None:
        longest = max((row.kv_len for row in self.decoding + self.prefilling), default=0)
        self.ensure(len(self.decoding) + len(self.prefilling), longest + 10)

    def ensure(self, rows: int, capacity: int) -> None:
        if rows > self.rows or capacity > self.capacity:
            self.rows, self.capacity = max(rows, self.rows), max(-(-capacity // 16) * 16, self.capacity)
            self.runner.apply([Resize(arena=0, rows=self.rows, capacity=self.capacity)])
            self.counts["resizes"] += 1

    def decode(self) -> None:
        if not self.decoding:
            return
        facts = self.runner.facts
        drafts = [self.draft(row) if facts.supports_rollback else [] for row in self.decoding]
        width = 1 + max(map(len, drafts))
        fed = [[row.known[row.kv_len], *draft] for row, draft in zip(self.decoding, drafts, strict=True)]
        packed = facts.packs and self.rng.random() < 0.7
        self.counts["packed"] += packed
        logits = self.feed(0, self.decoding, fed, width, sample=True, packed=packed)
        assert logits is not None
        chosen = mx.argmax(logits, axis=-1).flatten()
        mx.eval(chosen, *self.runner.written_caches())
        found: list[int] = chosen.tolist()
        for row, draft in zip(self.decoding, drafts, strict=True):
            tokens, found = found[: 1 + len(draft)], found[1 + len(draft) if packed else width :]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == tokens[accepted]:
                accepted += 1
            self.commit(row, tokens[: accepted + 1])
            self.counts["rollbacks"] += accepted < len(draft)
        for slot in reversed(range(len(self.decoding))):
            if len(self.decoding[slot].output) >= self.decoding[slot].wanted:
                self.finish(slot)

    def draft(self, row: Row) -> list[int]:
        """Up to 3 tokens, mostly those of the reference, never beyond the row's end."""
        done = len(row.output)
        count = min(self.rng.randrange(4), row.wanted - done - 1)
        right = row.reference[done : done + count]
        return [t if self.rng.random() < 0.7 else self.rng.randrange(3, VOCAB) for t in right]

    def commit(self, row: Row, tokens: list[int]) -> None:
        row.output += tokens
        row.kv_len += len(tokens)

    def prefill(self) -> None:
        if self.prefilling and self.runner.facts.supports_rollback and self.rng.random() < 0.3:
            rows = [row for row in self.prefilling if not row.prefilled]
            if len(rows) == len(self.prefilling):
                sizes = [min(self.rng.randint(1, 9), len(row.prompt) - 1 - row.kv_len) for row in rows]
                fed = [row.known[row.kv_len : row.kv_len + n] for row, n in zip(rows, sizes, strict=True)]
                self.feed(len(self.decoding), rows, fed, max(sizes), sample=False)
                for row, n in zip(rows, sizes, strict=True):
                    row.kv_len += n
                return
        for i, row in enumerate(self.prefilling):
            size = min(self.rng.randint(1, 9), len(row.prompt) - 1 - row.kv_len)
            if size > 0:
                self.feed(
                    len(self.decoding) + i, [row], [row.known[row.kv_len : row.kv_len + size]], size, sample=False
                )
                row.kv_len += size

    def promote(self) -> None:
        for i, row in enumerate(list(self.prefilling)):
            alone = self.runner.facts.recurrent and row.kv_len == 0 and self.decoding
            if not row.prefilled:
                continue
            first, slot = len(self.decoding), len(self.decoding) + self.prefilling.index(row)
            if alone:  # a one-token prompt of a recurrent model: its first token is fed alone
                logits = self.feed(slot, [row], [row.prompt], 1, sample=True)
                assert logits is not None
                self.commit(row, [int(mx.argmax(logits[0, -1]).item())])
            if slot != first:
                self.runner.apply([Swap(arena=0, a=first, b=slot)])
                other = self.prefilling[0]
                self.prefilling[self.prefilling.index(row)] = other
                self.prefilling[0] = row
                self.counts["swaps"] += 1
            self.prefilling.pop(0)
            self.decoding.append(row)
            if self.runner.facts.recurrent:
                break
            assert i >= 0

    def finish(self, slot: int) -> None:
        row = self.decoding[slot]
        self.done[row.index] = row.output
        ops: list[RowOp] = []
        if self.rng.random() < 0.7:
            entry = len(self.done)
            length = row.kv_len if self.runner.facts.recurrent else self.rng.randint(1, row.kv_len)
            ops.append(Store(arena=0, slot=slot, entry=entry, length=length))
            self.entries[entry] = row.known[:length]
        ops.append(Free(arena=0, slot=slot))
        last = len(self.decoding) - 1
        if slot != last:
            ops.append(Move(src_arena=0, src=last, arena=0, dst=slot))
        if self.prefilling:
            ops.append(Move(src_arena=0, src=last + len(self.prefilling), arena=0, dst=last))
            self.prefilling.insert(0, self.prefilling.pop())
        self.decoding[slot] = self.decoding[last]
        self.decoding.pop()
        self.runner.apply(ops)

    def feed(
        self, start: int, rows: list[Row], fed: list[list[int]], width: int, *, sample: bool, packed: bool = False
    ) -> mx.array | None:
        forward = Forward(
            arena=0,
            start=start,
            seqs=tuple(row.index for row in rows),
            tokens=tuple(tuple(t + [0] * (width - len(t))) for t in fed),
            valid=tuple(len(t) for t in fed),
            sample=sample,
            packed=packed,
        )
        return self.runner.forward(forward, [row.kv_len for row in rows])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
