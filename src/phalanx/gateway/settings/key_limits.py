"""Limits per API key: concurrent requests, requests per minute, tokens per minute."""

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
    """A token bucket, refilled per minute. It may be overdrawn: an answer's cost is known only at its end."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def left(self, now: float) -> float:
        """The level, refilled for the time since the last call."""
        self._left = min(self.per_minute, self._left + max(0.0, now - self._at) * self.per_minute / 60)
        self._at = now
        return self._left

    def take(self, n: float, now: float) -> None:
        self._left = self.left(now) - n

    def seconds_until(self, wanted: float, now: float) -> float:
        return max(0.0, (wanted - self.left(now)) * 60 / self.per_minute)


class KeyUse(Struct):
    """One request's use of its key's limits, from `KeyMeter.begin` to `KeyMeter.end`."""

    owner: str
    tokens: _Bucket | None  # None: there is no limit
    n_reserved: int = 0
    rows: int = 1  # answers that it asks for; each counts as a request at once


class KeyMeter:
    """Counts each key owner's use against its limits.

    Args:
        limits: owner -> limits; other owners are unlimited.
    """

    def __init__(self, limits: dict[str, KeyLimits]) -> None:
        self._limits = limits
        self._in_flight: Counter[str] = Counter()
        self._requests: dict[str, _Bucket] = {}
        self._tokens: dict[str, _Bucket] = {}

    def set_limits(self, limits: dict[str, KeyLimits]) -> None:
        """Replace the limits. A bucket of unchanged size keeps its level; buckets of removed owners go."""
        self._limits = limits
        for buckets in (self._requests, self._tokens):
            for owner in buckets.keys() - limits.keys():
                del buckets[owner]

    def begin(self, owner: str, now: float) -> KeyUse:
        """A request of this owner begins; `end` must follow.

        Raises:
            RateLimited: names the limit; `retry_after` estimates when there is room again.
        """
        limits = self._limits.get(owner) or KeyLimits()
        if limits.max_in_flight is not None and self._in_flight[owner] >= limits.max_in_flight:
            message = f"This key may have {limits.max_in_flight} requests at once (max_in_flight in --keys)."
            raise RateLimited(message, retry_after=1.0)
        requests = _bucket(self._requests, owner, limits.requests_per_minute, now)
        if requests is not None and (wait := requests.seconds_until(1, now)) > 0:
            message = f"This key may send {requests.per_minute} requests a minute (requests_per_minute in --keys)."
            raise RateLimited(message, retry_after=wait)
        tokens = _bucket(self._tokens, owner, limits.tokens_per_minute, now)
        if tokens is not None and (wait := tokens.seconds_until(1, now)) > 0:
            message = f"This key may use {tokens.per_minute} tokens a minute (tokens_per_minute in --keys)."
            raise RateLimited(message, retry_after=wait)
        if requests is not None:
            requests.take(1, now)
        self._in_flight[owner] += 1
        return KeyUse(owner, tokens)

    def reserve(self, use: KeyUse, n_tokens: int, now: float, *, rows: int = 1) -> None:
        """Take the tokens and rows that a request is expected to need from its key's limits.

        Raises:
            RateLimited: there is no room. A request for more than a minute's tokens takes all of them.
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
        limit = (self._limits.get(use.owner) or KeyLimits()).max_in_flight
        if limit is not None and rows > limit:
            raise InvalidRequest(
                f"This key may have {limit} requests at once. Each answer counts as one; this one asks for {rows}.",
                param="n",
            )
        more = rows - use.rows
        if limit is not None and more and self._in_flight[use.owner] + more > limit:
            raise RateLimited(
                f"This key may have {limit} requests at once (max_in_flight in --keys). Each answer counts as one.",
                retry_after=1.0,
            )
        self._in_flight[use.owner] += more
        use.rows = rows

    def end(self, use: KeyUse, n_tokens: int, now: float) -> None:
        """End a request that `begin` admitted, however it ended.

        Args:
            n_tokens: of prompt and answer; they replace the reserved ones.
        """
        self._in_flight[use.owner] -= use.rows
        if not self._in_flight[use.owner]:
            del self._in_flight[use.owner]
        if use.tokens is not None:
            use.tokens.take(n_tokens - use.n_reserved, now)


def _bucket(buckets: dict[str, _Bucket], owner: str, per_minute: int | None, now: float) -> _Bucket | None:
    """The owner's bucket; a new one if the limit has changed."""
    if per_minute is None:
        buckets.pop(owner, None)
        return None
    bucket = buckets.get(owner)
    if bucket is None or bucket.per_minute != per_minute:
        bucket = buckets[owner] = _Bucket(per_minute, now)
    return bucket
