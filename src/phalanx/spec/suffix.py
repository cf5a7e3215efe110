"""What followed most often: occurrences of the last tokens vote on how the text goes on.

Every place where the last tokens occurred before, in this request and recent ones, is a voice; it weighs as much as the
context that it shares with the text is long, squared, so that one long match outvotes some short ones, and many outvote
one. Where it is short, tokens that stand before it in both count as well: behind a value that was never there a record
goes on as others did at this field, not at another. The draft goes on while those that agreed so far still say
something, and while the estimated probability that all of it is right stays above a bound; each token's own is its
confidence bucket.

After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975), whose suffix trees cost a node per token and depth; here a
token costs two entries of an index, and only the latest places count (`lookup.PLACES`). Pure.
"""

from __future__ import annotations

from phalanx.config import SuffixSpeculation
from phalanx.spec.drafters import Draft, bucket
from phalanx.spec.lookup import INDEXED_PER_STEP, LookupDrafter, Place, Shelf, Text, alike, said, shared, trust

RUNS = (6, 2, 1)
"""Run lengths that lead to places: where a longer one does, the shorter are not asked. A single token says something in
records, where few values stand beside each other; elsewhere its bucket soon has a low rate."""
KINSHIP = 0.5  # what a token that both have before a context shorter than the longest run counts, against one in it

Voice = tuple[float, list[int]]  # length of the context that it shares with the text, with kinship; how it goes on


class SuffixDrafter(LookupDrafter):
    """A `Drafter` (`drafters.py`)."""

    def __init__(self, config: SuffixSpeculation, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        super().__init__(RUNS, config.suffix_decoding_max_cached_requests, indexed_per_step=indexed_per_step)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob

    def _continue(self, shelf: Shelf, text: Text, n: int) -> Draft | None:
        places: list[Place] = []
        for size in RUNS:
            places = places or shelf.after(text, size)
        lengths = [self._likeness(text, *place) for place in places]
        most = min(n, int(self._factor * max(lengths, default=0)))
        voices = [(length, said(text, *place, most)) for length, place in zip(lengths, places, strict=True)]
        return self._vote(voices, most)

    def _likeness(self, text: Text, source: Text, at: int) -> float:
        length = shared(text.tokens, source.tokens, at, self._depth)
        return length if length >= RUNS[0] else length + KINSHIP * alike(text.tokens, source.tokens, at, length)

    def _vote(self, voices: list[Voice], most: int) -> Draft | None:
        """The continuation that the voices agree on longest."""
        draft: list[int] = []
        buckets: list[int] = []
        certainty = 1.0
        for at in range(most):
            voices = [voice for voice in voices if at < len(voice[1])]
            votes: dict[int, float] = {}
            for length, says in voices:
                votes[says[at]] = votes.get(says[at], 0) + length * length
            if not votes:
                break
            winner = max(votes, key=votes.__getitem__)  # of equals the first: the latest place
            agreed = votes[winner] / sum(votes.values())
            if agreed < 1.0:
                voices = [voice for voice in voices if voice[1][at] == winner]
            right = agreed * trust(max(length for length, _ in voices) + at)
            certainty *= right
            if certainty < self._least:
                break
            draft.append(winner)
            buckets.append(bucket(right / (1.0 - right)))
        return Draft(draft, buckets) if draft else None
