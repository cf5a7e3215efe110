"""A machine and texts in numbers, to try controls on: what a step takes, and how far drafts are right.

Row r's text is endless; its token at place p is p. A draft is right as far as the world says, then wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from support.drafts import by_position

from phalanx.sched.forwards import computed
from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.control import Control, DraftPrefill, StepTime
from phalanx.spec.drafters import Draft

ROWS = (1, 6)
"""So many rows decode in most tests."""
Curve = Callable[[int, float], float]
"""(rows, tokens per row) -> seconds of a step."""


def memory_bound(rows: int, width: float) -> float:
    """Weights dominate: a further token is nearly free."""
    return 1.0 + 0.02 * (rows * width - 1)


def few_cores(rows: int, width: float) -> float:
    """Reading the weights is half of a step of one token."""
    return 0.5 + 0.5 * rows * width


def compute_bound(rows: int, width: float) -> float:
    """Every token costs the same: no draft pays."""
    return float(rows * width)


def stairs(rows: int, width: float) -> float:
    """Kernels take four rows of a product at a time."""
    return 0.2 + 0.8 * -(-rows * width // 4)


CURVES = (memory_bound, few_cores, compute_bound, stairs)


@dataclass
class World:
    """Runs a control step by step."""

    control: Control
    curve: Curve
    right: Callable[[int, int], int]
    """(row, place) -> how many tokens drafted there would be right."""
    drafting_s: float = 0.0
    """Seconds of the drafter per token of the longest draft wanted."""
    drafting_at_all_s: float = 0.0
    """Seconds of every call of the drafter, besides."""
    overhead_s: float = 0.0
    """Seconds of the control in each step in which it is told anything."""
    noise: float = 0.0
    """Largest relative disturbance of a step; every 29th takes three times as long besides."""
    neighbour: bool = False
    """Another process takes half of the machine, twenty steps in forty."""
    offers: Callable[[int, int], bool] = lambda row, place: True
    """Whether the drafter has an idea there."""
    prompts: dict[int, int] = field(default_factory=dict)
    """Tokens before place 0 that the drafter reads before it drafts for the row."""
    reading_s: float = 0.0
    """Seconds per token of the drafter's reading."""
    reading_at_all_s: float = 0.0
    """Seconds of every chunk that it reads, besides."""
    left: Callable[[int], int] = lambda row: 1000
    """Tokens that may be drafted for it."""
    computed: dict[int, int] = field(default_factory=dict)
    read: int = 0
    longest_reading_s: float = 0.0
    places: dict[int, int] = field(default_factory=dict)
    moving: float = 1.0
    """How many times as long a step takes where the number of rows is another one than before."""
    overlap: bool = False
    """Whether a step that takes no drafts begins before the one before has ended, where the control allows it."""
    overlapped: bool = False
    """Whether the next step has begun."""
    late: float = 0.25
    """Non-speculative steps that it costs if a step does not begin early."""
    packs: bool = False
    """Whether padding is not computed."""
    told: bool = True
    """Whether the control is told that rows were moved."""
    rows: int = 0
    skip: int = 0
    """Steps to skip."""
    skipped: int = 0
    seconds: float = 0.0
    paid: float = 0.0
    """What the steps cost, each in non-speculative steps of as many rows."""
    lost: float = 0.0
    """What they cost beyond what their tokens would have cost in non-speculative steps, in those."""
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    unpaid: tuple[int, float] = (0, 0.0)
    """Tokens and seconds of reading of which the control was not told yet."""
    chance: Random = field(default_factory=lambda: Random(0))

    def step(self, rows: int) -> int:
        """One step of rows 0 .. rows - 1; returns the widest k."""
        if self.skip and rows == self.rows:
            return self._skip()
        self.skip = 0
        room = {row: self.left(row) for row in range(rows)}
        unread = {row: n for row, n in self.unread(rows).items() if room[row]}
        useful = {row: 0 if row in unread else n for row, n in room.items()}
        overlapped = self.overlapped
        asked = self.control.request(
            useful, {row: DraftPrefill(n, room[row]) for row, n in unread.items()}, overlapped=overlapped
        )
        wanted = {row: n for row, n in asked.items() if row not in unread}
        reading_s = self._read({row: n for row, n in asked.items() if row in unread}, unread)
        for row in wanted:
            self.computed[row] = self.prompts.get(row, 0) + self.places.get(row, 0)
        drafts = {}
        for row, n in wanted.items():
            at = self.places.get(row, 0)
            if self.offers(row, at):
                right = self.right(row, at)
                drafts[row] = by_position([at + i if i < right else -1 for i in range(n)])
        chosen = self.control.choose(drafts) if drafts else {}
        assert not (overlapped and chosen)
        assert all(1 <= k <= len(drafts[row].tokens) for row, k in chosen.items())
        width = 1 + max(chosen.values(), default=0)
        committed = {}
        for row in range(rows):
            at, k = self.places.get(row, 0), chosen.get(row, 0)
            accepted = 0
            while accepted < k and drafts[row].tokens[accepted] == at + accepted:
                accepted += 1
            committed[row] = [at + i for i in range(accepted + 1)]
            self.places[row] = at + accepted + 1
            if row in wanted:
                self.computed[row] += min(accepted, wanted[row] - 1)
        drafting_s = self.drafting_s * max(wanted.values()) + self.drafting_at_all_s if wanted else 0.0
        late_s = self.late * self.curve(rows, 1) if self.overlap and not overlapped else 0.0
        tokens = rows + sum(chosen.values())
        step_s = self.curve(rows, computed(rows, tokens, width, pack_above=32) / rows if self.packs else width)
        seconds = (step_s + late_s) * (1 + self.noise * self.chance.uniform(-1, 1)) + drafting_s
        if self.noise and self.steps % 29 == 28:
            seconds *= 3
        if self.neighbour and self.steps // 20 % 2:
            seconds *= 2
        moved, self.rows = self.moving > 1.0 and rows != self.rows, rows
        seconds *= self.moving if moved else 1.0
        self.overlapped = self.overlap and self.control.can_overlap(range(rows))
        overhead_s = self.overhead_s
        usual = None if moved and self.told else seconds
        time = StepTime(usual, drafting_s, overhead_s, *self.unpaid, self.skipped)
        self.unpaid, self.skipped = (0, 0.0), 0
        self.skip = self.control.observe(committed, chosen, time)
        self._account(rows, step_s + late_s + drafting_s + overhead_s + reading_s, sum(map(len, committed.values())))
        self.steps += 1
        self.widths.append(width)
        return width - 1

    def _skip(self) -> int:
        """A step of which the control is told nothing."""
        assert self.overlapped or not self.overlap
        for row in range(self.rows):
            self.places[row] = self.places.get(row, 0) + 1
        self._account(self.rows, self.curve(self.rows, 1), self.rows)
        self.steps += 1
        self.widths.append(1)
        self.skip, self.skipped = self.skip - 1, self.skipped + 1
        return 0

    def prefill(self, row: int, prompt: int, chunks: int, rows: int = 0) -> None:
        """The target prefills the row's prompt in so many steps, beside none or the first few rows that decode."""
        self.begin(row, prompt)
        room = {other: self.left(other) for other in range(rows)}
        for _ in range(chunks):
            lacks = {row: prompt - self.computed.get(row, 0)}
            unread = {row: DraftPrefill(n, self.left(row)) for row, n in lacks.items() if n > 8}
            reads = self.control.request(room, unread, overlapped=False) if unread else {}
            self.seconds += self._read({row: n for row, n in reads.items() if row in unread}, lacks)

    def unread(self, rows: int) -> dict[int, int]:
        """What a draft model would say."""
        known = {row: self.prompts.get(row, 0) + self.places.get(row, 0) for row in range(rows)}
        lacks = {row: n - self.computed.get(row, 0) for row, n in known.items()}
        return {row: n for row, n in lacks.items() if n > 8} if self.reading_s else {}

    def _read(self, reads: dict[int, int], unread: dict[int, int]) -> float:
        if not reads:
            return 0.0
        assert all(1 <= n <= unread[row] for row, n in reads.items())
        for row, n in reads.items():
            self.computed[row] = self.computed.get(row, 0) + n
        n_read = sum(reads.values())
        seconds = self.reading_at_all_s + n_read * self.reading_s
        self.unpaid = (self.unpaid[0] + n_read, self.unpaid[1] + seconds)
        self.read += n_read
        self.longest_reading_s = max(self.longest_reading_s, seconds)
        return seconds

    def begin(self, row: int, prompt: int) -> None:
        """Another sequence in the row's place."""
        self.skip = 0
        self.control.end(row)
        self.computed.pop(row, None)
        self.prompts[row] = prompt - self.places.get(row, 0)

    def answer(self, row: int, prompt: int, tokens: int) -> None:
        """The row begins anew, with so many tokens to say; alone, until it has."""
        self.begin(row, prompt)
        start = self.places.get(row, 0)
        self.left = lambda row: max(0, start + tokens - self.places.get(row, 0) - 1)
        while self.places.get(row, 0) < start + tokens:
            self.step(1)

    def _account(self, rows: int, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.paid += seconds / self.curve(rows, 1)
        self.lost += seconds / self.curve(rows, 1) - tokens / rows

    def run(self, rows: int, tokens: int) -> float:
        """Until the rows have so many further tokens together; returns how much faster than without drafts."""
        before, start = sum(self.places.values()), self.seconds
        while sum(self.places.values()) - before < tokens:
            self.step(rows)
        base = (sum(self.places.values()) - before) / rows * self.curve(rows, 1)
        return base / (self.seconds - start)


def predictable(rate: float, most: int = 16) -> Callable[[int, int], int]:
    """A text of which so large a share of the places can be guessed, spread by chance."""

    def right(row: int, place: int) -> int:
        return next((n for n in range(most) if chance(row, place + n) >= rate), most)

    @cache
    def chance(row: int, place: int) -> float:
        return zlib.crc32(f"{row} {place}".encode()) % 1000 / 1000

    return right


def lookup(most: int = 8) -> AdaptiveControl:
    """The control of a drafter that costs next to nothing."""
    return AdaptiveControl(most, cheap=True)


def draft_model(most: int = 8) -> AdaptiveControl:
    """The control of a draft model."""
    return AdaptiveControl(most, cheap=False)


def guess(*tokens: int) -> Draft:
    """A draft of these tokens."""
    return by_position([*tokens])


def recite(control, drafter, curve: Curve, prompt: list[int], answer: list[int], key: int = 0) -> float:
    """How much faster than without drafts a drafter and a control make a text, one row alone."""
    drafter.begin(key, prompt)
    place, seconds = 0, 0.0
    while place < len(answer):
        wanted = control.request({key: len(answer) - place - 1}, {}, overlapped=False)
        drafts = drafter.draft(wanted) if wanted else {}
        k = control.choose(drafts).get(key, 0) if drafts else 0
        draft = drafts[key].tokens[:k] if k else []
        accepted = next((n for n, token in enumerate(draft) if token != answer[place + n]), k)
        committed = answer[place : place + accepted + 1]
        step = curve(1, 1 + k)
        control.observe({key: committed}, {key: k} if k else {}, StepTime(step))
        drafter.extend(key, committed)
        place += len(committed)
        seconds += step
    drafter.end(key)
    control.end(key)
    return len(answer) * curve(1, 1) / seconds
