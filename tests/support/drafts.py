"""The tokens of drafts, without their confidence buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.spec.drafters import Draft, Drafter


def drafted(drafter: Drafter, wanted: Mapping[int, int]) -> dict[int, list[int]]:
    """Sequence -> drafted tokens."""
    return {key: draft.tokens for key, draft in drafter.draft(wanted).items()}


def by_position(tokens: Sequence[int]) -> Draft:
    """A draft of a drafter without confidence in single tokens: the buckets are the positions."""
    return Draft([*tokens], range(len(tokens)))
