"""The control that weighs what drafts are expected to bring against what a step costs, and keeps accounts.

Pure, as all controls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.sched.forwards import computed
from phalanx.spec.control import Committed, Took, in_turn
from phalanx.spec.cost import CostCurve, width
from phalanx.spec.drafters import Draft
from phalanx.spec.judging import Chances, Judging
from phalanx.spec.purses import SHARE, WINNINGS, Purses
from phalanx.spec.reading import Reading
from phalanx.spec.waiting import Waiting

NAP = 64
"""Steps that a nap takes at most."""
READ_AT_ONCE = 1.0
"""Plain steps that reading takes in one step at most: others decode at half speed meanwhile, as beside a prefill."""
PROMISE = 2.0
"""Times its price that reading must promise: answers end early, and texts differ."""
PATIENCE = 8
"""Steps after which it is asked again whether the same sequences are worth reading: asking takes time as well."""
RESTING = 64
"""The same where no other sequence may have drafts, so that a step waits for nothing but that; a multiple of it."""
LENGTH = 256.0
"""Tokens of an answer before one has ended."""
LENGTH_FADES = 1 / 8
"""What the latest answer counts in how long answers are."""
GROWN = 1.25
"""Times its size at which a purse that was too small is asked again."""
MARGIN = 1.02
"""Gain below which it is not worth the noise of what was measured."""


Candidate = tuple[tuple[int, ...], float]
"""What may be verified: how many drafts of each row, and how many of them are right on average."""


class Choice(NamedTuple):
    """How many drafts to verify, and what is expected of the step."""

    takes: tuple[int, ...] = ()  # by row; empty: none
    speed: float = 1.0  # times that of plain steps
    cost: float = 1.0  # plain steps


class CostControl:
    """Weighs what drafts are expected to bring against what a step costs, both as measured, and keeps accounts.

    A step in which row r verifies k_r tokens commits `1 + P(1) + .. + P(k_r)` tokens for it on average, P(j) being the
    probability that its first j are right, and takes as long as what it computes: `1 + max k` tokens per row, or where
    rows can be packed `1 + k_r`. The k_r with the most tokens per second are chosen if they beat the plain step's: the
    same for all rows, as far as their drafts go, or, where packed, those of the tokens that are most probably right.

    Drafts that were not verified are judged all the same (`judging.py`).

    All is paid from purses, counted in plain steps. That for forwards gets half a share of every step and what
    speculation gained, and pays what it lost; that for asking gets the other half and pays what was drafted in vain.
    No step is taken that would cost more than its purse holds, so on a text where drafts never help no more is lost
    than the share and what the purses can hold. What they cannot hold is saved, and what a text that ended has won: for
    the first tries on other texts, and for reading prompts, which a draft model must do before it can draft. A prompt
    is read if the savings pay for all of it and if, by what is known of the drafter and of how long answers are, it
    brings more than it takes; so short answers to long prompts are not drafted for.

    A plain step that waits for drafts takes longer than one that begins while the one before is looked at. Where there
    are such, they are the measure of all others, and a step waits for a lookup only if its drafts promise several times
    what waiting in vain costs: by a draft that was right so far, or by what came of late where there was none. For a
    drafter that computes, waiting is a part of asking; else forwards pay for it.

    The control itself takes time, of which a small model's step does not have much: that is a part of asking as well.
    When neither purse has anything for asking, the control sleeps until the share has earned it.
    """

    def __init__(self, most: int, *, cheap: bool, share: float = SHARE, pack_above: int | None = None) -> None:
        """
        Args:
            most: largest number of drafted tokens per sequence and step.
            cheap: drafting takes next to nothing (a lookup), so every sequence may as well be drafted for.
            share: of the time, for what brings no gain.
            pack_above: as in `SchedulerConfig`.
        """
        self._most = most
        self._cheap = cheap
        self._pack_above = pack_above
        self._purses = Purses(share)
        self._saved_for = 0.0  # share of what is being read that the savings pay for
        self._costs = CostCurve()
        self._reading = Reading()
        self._unjudged = 0
        self._left_unread: set[int] = set()
        self._length = LENGTH
        self._lengths: dict[int, int] = {}
        self._judging = Judging()
        self._n_rows = 0
        self._asks = False
        self._foretold = False  # a draft is being compared that says what to expect of the next
        self._waiting = Waiting()
        self._resting: tuple[list[int], float] | None = None  # sequences, and the purse that was too small

    def read(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        self._n_rows = len(room)
        self._unjudged += 1
        if self._unjudged % PATIENCE and behind.keys() == self._left_unread:
            return {}
        reads = self._read_now(room, behind)
        self._left_unread = set() if reads else set(behind)
        return reads

    def _read_now(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, int]:
        plain = self._costs.plain(len(room))
        if plain is None:
            return {}
        at_once = self._reading.within(READ_AT_ONCE * plain)
        if not self._reading.known:
            return self._share_out(behind, dict.fromkeys([*behind][: int(self._purses.asking > 0)], False), at_once)
        prices = {key: self._reading.hoped(n, at_once) / plain for key, n in behind.items()}
        self._forget(max((price for price in prices.values() if price <= self._purses.savings), default=0.0))
        return self._share_out(behind, self._affordable(prices, self._worth(room, behind)), at_once)

    def has_read(self, tokens: int, seconds: float) -> None:
        """No more is paid than twice what so many tokens usually take: one disturbed step means nothing."""
        self._reading.observe(tokens, seconds)
        usual = self._reading.seconds(tokens, tokens) if self._reading.known else seconds
        price = min(seconds, 2 * usual) / max(self._costs.plain(self._n_rows) or seconds, 1e-9)
        self._purses.save(-price * self._saved_for)
        if self._saved_for < 1.0:
            self._purses.pay_asking(price * (1.0 - self._saved_for))

    def want(self, room: Mapping[int, int], *, bound: bool = False) -> dict[int, int]:
        self._n_rows = len(room)
        for key in room:
            if key not in self._lengths:
                self._lengths[key] = 0
                self._costs.begin(1.0 / len(room))
        self._foretold = any(map(self._judging.is_open, room))
        able = {key: min(n, self._most) for key, n in room.items() if n > 0}
        may_ask = self._purses.may_ask or self._waiting.waits  # who waits asks, though what it paid emptied the purse
        if self._cheap:
            k = self._most if may_ask else 0
            if k and bound:
                able = {key: n for key, n in able.items() if not self._judging.is_open(key)}
        else:
            k = max(self._fastest(self._expected(able)).takes, default=int(may_ask))
        self._asks = k > 0 and bool(able)
        return {key: min(n, k) for key, n in able.items() if k}

    def choose(self, drafts: Mapping[int, Draft]) -> dict[int, int]:
        chances = self._judging.chances({key: draft.grades for key, draft in drafts.items()})
        rows = {key: row for key, row in chances.items() if row}
        choice = self._note(list(rows.values()))
        if choice.takes:
            choice = self._tried(list(rows.values()), choice)
        chosen = {key: k for key, k in zip(rows, choice.takes, strict=False) if k}
        self._compare(drafts, chosen)
        return chosen

    def rests(self, keys: Collection[int]) -> bool:
        if not self._waiting.is_known(len(keys)) or self._costs.plain(len(keys)) is None:
            return True  # to see what it saves, and what a plain step takes: nothing is chosen until that is known
        if self._cheap:
            return not self._waiting.decide(
                self._purses.may_ask and self._purses.forwards > 0 and self._is_promising(keys)
            )
        if self._left_unread.issuperset(keys) and (self._unjudged + 1) % RESTING:
            self._unjudged += 1
            return not self._waiting.decide(False)
        return not self._waiting.decide(self._purses.may_ask or not self._is_hopeless(list(keys)))

    def naps(self, keys: Collection[int]) -> int:
        if self._purses.may_ask or self._waiting.waits or any(map(self._judging.is_open, keys)):
            return 0
        if self._costs.plain(len(keys)) is None:
            return 0
        if not self._cheap and not self._is_hopeless(list(keys)):
            return 0
        return self._purses.to_ask_again(NAP)

    def slept(self, keys: Collection[int], steps: int) -> None:
        for key in keys:
            if key in self._lengths:
                self._lengths[key] += steps
        self._purses.earn(steps)

    def _is_promising(self, keys: Collection[int]) -> bool:
        """Whether a step should wait for lookups."""
        ahead = self._judging.ahead(keys)
        if not ahead:
            return self._waiting.pays
        self._n_rows = len(keys)
        choice = self._fastest([chances for _, chances in ahead.values() if chances])
        if not choice.takes:
            return False
        likely = max(likely for likely, _ in ahead.values())
        return self._waiting.is_worth(_saved(choice), likely)

    def forgo(self, drafts: Mapping[int, Draft]) -> None:
        self._waiting.begin()
        if self._asks:
            chances = self._judging.chances({key: draft.grades for key, draft in drafts.items()})
            self._note([row for row in chances.values() if row])
        self._compare(drafts, ())

    def _compare(self, drafts: Mapping[int, Draft], chosen: Collection[int]) -> None:
        """Compare drafts with what comes: those that are verified, and where none is being compared."""
        for key, draft in drafts.items():
            if key in chosen or not self._judging.is_open(key):
                self._judging.open(key, draft)
                self._resting = None

    def _note(self, chances: Sequence[Chances]) -> Choice:
        """The best choice of these drafts; and, where nothing foretold them, notes what they promise."""
        choice = self._fastest(chances)
        if self._asks and not self._foretold:
            self._waiting.note(_saved(choice))
        return choice

    def _is_hopeless(self, keys: list[int]) -> bool:
        """Whether no draft would be chosen. Remembered until a draft was judged or there is more to spend."""
        if self._resting is not None:
            known, purse = self._resting
            if known == keys and self._purses.forwards <= max(0.0, purse * GROWN):
                return True
        self._n_rows = len(keys)
        hopeless = not self._fastest(self._expected(dict.fromkeys(keys, self._most))).takes
        self._resting = (keys, self._purses.forwards) if hopeless else None
        return hopeless

    def hear(self, committed: Committed) -> None:
        for key, tokens in committed.items():
            if key in self._lengths:  # not in its first step, of which nobody hears the end
                self._lengths[key] += len(tokens)
            if self._judging.judge(key, tokens):
                self._unjudged = 0
                self._resting = None

    def observe(self, committed: Committed, verified: Mapping[int, int], took: Took) -> None:
        self.hear(committed)
        if committed:
            rows = len(committed)
            gained = sum(map(len, committed.values())) / rows - 1.0
            self._settle(rows, self._width(rows, verified.values()), gained, took)

    def end(self, key: int) -> None:
        self._judging.end(key)
        if key in self._lengths:
            share = 1.0 / len(self._lengths)
            self._purses.leave(share)
            self._waiting.forget(share)
        self._length += LENGTH_FADES * (self._lengths.pop(key, self._length) - self._length)

    def _expected(self, lengths: Mapping[int, int]) -> list[Chances]:
        """Of drafts so long, by a drafter that grades by position."""
        return list(self._judging.chances({key: range(length) for key, length in lengths.items()}).values())

    def _forget(self, price: float) -> None:
        """A drafter that was of no use for so long that the share pays for reading again is thought of as new."""
        if price and self._purses.share_of(self._unjudged) >= price:
            self._judging.forget_drafter()
            self._unjudged = 0

    def _worth(self, room: Mapping[int, int], behind: Mapping[int, int]) -> dict[int, float]:
        """Plain steps that drafting for those that the drafter is behind with would save, all of them alike."""
        chances = self._judging.chances({key: range(min(n, self._most)) for key, n in room.items() if n > 0})
        hopeful = [key for key in behind if chances.get(key)]
        now = self._fastest([row for key, row in chances.items() if key not in behind]).speed
        then = self._fastest(list(chances.values())).speed
        each = (1.0 / now - 1.0 / then) / max(1, len(hopeful))
        return {key: each * min(room[key] + 1.0, self._length) for key in hopeful}

    def _affordable(self, prices: Mapping[int, float], worth: Mapping[int, float]) -> dict[int, bool]:
        """Sequences to read now, the cheapest first -> whether the savings pay; else it is a part of asking."""
        savings, asking = self._purses.savings, self._purses.asking
        paid: dict[int, bool] = {}
        for key, price in sorted(prices.items(), key=lambda item: item[1]):
            if price <= savings and PROMISE * price <= worth.get(key, 0.0):
                paid[key] = True
                savings -= price
            elif price <= asking:
                paid[key] = False
                asking -= price
        return paid

    def _share_out(self, behind: Mapping[int, int], paid: Mapping[int, bool], most: int) -> dict[int, int]:
        """The tokens of this step, and who pays for them. Changes state."""
        reads = in_turn({key: behind[key] for key in paid}, most)
        saved_for = sum(tokens for key, tokens in reads.items() if paid[key])
        self._saved_for = saved_for / max(1, sum(reads.values()))
        return reads

    def _tried(self, chances: Sequence[Chances], choice: Choice) -> Choice:
        """Drafts help, and what other widths cost is a guess. If one may be as cheap as a narrower one it is tried,
        where half of what may be won is left when it has been paid; else `choice`."""
        spare = self._purses.forwards - WINNINGS / 2
        if spare <= 0:
            return choice
        hope = self._fastest(chances, hopeful=True)
        price = self._costs.ratio(self._n_rows, self._width(self._n_rows, hope.takes)) - 1.0
        return hope if spare >= price else choice

    def _fastest(self, chances: Sequence[Chances], *, hopeful: bool = False) -> Choice:
        """The choice with the most tokens per second. None is taken where the plain step has, or is not known, or the
        purse is empty."""
        rows, best = self._n_rows, Choice(speed=MARGIN)
        if self._purses.forwards <= 0 or not any(chances) or self._costs.plain(rows) is None:
            return Choice()
        reach = self._costs.reach(rows)
        found = [(takes, gained, self._width(rows, takes)) for takes, gained in self._candidates(chances)]
        widths = sorted({wide for _, _, wide in found if wide <= reach})
        costs = dict(zip(widths, self._costs.ratios(rows, widths, hopeful=hopeful), strict=True))
        for takes, gained, wide in found:
            if (cost := costs.get(wide)) is None:
                continue
            speed = (1.0 + gained / rows) / cost
            if speed > best.speed and cost - 1.0 <= self._purses.forwards:  # should all be wrong
                best = Choice(takes, speed, cost)
        return best if best.takes else Choice()

    def _candidates(self, chances: Sequence[Chances]) -> Iterator[Candidate]:
        longest, gained = max(map(len, chances)), 0.0
        for k in range(1, 1 + longest):
            gained += sum(row[k - 1] for row in chances if len(row) >= k)
            yield tuple(min(k, len(row)) for row in chances), gained
        if self._pack_above is not None and self._n_rows * (1 + longest) > self._pack_above:
            yield from _likeliest(chances, max(1, self._n_rows // 2))

    def _width(self, rows: int, takes: Collection[int]) -> float:
        """Of a step that verifies so many."""
        tokens = rows + sum(takes)
        return width(rows, computed(rows, tokens, 1 + max(takes, default=0), pack_above=self._pack_above))

    def _settle(self, rows: int, width: float, gained: float, took: Took) -> None:
        """Measure the step and pay for it.

        Args:
            gained: plain steps that its tokens would have taken beyond one.
        """
        seconds, drafting, telling = took
        measures, waited = self._waiting.end(rows)
        measures = measures or (not waited and self._costs.plain(rows) is None)  # others may keep steps from beginning
        if seconds is not None and (width > 1 or measures):
            self._costs.observe(rows, width, seconds - drafting if width == 1 else seconds)
        cost = self._cost(rows, width, seconds)
        lost = self._lost(rows, seconds, drafting) if waited and width == 1 else 0.0
        if self._cheap or not drafting:
            cost += lost
        self._purses.earn(cost, gained - (cost - 1.0))
        plain = self._costs.plain(rows) if seconds is None else seconds - drafting
        if width == 1 and plain is not None:
            asked = self._asks and drafting > 0
            price = (drafting if asked else 0.0) + min(telling, plain)
            self._purses.pay_asking(price / max(plain, 1e-9) + (lost if asked and not self._cheap else 0.0))
        self._asks = False

    def _lost(self, rows: int, seconds: float | None, drafting: float) -> float:
        """A step waited and had no drafts: what that costs, in plain steps."""
        plain = self._costs.plain(rows)
        if plain is None or seconds is None:
            return self._waiting.lost(None)
        return self._waiting.lost((seconds - drafting) / max(plain, 1e-9) - 1.0)

    def _cost(self, rows: int, width: float, seconds: float | None) -> float:
        """Of the step that was, in plain steps: as measured, but no more than twice what such steps usually cost."""
        if width == 1:
            return 1.0
        usual, plain = self._costs.ratio(rows, width), self._costs.plain(rows)
        if plain is None or seconds is None:
            return usual
        return max(1.0, min(seconds / max(plain, 1e-9), 2 * usual))


def _saved(choice: Choice) -> float:
    """Plain steps that a step is expected to save."""
    return (choice.speed - 1.0) * choice.cost


def _likeliest(chances: Sequence[Chances], apart: int) -> Iterator[Candidate]:
    """The tokens that are most probably right, `apart` more of them each time."""
    takes, gained = [0] * len(chances), 0.0
    order = sorted([(chance, i) for i, row in enumerate(chances) for chance in row], reverse=True)
    for n, (chance, i) in enumerate(order, 1):
        takes[i] += 1
        gained += chance
        if n % apart == 0 or n == len(order):
            yield tuple(takes), gained
