"""A machine and texts in numbers, to try controls on: what a step takes, and how far drafts are right.

Row r's text is endless; its token at place p is p. A draft is right as far as the world says, then wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from phalanx.sched.forwards import computed
from phalanx.spec.control import Took
from phalanx.spec.drafters import Draft

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

    control: object
    curve: Curve
    right: Callable[[int, int], int]
    """(row, place) -> how many tokens drafted there would be right."""
    drafting_s: float = 0.0
    """Seconds of the drafter per token of the longest draft wanted."""
    telling_s: float = 0.0
    """Seconds of the control in each step in which it is told anything."""
    noise: float = 0.0
    """Largest relative disturbance of a step; every 29th takes three times as long besides."""
    neighbour: bool = False
    """Somebody else takes half of the machine, twenty steps in forty."""
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
    ahead: bool = False
    """Whether a step that takes no drafts begins before the one before has ended, where the control rests."""
    computes: bool = False
    """Whether the drafter is a model, which then waits."""
    bound: bool = False
    """Whether the next step has begun."""
    waiting: float = 0.25
    """Plain steps that it costs if a step does not begin early."""
    packs: bool = False
    """Whether padding is not computed."""
    told: bool = True
    """Whether the control hears that rows were moved."""
    rows: int = 0
    nap: int = 0
    slept: int = 0
    seconds: float = 0.0
    paid: float = 0.0
    """What the steps cost, each in plain steps of as many rows."""
    lost: float = 0.0
    """What they cost beyond what their tokens would have cost in plain steps, in those."""
    steps: int = 0
    widths: list[int] = field(default_factory=list)
    chance: Random = field(default_factory=lambda: Random(0))

    def step(self, rows: int) -> int:
        """One step of rows 0 .. rows - 1; returns the widest k."""
        if self.nap and rows == self.rows:
            return self._sleep()
        self.wake()
        room = {row: self.left(row) for row in range(rows)}
        waits = self.bound and self.computes
        reading_s = 0.0 if waits else self._read(room)
        unread = self.behind(rows)
        useful = {row: 0 if row in unread else n for row, n in room.items()}
        wanted = {} if waits else self.control.want(useful, bound=self.bound)
        for row in wanted:
            self.computed[row] = self.prompts.get(row, 0) + self.places.get(row, 0)
        drafts = {}
        for row, n in wanted.items():
            at = self.places.get(row, 0)
            if self.offers(row, at):
                right = self.right(row, at)
                drafts[row] = Draft.by_position([at + i if i < right else -1 for i in range(n)])
        chosen = {}
        if self.bound:
            self.control.forgo(drafts)
        else:
            chosen = self.control.choose(drafts)
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
        drafting = self.drafting_s * max(wanted.values(), default=0)
        late = self.waiting * self.curve(rows, 1) if self.ahead and not self.bound else 0.0
        tokens = rows + sum(chosen.values())
        step_s = self.curve(rows, computed(rows, tokens, width, pack_above=32) / rows if self.packs else width)
        seconds = (step_s + late) * (1 + self.noise * self.chance.uniform(-1, 1)) + drafting
        if self.noise and self.steps % 29 == 28:
            seconds *= 3
        if self.neighbour and self.steps // 20 % 2:
            seconds *= 2
        moved, self.rows = self.moving > 1.0 and rows != self.rows, rows
        seconds *= self.moving if moved else 1.0
        self.bound = self.ahead and self.control.rests(range(rows))
        seconds += self.telling_s
        telling = self.telling_s
        took = Took(None if moved and self.told else seconds, drafting, telling)
        self.control.observe(committed, chosen, took)
        self.nap = self.control.naps(range(rows))
        self._account(rows, step_s + late + drafting + telling + reading_s, sum(map(len, committed.values())))
        self.steps += 1
        self.widths.append(width)
        return width - 1

    def _sleep(self) -> int:
        """A step of which the control hears nothing."""
        assert self.bound or not self.ahead
        for row in range(self.rows):
            self.places[row] = self.places.get(row, 0) + 1
        self._account(self.rows, self.curve(self.rows, 1), self.rows)
        self.steps += 1
        self.widths.append(1)
        self.nap, self.slept = self.nap - 1, self.slept + 1
        if not self.nap:
            self.wake()
        return 0

    def wake(self) -> None:
        """The nap is over."""
        if self.slept:
            self.control.slept(range(self.rows), self.slept)
        self.nap = self.slept = 0

    def behind(self, rows: int) -> dict[int, int]:
        """What a draft model would say."""
        known = {row: self.prompts.get(row, 0) + self.places.get(row, 0) for row in range(rows)}
        lacks = {row: n - self.computed.get(row, 0) for row, n in known.items()}
        return {row: n for row, n in lacks.items() if n > 8} if self.reading_s else {}

    def _read(self, room: dict[int, int]) -> float:
        behind = {row: n for row, n in self.behind(len(room)).items() if room[row]}
        reads = self.control.read(room, behind) if behind else {}
        if not reads:
            return 0.0
        assert all(1 <= n <= behind[row] for row, n in reads.items())
        for row, n in reads.items():
            self.computed[row] = self.computed.get(row, 0) + n
        n_read = sum(reads.values())
        seconds = self.reading_at_all_s + n_read * self.reading_s
        self.control.has_read(n_read, seconds)
        self.read += n_read
        self.longest_reading_s = max(self.longest_reading_s, seconds)
        return seconds

    def begin(self, row: int, prompt: int) -> None:
        """Another sequence in the row's place."""
        self.wake()
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
        """Until the rows have so many further tokens altogether; returns how much faster than plain steps."""
        before, start = sum(self.places.values()), self.seconds
        while sum(self.places.values()) - before < tokens:
            self.step(rows)
        plain = (sum(self.places.values()) - before) / rows * self.curve(rows, 1)
        return plain / (self.seconds - start)


def predictable(rate: float, most: int = 16) -> Callable[[int, int], int]:
    """A text of which so large a share of the places can be guessed, spread by chance."""

    def right(row: int, place: int) -> int:
        return next((n for n in range(most) if chance(row, place + n) >= rate), most)

    @cache
    def chance(row: int, place: int) -> float:
        return zlib.crc32(f"{row} {place}".encode()) % 1000 / 1000

    return right


def recite(control, drafter, curve: Curve, prompt: list[int], answer: list[int], key: int = 0) -> float:
    """How much faster than plain steps a drafter and a control make a text, one row alone."""
    drafter.begin(key, prompt)
    place, seconds = 0, 0.0
    while place < len(answer):
        wanted = control.want({key: len(answer) - place - 1})
        drafts = drafter.draft(wanted) if wanted else {}
        k = control.choose(drafts).get(key, 0)
        draft = drafts[key].tokens[:k] if k else []
        accepted = next((n for n, token in enumerate(draft) if token != answer[place + n]), k)
        committed = answer[place : place + accepted + 1]
        step = curve(1, 1 + k)
        control.observe({key: committed}, {key: k} if k else {}, Took(step))
        drafter.extend(key, committed)
        place += len(committed)
        seconds += step
    drafter.end(key)
    control.end(key)
    return len(answer) * curve(1, 1) / seconds
