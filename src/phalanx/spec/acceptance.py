"""Acceptance rates of drafts, and from them the expected acceptance of the next ones.

A drafter puts each token into a confidence bucket (`Draft.buckets`). A token counts only where those before it were
right, so the probability that a draft is right up to there is the product of its buckets' rates. Tokens do not depend
on speculation (design: Keyed sampling), so drafts that were not verified are compared with what is committed too:
noticing that drafts have become good costs drafting, but no forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from phalanx.spec.drafters import BUCKETS, CERTAIN, Draft

POOL_FADES = 0.95  # decay of a drafter's counts per draft: about the last 20 drafts count
ROW_FADES = 0.85  # decay of one sequence's counts per draft: about the last 7 drafts count, since texts change
MIN_CHANCE = 0.1  # least probability for which a drafted token is verified, even where the forward has room for it

Chances = list[float]  # probability that the first j tokens are right, j = 1, 2, ..; ends at `MIN_CHANCE`


class Acceptance:
    """Rates of acceptance by confidence bucket.

    The prior (the pool's rate; without a pool, the rate of the bucket below, or 1/2) counts as one observation. All
    counts decay with each draft, also those of buckets that are not tried any more: one wrong token must not end them
    for ever.
    """

    def __init__(self, fades: float, pool: Acceptance | None = None) -> None:
        self._fades = fades
        self._pool = pool
        self._counts = [(0.0, 0.0)] * BUCKETS  # right, tried

    def begin(self) -> None:
        """A new draft is compared: let older counts decay. Changes state."""
        self._counts = [(right * self._fades, tried * self._fades) for right, tried in self._counts]

    def observe(self, bucket: int, right: bool) -> None:
        """Record whether a token of this bucket was right, given that all before it were. Changes state."""
        if bucket == CERTAIN:
            return
        self._counts[bucket] = self._counts[bucket][0] + right, self._counts[bucket][1] + 1.0

    @property
    def rates(self) -> Sequence[float]:
        """Estimated probability, per bucket, that a token is right, given those before it are: [BUCKETS]."""
        if self._pool is not None:
            counts = zip(self._counts, self._pool.rates, strict=True)
            return [(right + assumed) / (tried + 1.0) for (right, tried), assumed in counts]
        rates = [0.5]
        for right, tried in self._counts:
            rates.append((right + rates[-1]) / (tried + 1.0))
        return rates[1:]


class AcceptanceTracker:
    """Acceptance rates per sequence. The owner puts a draft that is to be compared into `pending`, with position 0."""

    def __init__(self) -> None:
        self._pool = Acceptance(POOL_FADES)
        self._rows: dict[int, Acceptance] = {}
        self.pending: dict[int, tuple[Draft, int]] = {}  # sequence -> draft, number of its tokens right so far

    def chances(self, buckets: Mapping[int, Sequence[int]]) -> dict[int, Chances]:
        """Chances of drafts with these buckets, by sequence; those without a token above `MIN_CHANCE` are absent."""
        found = {key: _chances(self._rates(key), of_row, 1.0) for key, of_row in buckets.items()}
        return {key: chances for key, chances in found.items() if chances}

    def ahead(self, keys: Collection[int]) -> dict[int, tuple[float, Chances]]:
        """Sequence with a pending draft -> probability that the draft predicts this step's token; chances after it."""
        found: dict[int, tuple[float, Chances]] = {}
        for key in keys & self.pending.keys():
            (draft, at), rates = self.pending[key], self._rates(key)
            likely = _rate(rates, draft.buckets[at])
            found[key] = likely, _chances(rates, draft.buckets[at + 1 :], likely)
        return found

    def observe(self, key: int, tokens: Sequence[int]) -> bool:
        """Compare a sequence's pending draft (KeyError without one) with committed tokens, up to the first difference.
        Returns whether the draft's first token was right. Changes state."""
        draft, at = self.pending.pop(key)
        row = self._rows.setdefault(key, Acceptance(ROW_FADES, self._pool))
        for token in tokens:
            right = token == draft.tokens[at]
            for known in (self._pool, row):
                if at == 0:
                    known.begin()
                known.observe(draft.buckets[at], right)
            at += 1
            if not right or at == len(draft.tokens):
                return at > 1 or right
        self.pending[key] = draft, at
        return True

    def end(self, key: int) -> None:
        """The sequence is over; unknown ones are ignored. Changes state."""
        self._rows.pop(key, None)
        self.pending.pop(key, None)

    def _rates(self, key: int) -> Sequence[float]:
        return self._rows.get(key, self._pool).rates


def _rate(rates: Sequence[float], bucket: int) -> float:
    return 1.0 if bucket == CERTAIN else rates[bucket]


def _chances(rates: Sequence[float], buckets: Sequence[int], chance: float) -> Chances:
    chances: Chances = []
    for bucket in buckets:
        chance *= _rate(rates, bucket)
        if chance < MIN_CHANCE:
            break
        chances.append(chance)
    return chances
