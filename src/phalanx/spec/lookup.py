"""Texts that are looked up: the tokens of running and recent sequences, indexed by the runs of tokens in them.

What followed a run of tokens before may follow it again. Indexing a token is O(1) per run length, a long prompt's over
several steps, so that it does not stall decoding. Pure. Does not choose continuations: `ngram.py` and `suffix.py` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from phalanx.spec.drafters import Draft, Drafter

INDEXED_PER_STEP = 4096  # tokens that enter or leave the indexes in a step, at most: 2 to 8 ms
KEPT_TOKENS = 1 << 16  # of ended sequences: at 200 bytes per token and run length, 13 MB per run length
PLACES = 16  # of one run that are found, the latest: enough to vote, and a limit to what a step may cost
NEAR = 8  # tokens before a context that is shared, among which others are looked for that both have
SLACK = 2  # tokens by which their distances may differ


@dataclass(eq=False)
class Text:
    """One sequence's tokens, and the shelf it is on. Places up to `indexed` are in that one's indexes."""

    tokens: list[int]
    number: int
    shelf: Shelf
    indexed: int = 0

    @property
    def behind(self) -> int:
        """Tokens not indexed yet."""
        return len(self.tokens) - self.indexed


Place = tuple[Text, int]  # the token `tokens[at]` of a text, as the one that followed what stands before it


class RunIndex:
    """Where the runs of `size` tokens went on, in all texts of a shelf. A place is one integer, `text number << 32 |
    at`: most runs occur once, and a million integers cost the garbage collector nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: dict[tuple[int, ...], int | list[int]] = {}

    def add(self, text: Text, start: int, stop: int) -> None:
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

    def remove(self, text: Text, start: int, stop: int) -> None:
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


class Shelf:
    """Texts that may learn from each other: those of one salt."""

    def __init__(self, name: str, sizes: Iterable[int]) -> None:
        self.name = name
        self.indexes = {size: RunIndex(size) for size in sizes}
        self.texts: dict[int, Text] = {}

    def index(self, text: Text, most: int) -> int:
        """Index up to `most` further tokens of a text; returns how many. Changes state."""
        start, text.indexed = text.indexed, min(len(text.tokens), text.indexed + most)
        for index in self.indexes.values():
            index.add(text, start, text.indexed)
        return text.indexed - start

    def remove(self, text: Text, most: int) -> int:
        """Take up to `most` tokens of a text out, the last first; it is gone when none is left. Changes state."""
        stop, text.indexed = text.indexed, max(0, text.indexed - most)
        for index in self.indexes.values():
            index.remove(text, text.indexed, stop)
        if text.indexed == 0:
            del self.texts[text.number]
        return stop - text.indexed

    def after(self, text: Text, size: int) -> list[Place]:
        """The latest places where a text's last `size` tokens occurred before, the latest first."""
        places = self.indexes[size].latest(tuple(text.tokens[-size:]))
        return [(self.texts[place >> 32], place & 0xFFFFFFFF) for place in places]


class LookupDrafter(Drafter, ABC):
    """A drafter over running sequences and the latest ended ones, which only those of one salt may learn from."""

    def __init__(self, sizes: Sequence[int], requests: int, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        self._sizes = tuple(sizes)  # lengths of the runs that are indexed
        self._requests = requests  # ended ones that are kept; 0: running ones do not learn from each other either
        self._indexed_per_step = indexed_per_step
        self._numbers = count()
        self._shelves: dict[str, Shelf] = {}
        self._running: dict[int, Text] = {}
        self._ended: deque[Text] = deque()  # the oldest first
        self._leaving: deque[Text] = deque()

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        if key in self._running:
            raise ValueError(f"sequence {key} has begun already")
        number = next(self._numbers)
        name = salt if self._requests else f"{number}"
        shelf = self._shelves.setdefault(name, Shelf(name, self._sizes))
        self._running[key] = shelf.texts[number] = Text(list(tokens), number, shelf)

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._running[key].tokens.extend(tokens)

    def end(self, key: int) -> None:
        self._ended.append(self._running.pop(key))
        while len(self._ended) > self._requests or sum(len(text.tokens) for text in self._ended) > KEPT_TOKENS:
            self._leaving.append(self._ended.popleft())

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        self._catch_up(wanted)
        texts = {key: self._running[key] for key in wanted}
        found = {key: self._continue(text.shelf, text, wanted[key]) for key, text in texts.items()}
        return {key: draft for key, draft in found.items() if draft is not None}

    @abstractmethod
    def _continue(self, shelf: Shelf, text: Text, n: int) -> Draft | None:
        """Up to n tokens that may follow the text; None without an idea."""

    def _catch_up(self, wanted: Mapping[int, int]) -> None:
        """Within the step's bound: texts leave, then what is new is indexed, the text with the least of it first."""
        left = self._leave(self._indexed_per_step)
        texts = [*(self._running[key] for key in wanted), *(text for text in self._ended if text.behind)]
        for text in sorted(texts, key=attrgetter("behind")):
            left -= text.shelf.index(text, left)

    def _leave(self, left: int) -> int:
        """Take out what is not kept any more; returns what is left of the bound."""
        while left > 0 and self._leaving:
            text = self._leaving[0]
            left -= text.shelf.remove(text, left)
            if text.indexed == 0:
                self._leaving.popleft()
                if not text.shelf.texts:
                    del self._shelves[text.shelf.name]
        return left


def shared(tokens: list[int], other: list[int], at: int, most: int) -> int:
    """Length of the context that `tokens` and `other[:at]` end with, `most` at most."""
    most = min(most, len(tokens), at)
    return next((n for n in range(most) if tokens[-1 - n] != other[at - 1 - n]), most)


def alike(tokens: list[int], other: list[int], at: int, length: int) -> int:
    """Tokens that occur at about the same distance before the context of this length that both end with."""
    ends = (tokens, len(tokens) - length), (other, at - length)
    ours, theirs = ({row[i]: end - i for i in range(max(0, end - NEAR), end)} for row, end in ends)
    return sum(token in theirs and abs(theirs[token] - distance) <= SLACK for token, distance in ours.items())


def said(text: Text, source: Text, at: int, n: int) -> list[int]:
    """How the text goes on by a place, n tokens at most; at the end of the text itself, a loop goes on as a loop."""
    read = source.tokens[at : at + n]
    period = len(source.tokens) - at
    while source is text and len(read) < n:
        read.append(read[len(read) - period])
    return read


def trust(context: float) -> float:
    """How often an uncontradicted continuation is right after so many equal tokens, as if each had failed once."""
    return context / (context + 1)
