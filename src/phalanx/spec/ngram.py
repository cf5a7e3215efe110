"""Prompt lookup: the tokens that followed the latest occurrence of the last n-gram.

The longest n-gram that occurred before decides, and its latest occurrence. A sequence's own tokens are searched first.
Those of other requests are searched for the longest n-gram only, since a short one says little about another request's
text. A token's confidence bucket depends on the length of the common suffix of both contexts, and on how many of the
latest places continue with the same token. O(run lengths) per token and per draft.
"""

from __future__ import annotations

from phalanx.spec import lookup
from phalanx.spec.drafters import Draft, bucket
from phalanx.spec.lookup import IndexedText, LookupDrafter, Place, TextGroup
from phalanx.speculation_config import NgramSpeculation

COMPARED = 24  # tokens of context that are compared at most


class NgramDrafter(LookupDrafter):
    """A `Drafter` (`drafters.py`)."""

    def __init__(self, config: NgramSpeculation, *, indexed_per_step: int = lookup.INDEXED_PER_STEP) -> None:
        sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        super().__init__(sizes, config.prompt_lookup_requests, indexed_per_step=indexed_per_step)

    def _continue(self, group: TextGroup, text: IndexedText, n: int) -> Draft | None:
        elsewhere: list[Place] = []
        for size in self._sizes:
            places = group.after(text, size)
            for place in places:
                if place[0] is text:
                    return _draft(text, place, places, n)
            if size == self._sizes[0]:
                elsewhere = places
        return _draft(text, elsewhere[0], elsewhere, n) if elsewhere else None


def _draft(text: IndexedText, chosen: Place, places: list[Place], n: int) -> Draft:
    """The tokens after the chosen place, with confidences by how many of the places agree."""
    (source, start), tokens = chosen, lookup.continuation(text, *chosen, n)
    agreed = sum(other.tokens[at] == tokens[0] for other, at in places) / len(places)
    context = lookup.common_suffix(text.tokens, source.tokens, start, COMPARED)
    rights = [agreed * lookup.reliability(context + at) for at in range(len(tokens))]
    return Draft(tokens, [bucket(right / (1.0 - right)) for right in rights])
