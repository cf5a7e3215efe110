"""Suffix decoding: earlier occurrences of the last tokens vote on the next ones.

Every place where the last tokens occurred before, in this request and in recent ones, is a match. Its weight is the
square of its length, the number of tokens that it has in common with the end of the text: one long match outvotes a few
short ones, and many short ones outvote one long. A short match also counts equal tokens nearby: after a value that is
new, a record continues as other records do at the same field, not as at another field. Matches that disagree with the
draft drop out. The draft ends when no match is left, or when the estimated probability that all of it is right falls
below a limit. A token's own probability gives its confidence bucket.

After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975), whose suffix trees cost a node per token and depth; here a
token costs two entries of an index, and only the latest places count (`lookup.PLACES`).
"""

from __future__ import annotations

from phalanx.spec import lookup
from phalanx.spec.drafters import Draft, bucket
from phalanx.spec.lookup import IndexedText, LookupDrafter, Place, TextGroup
from phalanx.speculation_config import SuffixSpeculation

RUNS = (6, 2, 1)
"""Run lengths that are looked up, the longest first; the first one with places decides. A single token is enough in
records, which have few values; in other texts its bucket soon has a low rate."""
NEARBY_WEIGHT = 0.5  # weight of an equal token nearby, against one in the common suffix; for short suffixes only

Match = tuple[float, list[int]]  # length of the common suffix, with equal tokens nearby; continuation


class SuffixDrafter(LookupDrafter):
    """A `Drafter` (`drafters.py`)."""

    def __init__(self, config: SuffixSpeculation, *, indexed_per_step: int = lookup.INDEXED_PER_STEP) -> None:
        super().__init__(RUNS, config.suffix_decoding_max_cached_requests, indexed_per_step=indexed_per_step)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob

    def _continue(self, group: TextGroup, text: IndexedText, n: int) -> Draft | None:
        places: list[Place] = next((found for size in RUNS if (found := group.after(text, size))), [])
        lengths = [self._match_length(text, *place) for place in places]
        most = min(n, int(self._factor * max(lengths, default=0)))
        matches = [
            (length, lookup.continuation(text, *place, most)) for length, place in zip(lengths, places, strict=True)
        ]
        return self._vote(matches, most)

    def _match_length(self, text: IndexedText, source: IndexedText, at: int) -> float:
        length = lookup.common_suffix(text.tokens, source.tokens, at, self._depth)
        nearby = 0 if length >= RUNS[0] else lookup.nearby_matches(text.tokens, source.tokens, at, length)
        return length + NEARBY_WEIGHT * nearby

    def _vote(self, matches: list[Match], most: int) -> Draft | None:
        """The tokens with the most weight, one after the other; up to `most`."""
        draft: list[int] = []
        buckets: list[int] = []
        certainty = 1.0
        for at in range(most):
            matches = [match for match in matches if at < len(match[1])]
            votes: dict[int, float] = {}
            for length, tokens in matches:
                votes[tokens[at]] = votes.get(tokens[at], 0) + length * length
            if not votes:
                break
            winner = max(votes, key=votes.__getitem__)  # of equals the first: the latest place
            agreed = votes[winner] / sum(votes.values())
            if agreed < 1.0:
                matches = [match for match in matches if match[1][at] == winner]
            right = agreed * lookup.reliability(max(length for length, _ in matches) + at)
            certainty *= right
            if certainty < self._least:
                break
            draft.append(winner)
            buckets.append(bucket(right / (1.0 - right)))
        return Draft(draft, buckets) if draft else None
