"""The index of the lookup drafters: tokens of running and recent sequences, by the n-grams ("runs") in them.

The tokens that followed a run before may follow it again. Indexing a token is O(1) per run length. A long prompt is
indexed over several steps, so that it does not stall decoding. Does not choose continuations: `ngram.py` and
`suffix.py` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from phalanx.spec.drafters import Draft, Drafter

INDEXED_PER_STEP = 4096  # tokens that enter or leave the indexes in a step, at most: 2 to 8 ms
KEPT_TOKENS = 1 << 16  # of ended sequences: at 200 bytes per token and run length, 13 MB per run length
PLACES = 16  # latest places of one run that are returned: enough for a vote, and a limit for the cost of a step
NEAR = 8  # tokens before a common suffix that are compared as well, by value and distance
SLACK = 2  # largest difference between two distances that counts as equal


@dataclass(eq=False)
class IndexedText:
    """One sequence's tokens, and its group. Places up to `indexed` are in the group's indexes."""

    tokens: list[int]
    number: int
    group: TextGroup
    indexed: int = 0


Place = tuple[IndexedText, int]  # (text, at): the context ends before `tokens[at]`, the continuation starts there


class RunIndex:
    """Run of `size` tokens -> the places that follow it, in all texts of a group. A place is stored as one integer,
    `text number << 32 | at`: most runs occur once, and a million integers cost the garbage collector nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: dict[tuple[int, ...], int | list[int]] = {}

    def add(self, text: IndexedText, start: int, stop: int) -> None:
        """The places `[start, stop)` of a text, in order. Changes state."""
        places, base = self._places, text.number << 32
        for run, at in self._runs(text.tokens, start, stop):
            known = places.get(run)
            if isinstance(known, list):
                known.append(base | at)
                if len(known) > 2 * PLACES:
                    del known[:PLACES]
            else:
                places[run] = base | at if known is None else [known, base | at]

    def remove(self, text: IndexedText, start: int, stop: int) -> None:
        """Forget the places `[start, stop)` of a text. Changes state."""
        places, base = self._places, text.number << 32
        for run, at in self._runs(text.tokens, start, stop):
            known = places.get(run)
            if known == base | at:
                del places[run]
            elif isinstance(known, list) and base | at in known:
                known.remove(base | at)
                if not known:
                    del places[run]

    def latest(self, run: tuple[int, ...]) -> list[int]:
        """The latest places after `run`, the latest first."""
        known = self._places.get(run, [])
        return [known] if isinstance(known, int) else known[: -PLACES - 1 : -1]

    def _runs(self, tokens: list[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], int]]:
        return ((tuple(tokens[at - self.size : at]), at) for at in range(max(start, self.size), stop))


class TextGroup:
    """The texts of one cache salt, among which drafts are looked up."""

    def __init__(self, name: str, sizes: Iterable[int]) -> None:
        self.name = name
        self.indexes = {size: RunIndex(size) for size in sizes}
        self.texts: dict[int, IndexedText] = {}

    def index(self, text: IndexedText, most: int) -> int:
        """Index up to `most` further tokens of a text; returns how many. Changes state."""
        start, text.indexed = text.indexed, min(len(text.tokens), text.indexed + most)
        for index in self.indexes.values():
            index.add(text, start, text.indexed)
        return text.indexed - start

    def remove(self, text: IndexedText, most: int) -> int:
        """Remove up to `most` tokens of a text from the indexes, the last first; with the last token, also the text.
        Returns how many. Changes state."""
        stop, text.indexed = text.indexed, max(0, text.indexed - most)
        for index in self.indexes.values():
            index.remove(text, text.indexed, stop)
        if text.indexed == 0:
            del self.texts[text.number]
        return stop - text.indexed

    def after(self, text: IndexedText, size: int) -> list[Place]:
        """The latest places where a text's last `size` tokens occurred before, the latest first."""
        places = self.indexes[size].latest(tuple(text.tokens[-size:]))
        return [(self.texts[place >> 32], place & 0xFFFFFFFF) for place in places]


class LookupDrafter(Drafter, ABC):
    """A drafter that looks into running and recently ended sequences of the same salt."""

    def __init__(self, sizes: Sequence[int], requests: int, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        self._sizes = tuple(sizes)  # lengths of the runs that are indexed
        self._requests = requests  # ended sequences that are kept; 0: each sequence looks into itself only
        self._indexed_per_step = indexed_per_step
        self._numbers = count()
        self._groups: dict[str, TextGroup] = {}
        self._running: dict[int, IndexedText] = {}
        self._ended: deque[IndexedText] = deque()  # the oldest first
        self._removable: deque[IndexedText] = deque()

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        if key in self._running:
            raise ValueError(f"sequence {key} has begun already")
        number = next(self._numbers)
        name = salt if self._requests else f"{number}"
        group = self._groups.setdefault(name, TextGroup(name, self._sizes))
        self._running[key] = group.texts[number] = IndexedText(list(tokens), number, group)

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._running[key].tokens.extend(tokens)

    def end(self, key: int) -> None:
        self._ended.append(self._running.pop(key))
        while len(self._ended) > self._requests or sum(len(text.tokens) for text in self._ended) > KEPT_TOKENS:
            self._removable.append(self._ended.popleft())

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        self._catch_up(wanted)
        texts = {key: self._running[key] for key in wanted}
        found = {key: self._continue(text.group, text, wanted[key]) for key, text in texts.items()}
        return {key: draft for key, draft in found.items() if draft is not None}

    @abstractmethod
    def _continue(self, group: TextGroup, text: IndexedText, n: int) -> Draft | None:
        """Up to n tokens that may follow the text; None if no context was found."""

    def _catch_up(self, wanted: Mapping[int, int]) -> None:
        """Remove ended texts, then index new tokens, the text with the fewest first; `indexed_per_step` at most."""
        left = self._indexed_per_step
        while left > 0 and self._removable:
            text = self._removable[0]
            left -= text.group.remove(text, left)
            if text.indexed == 0:
                self._removable.popleft()
                if not text.group.texts:
                    del self._groups[text.group.name]
        texts = [*(self._running[key] for key in wanted), *self._ended]
        for text in sorted(texts, key=lambda text: len(text.tokens) - text.indexed):
            left -= text.group.index(text, left)


def common_suffix(tokens: list[int], other: list[int], at: int, most: int) -> int:
    """Length of the longest common suffix of `tokens` and `other[:at]`, `most` at most."""
    most = min(most, len(tokens), at)
    return next((n for n in range(most) if tokens[-1 - n] != other[at - 1 - n]), most)


def nearby_matches(tokens: list[int], other: list[int], at: int, length: int) -> int:
    """Number of tokens that both texts have at about the same distance before their common suffix of this length."""
    ends = (tokens, len(tokens) - length), (other, at - length)
    ours, theirs = ({row[i]: end - i for i in range(max(0, end - NEAR), end)} for row, end in ends)
    return sum(token in theirs and abs(theirs[token] - distance) <= SLACK for token, distance in ours.items())


def continuation(text: IndexedText, source: IndexedText, at: int, n: int) -> list[int]:
    """Up to n tokens that follow a place. If the place is in the text itself, its end is repeated periodically."""
    read = source.tokens[at : at + n]
    period = len(source.tokens) - at
    while source is text and len(read) < n:
        read.append(read[len(read) - period])
    return read


def reliability(context: float) -> float:
    """Estimated probability that a continuation is right after `context` equal tokens, if all places agree on it."""
    return context / (context + 1)
