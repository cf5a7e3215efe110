"""What each API key may have at once and in a minute."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from phalanx.errors import InvalidRequest, RateLimited


class KeyLimits(Struct, frozen=True, kw_only=True):
    """Limits of one key; None: unlimited."""

    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _Bucket:
    """An allowance of so many a minute. It may be overdrawn: all that an answer costs is known at its end."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def left(self, now: float) -> float:
        """What is left. Changes state only in that time passes."""
        self._left = min(self.per_minute, self._left + max(0.0, now - self._at) * self.per_minute / 60)
        self._at = now
        return self._left

    def take(self, n: float, now: float) -> None:
        self._left = self.left(now) - n

    def seconds_until(self, wanted: float, now: float) -> float:
        return max(0.0, (wanted - self.left(now)) * 60 / self.per_minute)


class KeyUse(Struct):
    """One request's part of what its key may have, from `KeyMeter.begin` to `KeyMeter.end`."""

    owner: str
    tokens: _Bucket | None  # None: there is no limit
    n_reserved: int = 0
    rows: int = 1  # answers that it asks for; each counts as a request at once


class KeyMeter:
    """Counts what each key's owner has, against its limits.

    Args:
        limits: owner -> limits; owners that are not there have none.
    """

    def __init__(self, limits: dict[str, KeyLimits]) -> None:
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def set_limits(self, limits: dict[str, KeyLimits]) -> None:
        """Take other limits. A bucket whose size stays keeps what is left in it; those of other owners go."""
        self._limits = limits
        for buckets in (self._requests, self._tokens):
            for owner in buckets.keys() - limits.keys():
                del buckets[owner]

    def begin(self, owner: str, now: float) -> KeyUse:
        """A request of this owner begins; `end` must follow.

        Raises:
            RateLimited: names the limit; `retry_after` is when it will be met, as far as is known.
        """
        limits = self._limits.get(owner) or KeyLimits()
        if limits.max_in_flight is not None and self._in_flight[owner] >= limits.max_in_flight:
            said = f"This key may have {limits.max_in_flight} requests at once (max_in_flight in --keys)."
            raise RateLimited(said, retry_after=1.0)
        requests = _bucket(self._requests, owner, limits.requests_per_minute, now)
        if requests is not None and (wait := requests.seconds_until(1, now)) > 0:
            said = f"This key may send {requests.per_minute} requests a minute (requests_per_minute in --keys)."
            raise RateLimited(said, retry_after=wait)
        tokens = _bucket(self._tokens, owner, limits.tokens_per_minute, now)
        if tokens is not None and (wait := tokens.seconds_until(1, now)) > 0:
            said = f"This key may use {tokens.per_minute} tokens a minute (tokens_per_minute in --keys)."
            raise RateLimited(said, retry_after=wait)
        if requests is not None:
            requests.take(1, now)
        self._in_flight[owner] += 1
        return KeyUse(owner, tokens)

    def reserve(self, use: KeyUse, n_tokens: int, now: float, *, rows: int = 1) -> None:
        """Take the tokens and rows that a request is expected to need, so that others of its key find what is left.

        Raises:
            RateLimited: there is no room for them. A request that needs more tokens than a minute brings gets all.
            InvalidRequest: it asks for more answers than its key may have at once.
        """
        self._take_rows(use, rows)
        if use.tokens is None:
            return
        per_minute = use.tokens.per_minute
        if (wait := use.tokens.seconds_until(min(n_tokens, per_minute), now)) > 0:
            raise RateLimited(
                f"This key may use {per_minute} tokens a minute; there is no room now for some {n_tokens} "
                "(tokens_per_minute in --keys).",
                retry_after=wait,
            )
        use.tokens.take(n_tokens, now)
        use.n_reserved = n_tokens

    def _take_rows(self, use: KeyUse, rows: int) -> None:
        most = (self._limits.get(use.owner) or KeyLimits()).max_in_flight
        if most is not None and rows > most:
            message = f"This key may have {most} requests at once. Each answer counts as one; this one asks for {rows}."
            raise InvalidRequest(message, param="n")
        more = rows - use.rows
        if most is not None and more and self._in_flight[use.owner] + more > most:
            raise RateLimited(
                f"This key may have {most} requests at once (max_in_flight in --keys), as which each answer counts.",
                retry_after=1.0,
            )
        self._in_flight[use.owner] += more
        use.rows = rows

    def end(self, use: KeyUse, n_tokens: int, now: float) -> None:
        """A request that `begin` let in is over, however it ended.

        Args:
            n_tokens: that it took, of prompt and answer; they replace the reserved ones.
        """
        self._in_flight[use.owner] -= use.rows
        if not self._in_flight[use.owner]:
            del self._in_flight[use.owner]
        if use.tokens is not None:
            use.tokens.take(n_tokens - use.n_reserved, now)


def _bucket(buckets: dict[str, _Bucket], owner: str, per_minute: int | None, now: float) -> _Bucket | None:
    """The owner's bucket; a new one where the limit is another than before."""
    if per_minute is None:
        buckets.pop(owner, None)
        return None
    bucket = buckets.get(owner)
    if bucket is None or bucket.per_minute != per_minute:
        bucket = buckets[owner] = _Bucket(per_minute, now)
    return bucket
