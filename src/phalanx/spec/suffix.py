"""What followed most often: occurrences of the last tokens vote on how the text goes on.

Every place where the last tokens occurred before, in this request and recent ones, is a voice; it weighs as much as
the context that it shares with the text is long, squared, so that one long match outvotes some short ones, and many
outvote one. The draft goes on while those that agreed so far still say something, and while the estimated probability
that all of it is right stays above a bound. Agents that repeat themselves get long drafts, everybody else short ones.

After SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975), whose suffix trees cost a node per token and depth; here a
token costs two entries of an index, and only the latest places are heard (`lookup.PLACES`). Pure.
"""

from __future__ import annotations

from phalanx.config import SuffixSpeculation
from phalanx.spec.lookup import INDEXED_PER_STEP, LookupDrafter, Place, Shelf, Text

RUNS = (6, 2)
"""Run lengths that lead to places: where the longer one does, the shorter is not asked."""


class SuffixDrafter(LookupDrafter):
    """A `Drafter` (`drafters.py`)."""

    def __init__(self, config: SuffixSpeculation, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        super().__init__(RUNS, config.suffix_decoding_max_cached_requests, indexed_per_step=indexed_per_step)
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._least = config.suffix_decoding_min_token_prob

    def _continue(self, shelf: Shelf, text: Text, n: int) -> list[int]:
        places: list[Place] = []
        for size in RUNS:
            places = places or shelf.after(text, size)
        voices = [(shared(text.tokens, source.tokens, at, self._depth), source, at) for source, at in places]
        longest = max((length for length, _, _ in voices), default=0)
        return self._vote(text, voices, min(n, int(self._factor * longest)))

    def _vote(self, text: Text, voices: list[tuple[int, Text, int]], most: int) -> list[int]:
        """The continuation that the voices agree on longest.

        Args:
            voices: (length of the shared context, text, place of the token that followed).
        """
        draft: list[int] = []
        certainty = 1.0
        while len(draft) < most:
            said = [(_token(text, draft, source, at + len(draft)), length) for length, source, at in voices]
            votes: dict[int, int] = {}
            for token, length in said:
                if token is not None:
                    votes[token] = votes.get(token, 0) + length * length
            if not votes:
                break
            winner = max(votes, key=votes.__getitem__)  # of equals the first: this text's latest place
            context = max(length for token, length in said if token == winner) + len(draft)
            certainty *= votes[winner] / sum(votes.values()) * trust(context)
            if certainty < self._least:
                break
            draft.append(winner)
            voices = [voice for voice, (token, _) in zip(voices, said, strict=True) if token == winner]
        return draft


def trust(context: int) -> float:
    """How often a continuation that nothing contradicts is taken to be right, after so many equal tokens: 2/3 after
    two, 24/25 after 24, as if every context had failed once."""
    return context / (context + 1)


def shared(tokens: list[int], other: list[int], at: int, most: int) -> int:
    """Length of the context that `tokens` and `other[:at]` end with, `most` at most."""
    most = min(most, len(tokens), at)
    length = 0
    while length < most and tokens[-1 - length] == other[at - 1 - length]:
        length += 1
    return length


def _token(text: Text, draft: list[int], source: Text, at: int) -> int | None:
    """What a voice says; at the end of the text itself it reads on in the draft, another text's voice falls silent."""
    if at < len(source.tokens):
        return source.tokens[at]
    return draft[at - len(source.tokens)] if source is text else None
