"""The tokens of drafts, without their confidence buckets."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.spec.drafters import Drafter


def drafted(drafter: Drafter, wanted: Mapping[int, int]) -> dict[int, list[int]]:
    """Sequence -> drafted tokens."""
    return {key: draft.tokens for key, draft in drafter.draft(wanted).items()}
