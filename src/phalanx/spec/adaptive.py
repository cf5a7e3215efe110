"""The control that weighs what drafts are expected to bring against what a step costs, and pays from one budget. Pure.
docs/speculation.md explains the whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from phalanx.sched.forwards import computed
from phalanx.spec.acceptance import AcceptanceTracker, Chances
from phalanx.spec.budget import PROBE_SHARE, WINNINGS, Budget
from phalanx.spec.control import Committed, StepTime, Unread, share_out
from phalanx.spec.cost import CostCurve, tokens_per_row
from phalanx.spec.drafters import Draft

MARGIN = 1.02  # speedup below which drafts are not worth the noise of what was measured
OVERDRAFT = 1.0
"""Steps by which one forward may overdraw the budget: what pays must not wait until probes, which take whatever is
there, have left enough for it. Without, a draft model that becomes good late is never found."""
SMOOTHING = 1 / 8  # what the latest observation counts in an average
LENGTH = 256.0  # tokens that an answer is thought to have at most
PROMISE = 2.0  # times its price that reading a prompt must promise: answers end early, and texts differ
READ_AT_LEAST = 8  # tokens that are read at once: hardly slower than one, and fewer say nothing about speed
BACKOFF = 64  # steps that are skipped at most, and until prompts that were not worth reading are considered again


class Choice(NamedTuple):
    """How many drafts to verify, and what is expected of that, in non-speculative steps."""

    takes: dict[int, int]  # sequence -> drafts, >= 1
    speed: float = 1.0
    cost: float = 1.0


class AdaptiveControl:
    """Verifies the drafts with the most expected tokens per second, as long as the budget can pay for it.

    A step in which row r verifies k_r tokens commits `1 + P(1) + .. + P(k_r)` tokens for it on average, P(j) being the
    probability that its first j are right (`acceptance.py`), and costs what it computes (`cost.py`). While the budget
    holds something, the drafter is asked whatever is expected of it: such probes find one that became good."""

    def __init__(self, most: int, *, cheap: bool, share: float = PROBE_SHARE, pack_above: int | None = None) -> None:
        self._most = most  # drafted tokens per sequence and step
        self._cheap = cheap  # drafting takes next to nothing (a lookup): every sequence may as well be drafted for
        self._pack_above = pack_above  # as in `SchedulerConfig`
        self._budget = Budget(share)
        self._costs = CostCurve()
        self._tracker = AcceptanceTracker()
        self._met: set[int] = set()
        self._rows = 0
        self._steps = 0
        self._asked = False  # the drafter, in this step
        self._backoff = 0  # steps to skip after the last one
        self._busy = False  # something is being read
        self._paid = False  # the last step's drafts were worth waiting for
        self._overlapped = False  # this step began early
        self._overlaps: set[int] = set()  # numbers of rows whose steps have begun early
        self._waited = self._waits = False  # this step could have begun early; the next one
        self._late = 0.0  # steps that a step loses by not beginning early
        self._read_s = 0.0  # seconds per token that is read; 0: unknown
        self._saved_for = False  # the savings pay for what is being read
        self._left: set[int] = set()  # unread, and not worth it
        self._earned = 0.0  # steps that the refill brought since a draft was compared, less what was read
        self._right = False  # the first token of the last draft was, and little is owed

    def request(self, room: Mapping[int, int], unread: Mapping[int, Unread], *, overlapped: bool) -> dict[int, int]:
        self._rows, self._overlapped, self._asked = len(room), overlapped, False
        for key in room.keys() - self._met:
            self._met.add(key)
            self._costs.begin(1.0 / len(room))
            self._budget.begin(1.0 / len(room))
        if overlapped and not self._cheap:
            return {}
        asked = self._reads(room, unread) if unread else {}
        self._busy = bool(asked)
        if not (self._may_ask or self._waited):
            return asked
        compared = {key for key in room if overlapped and key in self._tracker.pending}
        able = {key: min(n, self._most) for key, n in room.items() if n > 0 and key not in compared}
        k = self._most if self._cheap else max(self._fastest(self._expected(able)).takes.values(), default=1)
        self._asked = bool(able)
        return asked | {key: min(n, k) for key, n in able.items()}

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        chances = self._tracker.chances({key: draft.buckets for key, draft in drafts.items() if not self._overlapped})
        takes = self._fastest(chances).takes
        for key, draft in drafts.items():
            if key in takes or self._waited or key not in self._tracker.pending:
                self._tracker.pending[key] = draft, 0
        return takes

    def can_overlap(self, keys: Collection[int]) -> bool:
        known = len(keys) in self._overlaps and self._costs.base(len(keys)) is not None  # else measure what it saves
        reads = not self._left.issuperset(keys) or (self._steps + 1) % BACKOFF == 0
        paid = self._right or self._budget.spendable > self._late * self._waited  # of this step, not charged yet
        self._waits = known and paid and (self._promises(keys) if self._cheap else reads)
        return not self._waits

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        self._steps += 1
        self._earned += self._budget.share
        compared = [self._tracker.observe(*row) for row in committed.items() if row[0] in self._tracker.pending]
        if compared:
            self._right, self._earned = any(compared), 0.0
        if time is None or not committed:
            return 0
        self._settle(committed, verified, time)
        busy = self._may_ask or self._waited or self._busy or self._tracker.pending.keys() & committed.keys()
        owed = 0.0 if busy or self._costs.base(len(committed)) is None else 1e-9 - self._budget.spendable
        self._backoff = min(BACKOFF, math.ceil(owed / max(self._budget.share, 1e-9)))
        self._budget.balance += self._budget.share * self._backoff
        return self._backoff

    def end(self, key: int) -> None:
        self._tracker.end(key)
        self._left.discard(key)
        self._met.discard(key)

    @property
    def _may_ask(self) -> bool:
        """Whether the budget holds something, or the last draft was right: was that luck? Another probe tells."""
        return self._right or self._budget.spendable > 0

    def _expected(self, lengths: Mapping[int, int]) -> dict[int, Chances]:
        """Of drafts so long, by a drafter whose buckets are the positions."""
        return self._tracker.chances({key: range(min(length, self._most)) for key, length in lengths.items()})

    def _fastest(self, chances: Mapping[int, Chances]) -> Choice:
        """The choice with the most tokens per second; none where the non-speculative step has, or is not known, or
        there is nothing to spend. With a rich budget, widths that were never measured are hoped to be cheap: kernels
        that work on so many tokens at once make stairs."""
        best, most, rows = Choice({}), self._budget.spendable + OVERDRAFT, self._rows
        if most <= 0 or not chances or self._costs.base(rows) is None:
            return best
        found = [(takes, gained, self._width(takes.values())) for takes, gained in self._candidates(chances)]
        widths = [width for _, _, width in found]
        prices = self._costs.ratios(rows, widths)
        costs = self._costs.ratios(rows, widths, hopeful=most > WINNINGS / 2)
        for (takes, gained, width), price, cost in zip(found, prices, costs, strict=True):
            speed = (1.0 + gained / rows) / cost
            if speed > max(best.speed, MARGIN) and price - 1.0 <= most and width <= self._costs.reach(rows):
                best = Choice(takes, speed, cost)
        return best

    def _candidates(self, chances: Mapping[int, Chances]) -> Iterator[tuple[dict[int, int], float]]:
        """What may be verified, and how many of these are right on average: as many drafts of each row or, packed,
        those that are most probably right, half a token per row more each time."""
        longest, gained = max(map(len, chances.values())), 0.0
        for k in range(1, 1 + longest):
            gained += sum(row[k - 1] for row in chances.values() if len(row) >= k)
            yield {key: min(k, len(row)) for key, row in chances.items()}, gained
        if self._pack_above is not None and self._rows * (1 + longest) > self._pack_above:
            takes, gained = dict.fromkeys(chances, 0), 0.0
            order = sorted(((chance, key) for key, row in chances.items() for chance in row), reverse=True)
            for n, (chance, key) in enumerate(order, 1):
                takes[key] += 1
                gained += chance
                if n % max(1, self._rows // 2) == 0 or n == len(order):
                    yield {key: k for key, k in takes.items() if k}, gained

    def _width(self, takes: Collection[int]) -> float:
        """Tokens per row of a step that verifies so many."""
        rows, widest = self._rows, 1 + max(takes, default=0)
        return tokens_per_row(rows, computed(rows, rows + sum(takes), widest, pack_above=self._pack_above))

    def _promises(self, keys: Collection[int]) -> bool:
        """Whether lookups for the next step promise more than waiting for them in vain costs."""
        ahead = self._tracker.ahead(keys)
        if not ahead:
            return self._paid
        self._rows = len(keys)
        _, speed, cost = self._fastest({key: chances for key, (_, chances) in ahead.items() if chances})
        return (speed - 1.0) * cost > self._late * (1.0 - max(likely for likely, _ in ahead.values()))

    def _reads(self, room: Mapping[int, int], unread: Mapping[int, Unread]) -> dict[int, int]:
        """Tokens to read in this step, which takes no longer than a non-speculative one: of prompts that promise more
        than they cost, if the budget pays for the whole; else, as a probe, of one that the refill has earned."""
        base = self._costs.base(max(1, len(room)))
        if base is None or (self._left >= unread.keys() and self._steps % BACKOFF):
            return {}
        self._rows = len(room.keys() | unread.keys())
        able = {key: n for key, n in room.items() if n > 0} | {key: row.useful for key, row in unread.items()}
        speed, self._rows = self._fastest(self._expected(able)).speed, len(room)
        worth: dict[int, Unread] = {}
        funds, earned = self._budget.balance, max(self._budget.spendable, self._earned)
        for key, row in sorted(unread.items(), key=itemgetter(1)):
            price = row.tokens * self._read_s / base
            promised = (1.0 - 1.0 / speed) * min(row.useful + 1.0, LENGTH) / len(unread)
            pays = price <= funds and PROMISE * price <= promised
            if pays or (not worth and 0.0 < earned >= price):
                worth[key], self._saved_for = row, pays or price > self._budget.spendable
                funds -= price
        self._left = set() if worth else set(unread)
        return share_out(worth, max(READ_AT_LEAST, int(base / self._read_s) if self._read_s else 0))

    def _settle(self, committed: Committed, verified: Mapping[int, int], time: StepTime) -> None:
        """Measure the step and pay for it."""
        rows = self._rows = len(committed)
        width, base = self._width(verified.values()), self._costs.base(rows)
        if self._overlapped:
            self._overlaps.add(rows)
        is_base = self._overlapped or rows not in self._overlaps or (not self._waited and base is None)
        if time.step_s is not None and (width > 1 or is_base):
            self._costs.observe(rows, width, time.step_s - (time.drafting_s if width == 1 else 0.0))
            base = self._costs.base(rows)
        gained = sum(map(len, committed.values())) / rows - 1.0
        self._paid = gained > self._late
        self._budget.settle(1.0 if base is None else self._cost(rows, width, base, time), gained)
        self._budget.balance += self._budget.share * (time.skipped - self._backoff)
        self._earned += self._budget.share * time.skipped
        if time.tokens_read and base is not None:
            per_token = time.reading_s / time.tokens_read
            usual = min(per_token, 2 * self._read_s) if self._read_s else per_token
            self._read_s += (SMOOTHING if self._read_s else 1.0) * (usual - self._read_s)
            self._budget.charge_reading(usual * time.tokens_read / base, saved=self._saved_for)
            self._earned -= usual * time.tokens_read / base
        self._right = self._right and self._budget.spendable > -OVERDRAFT / 2
        self._waited, self._waits, self._overlapped = self._waits, False, False

    def _cost(self, rows: int, width: float, base: float, time: StepTime) -> float:
        """Of a step, in non-speculative ones; disturbances count no more than twice what is usual."""
        if width > 1:
            usual = self._costs.ratios(rows, [width])[0]
            return usual if time.step_s is None else max(1.0, min(time.step_s / base, 2 * usual))
        cost = 1.0 + (time.drafting_s * self._asked + min(time.overhead_s, base)) / base
        if self._waited and not self._overlapped:
            if time.step_s is not None:
                lost = min(max(0.0, (time.step_s - time.drafting_s) / base - 1.0), 1.0)
                self._late += (SMOOTHING if self._late else 1.0) * (lost - self._late)
            cost += self._late
        return cost
