"""Prompt lookup: the tokens that followed the same last tokens before.

The longest run of last tokens that occurred before decides, and its latest occurrence. A sequence's own tokens come
first; those of other requests are looked up for the longest run only, since a short one says little about a text that
is somebody else's. Pure; O(run lengths) per token and per draft.
"""

from __future__ import annotations

from phalanx.config import NgramSpeculation
from phalanx.spec.lookup import INDEXED_PER_STEP, LookupDrafter, Shelf, Text, goes_on


class NgramDrafter(LookupDrafter):
    """A `Drafter` (`drafters.py`)."""

    def __init__(self, config: NgramSpeculation, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        super().__init__(sizes, config.prompt_lookup_requests, indexed_per_step=indexed_per_step)

    def _continue(self, shelf: Shelf, text: Text, n: int) -> list[int]:
        elsewhere: list[int] = []
        for size in self._sizes:
            for source, at in shelf.after(text, size):
                if source is text:
                    return goes_on(text.tokens, at, n)
                if size == self._sizes[0] and not elsewhere:
                    elsewhere = source.tokens[at : at + n]
        return elsewhere
