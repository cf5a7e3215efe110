"""Prompt lookup: the tokens that followed the same last tokens before.

The longest run of last tokens that occurred before decides, and its latest occurrence. A sequence's own tokens come
first; those of other requests are looked up for the longest run only, since a short one says little about another
request's text. A token's confidence bucket tells how long the context is that both places share, and how many of the
latest places went on in the same way. Pure; O(run lengths) per token and per draft.
"""

from __future__ import annotations

from phalanx.config import NgramSpeculation
from phalanx.spec.drafters import Draft, bucket
from phalanx.spec.lookup import INDEXED_PER_STEP, LookupDrafter, Place, Shelf, Text, said, shared, trust

COMPARED = 24  # tokens of context that are compared at most


class NgramDrafter(LookupDrafter):
    """Drafts what the chosen place says."""

    def __init__(self, config: NgramSpeculation, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        super().__init__(sizes, config.prompt_lookup_requests, indexed_per_step=indexed_per_step)

    def _continue(self, shelf: Shelf, text: Text, n: int) -> Draft | None:
        elsewhere: list[Place] = []
        for size in self._sizes:
            places = shelf.after(text, size)
            for place in places:
                if place[0] is text:
                    return _draft(text, place, places, n)
            if size == self._sizes[0]:
                elsewhere = places
        return _draft(text, elsewhere[0], elsewhere, n) if elsewhere else None


def _draft(text: Text, chosen: Place, places: list[Place], n: int) -> Draft:
    """What follows the chosen one of these places."""
    (source, start), tokens = chosen, said(text, *chosen, n)
    agreed = sum(other.tokens[at] == tokens[0] for other, at in places) / len(places)
    context = shared(text.tokens, source.tokens, start, COMPARED)
    rights = [agreed * trust(context + at) for at in range(len(tokens))]
    return Draft(tokens, [bucket(right / (1.0 - right)) for right in rights])
