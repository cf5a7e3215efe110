"""The default control: weighs the expected tokens of drafts against the measured cost of a step, within one budget.
docs/speculation.md explains it. The caller measures the times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from phalanx.sched.forwards import computed
from phalanx.spec.acceptance import AcceptanceTracker, Chances
from phalanx.spec.budget import PROBE_SHARE, ExplorationBudget
from phalanx.spec.control import Committed, DraftPrefill, StepTime, share_out
from phalanx.spec.cost import CostCurve, tokens_per_row
from phalanx.spec.drafters import Draft

MARGIN = 1.02  # least expected speedup: below it, measurement noise decides
OVERDRAFT = 1.0
"""Steps by which one forward may overdraw the budget. Probes spend whatever the budget holds, so a forward that is
expected to pay must not wait for a full one. Without it, a draft model that becomes good late is never found."""
SMOOTHING = 1 / 8  # weight of the latest observation in an average
ASSUMED_OUTPUT = 256.0  # output tokens assumed for a prompt's answer, at most
MIN_RETURN = 2.0  # least gain, in times of its cost, for which a prompt is read: answers end early, and texts differ
MIN_READ = 8  # tokens per read, at least: hardly slower than one, and fewer do not show the speed
BACKOFF = 64  # most skipped steps


class DraftChoice(NamedTuple):
    """How many drafts to verify, and the expected speedup and cost, in non-speculative steps."""

    takes: dict[int, int]  # sequence -> drafts, >= 1
    speed: float = 1.0
    cost: float = 1.0


class AdaptiveControl:
    """Verifies the drafts with the most expected tokens per second, as long as the budget can pay for it.

    A step in which row r verifies k_r tokens commits `1 + P(1) + .. + P(k_r)` tokens for it on average, P(j) being the
    probability that its first j are right (`acceptance.py`), and costs what `cost.py` measured. While the budget
    is positive, the drafter is always asked: such probes find out when its drafts become good."""

    def __init__(self, most: int, *, cheap: bool, share: float = PROBE_SHARE, pack_above: int | None = None) -> None:
        self._most = most  # drafted tokens per sequence and step
        self._cheap = cheap  # drafting costs almost nothing (a lookup), so all sequences are drafted for
        self._pack_above = pack_above  # as in `SchedulerConfig`
        self._budget = ExplorationBudget(share)
        self._costs = CostCurve()
        self._tracker = AcceptanceTracker()
        self._begun: set[int] = set()
        self._rows = 0
        self._drafter_asked = False  # whether the drafter was asked in this step
        self._backoff = 0  # steps to skip after the last one
        self._is_reading = False  # whether prompts are read in this step
        self._last_step_paid = False  # the last step gained more than giving up overlap costs
        self._overlapped = False  # this step was dispatched before the last one was committed
        self._overlapped_rows: set[int] = set()  # numbers of rows for which steps have overlapped
        self._gave_up_overlap = False  # this step gave up overlap, to wait for drafts
        self._will_give_up_overlap = False  # the next step does
        self._overlap_loss = 0.0  # cost of a step without overlap beyond one with it, in steps
        self._read_s = 0.0  # seconds per token read; 0: unknown
        self._reading_reserved = False  # the reserved part of the budget pays for the current reading
        self._not_worth_reading: set[int] = set()  # unread sequences that are not worth reading
        self._compared_balance = self._budget.balance  # of the budget when a draft was last compared
        self._last_draft_right = False  # its first token was right, and the budget is not far overdrawn

    def request(
        self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill], *, overlapped: bool
    ) -> dict[int, int]:
        self._rows, self._overlapped, self._drafter_asked = len(room), overlapped, False
        for key in room.keys() - self._begun:
            self._begun.add(key)
            self._costs.begin(1.0 / len(room))
            self._budget.begin(1.0 / len(room))
        asked = self._plan_reading(room, unread) if unread else {}
        if overlapped and not self._cheap:
            return {}
        self._is_reading = bool(asked)
        if not (self._may_probe or self._gave_up_overlap):
            return asked
        compared = {key for key in room if overlapped and key in self._tracker.pending}
        able = {key: min(n, self._most) for key, n in room.items() if n > 0 and key not in compared}
        k = self._most if self._cheap else max(self._fastest(self._expected(able)).takes.values(), default=1)
        self._drafter_asked = bool(able)
        return asked | {key: min(n, k) for key, n in able.items()}

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        chances = self._tracker.chances({key: draft.buckets for key, draft in drafts.items() if not self._overlapped})
        takes = self._fastest(chances).takes
        for key, draft in drafts.items():
            if key in takes or self._gave_up_overlap or key not in self._tracker.pending:
                self._tracker.pending[key] = draft, 0
        return takes

    def can_overlap(self, keys: Collection[int]) -> bool:
        # Overlap until there is a base time of overlapped steps, with which waiting is compared.
        known = len(keys) in self._overlapped_rows and self._costs.base(len(keys)) is not None
        reads = not self._not_worth_reading.issuperset(keys)
        not_charged_yet = self._overlap_loss * self._gave_up_overlap  # by this step
        paid = self._last_draft_right or self._budget.spendable > not_charged_yet
        self._will_give_up_overlap = known and paid and (self._worth_waiting(keys) if self._cheap else reads)
        return not self._will_give_up_overlap

    def observe(self, committed: Committed, verified: Mapping[int, int], time: StepTime | None) -> int:
        compared = [self._tracker.observe(*row) for row in committed.items() if row[0] in self._tracker.pending]
        if compared:
            self._last_draft_right, self._compared_balance = any(compared), max(0.0, self._budget.balance)
        if time is None or not committed:
            return 0
        self._account(committed, verified, time)
        is_compared = bool(self._tracker.pending.keys() & committed.keys())
        busy = self._may_probe or self._gave_up_overlap or self._is_reading or is_compared
        owed = 0.0 if busy or self._costs.base(len(committed)) is None else 1e-9 - self._budget.spendable
        if self._not_worth_reading.issuperset(committed):
            owed = math.inf  # asking again would spend the budget for reading
        self._backoff = math.ceil(min(BACKOFF, owed / max(self._budget.share, 1e-9)))
        self._budget.balance += self._budget.share * self._backoff
        return self._backoff

    def end(self, key: int) -> None:
        self._tracker.end(key)
        self._not_worth_reading.discard(key)
        self._begun.discard(key)

    @property
    def _may_probe(self) -> bool:
        """Whether to ask the drafter whatever is expected: the budget allows it, or the last draft was right."""
        return self._last_draft_right or self._budget.spendable > 0

    def _expected(self, lengths: Mapping[int, int]) -> dict[int, Chances]:
        """Chances of drafts of these lengths, by a drafter whose buckets are the positions."""
        return self._tracker.chances({key: range(min(length, self._most)) for key, length in lengths.items()})

    def _fastest(self, chances: Mapping[int, Chances]) -> DraftChoice:
        """The choice with the most tokens per second. No drafts if the non-speculative step is fastest or not measured
        yet, or if the budget cannot pay for what the choice may lose: its cost, less the tokens that it gains for
        certain. Unmeasured widths are assumed to be cheap, since costs are often staircases (kernels work on blocks of
        tokens, and each call of a draft model has a fixed cost), but the budget must cover what the measured slope
        predicts."""
        best, most, rows = DraftChoice({}), self._budget.spendable + OVERDRAFT, self._rows
        if not chances or self._costs.base(rows) is None:
            return best
        sure = {key: row.count(1.0) for key, row in chances.items()}
        if most <= 0 and not any(sure.values()):
            return best
        found = [(takes, gained, self._width(takes.values())) for takes, gained in self._candidates(chances)]
        widths = [width for _, _, width in found]
        prices = self._costs.ratios(rows, widths)
        costs = self._costs.ratios(rows, widths, optimistic=True)
        for (takes, gained, width), price, cost in zip(found, prices, costs, strict=True):
            speed = (1.0 + gained / rows) / cost
            at_risk = price - 1.0 - sum(min(k, sure[key]) for key, k in takes.items()) / rows
            if speed > max(best.speed, MARGIN) and at_risk <= max(0.0, most) and width <= self._costs.reach(rows):
                best = DraftChoice(takes, speed, cost)
        return best

    def _candidates(self, chances: Mapping[int, Chances]) -> Iterator[tuple[dict[int, int], float]]:
        """Candidates: drafts to verify, and the expected number of right ones. The same number for each row or, packed,
        the most probable drafts of all rows, in increments of half a token per row."""
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
        """Tokens per row of a step that verifies these drafts."""
        rows, widest = self._rows, 1 + max(takes, default=0)
        return tokens_per_row(rows, computed(rows, rows + sum(takes), widest, pack_above=self._pack_above))

    def _worth_waiting(self, keys: Collection[int]) -> bool:
        """Whether lookups for the next step are expected to gain more than giving up overlap for nothing costs."""
        ahead = self._tracker.ahead(keys)
        if not ahead:
            return self._last_step_paid
        self._rows = len(keys)
        _, speed, cost = self._fastest({key: chances for key, (_, chances) in ahead.items() if chances})
        return (speed - 1.0) * cost > self._overlap_loss * (1.0 - max(likely for likely, _ in ahead.values()))

    def _plan_reading(self, room: Mapping[int, int], unread: Mapping[int, DraftPrefill]) -> dict[int, int]:
        """Sequence -> prompt tokens for the draft model to read, in the time of a non-speculative step at most: of
        prompts that promise more than they cost, if the budget pays for all of them; else of one whose price the budget
        has gained since drafts were last compared."""
        base = self._costs.base(max(1, len(room)))
        if base is None:
            return {}
        self._rows = len(room.keys() | unread.keys())
        able = {key: n for key, n in room.items() if n > 0} | {key: row.useful for key, row in unread.items()}
        speed, self._rows = self._fastest(self._expected(able)).speed, len(room)
        worth: dict[int, DraftPrefill] = {}
        funds, earned = self._budget.balance, max(self._budget.spendable, self._budget.balance - self._compared_balance)
        for key, row in sorted(unread.items(), key=itemgetter(1)):
            price = row.tokens * self._read_s / base
            promised = (1.0 - 1.0 / speed) * min(row.useful + 1.0, ASSUMED_OUTPUT) / len(unread)
            pays = price <= funds and MIN_RETURN * price <= promised
            if pays or (not worth and 0.0 < earned >= price):
                worth[key], self._reading_reserved = row, pays or price > self._budget.spendable
                funds -= price
        self._not_worth_reading = set() if worth else set(unread)
        return share_out(worth, max(MIN_READ, int(base / self._read_s) if self._read_s else 0))

    def _account(self, committed: Committed, verified: Mapping[int, int], time: StepTime) -> None:
        """Measure the step and charge it to the budget."""
        rows = self._rows = len(committed)
        self._costs.elapse(time.skipped)
        width, base = self._width(verified.values()), self._costs.base(rows)
        if self._overlapped:
            self._overlapped_rows.add(rows)
        is_base = self._overlapped or rows not in self._overlapped_rows or (not self._gave_up_overlap and base is None)
        if time.step_s is not None and (width > 1 or is_base):
            self._costs.observe(rows, width, time.step_s - (time.drafting_s if width == 1 else 0.0))
            base = self._costs.base(rows)
        elif not self._gave_up_overlap:  # a grammar that forced tokens lately prevented overlap
            self._costs.elapse(1)
        gained = sum(map(len, committed.values())) / rows - 1.0
        self._last_step_paid = gained > self._overlap_loss
        self._budget.charge_step(1.0 if base is None else self._cost(rows, width, base, time), gained)
        self._budget.balance += self._budget.share * (time.skipped - self._backoff)
        if time.tokens_read and base is not None:
            per_token = time.reading_s / time.tokens_read
            usual = min(per_token, 2 * self._read_s) if self._read_s else per_token
            self._read_s += (SMOOTHING if self._read_s else 1.0) * (usual - self._read_s)
            self._budget.charge_reading(usual * time.tokens_read / base, reserved=self._reading_reserved)
        self._last_draft_right = self._last_draft_right and self._budget.spendable > -OVERDRAFT / 2
        self._gave_up_overlap, self._will_give_up_overlap, self._overlapped = self._will_give_up_overlap, False, False

    def _cost(self, rows: int, width: float, base: float, time: StepTime) -> float:
        """Cost of a step in non-speculative steps. A disturbed step counts at most twice the usual cost."""
        if width > 1:
            usual = self._costs.ratios(rows, [width])[0]
            return usual if time.step_s is None else max(1.0, min(time.step_s / base, 2 * usual))
        cost = 1.0 + (time.drafting_s * self._drafter_asked + min(time.overhead_s, base)) / base
        if self._gave_up_overlap and not self._overlapped:
            if time.step_s is not None:
                lost = min(max(0.0, (time.step_s - time.drafting_s) / base - 1.0), 1.0)
                self._overlap_loss += (SMOOTHING if self._overlap_loss else 1.0) * (lost - self._overlap_loss)
            cost += self._overlap_loss
        return cost
