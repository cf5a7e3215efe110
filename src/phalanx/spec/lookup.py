"""Texts that are looked up: the tokens of running and recent sequences, indexed by the runs of tokens in them.

What followed a run of tokens before may follow it again. Indexing a token is O(1) per run length, and a long prompt is
indexed piece by piece over several steps, so that it stalls nobody's decoding. Pure. Does not know which continuation
is the better one: that is `ngram.py` and `suffix.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from phalanx.spec.drafters import Draft, Drafter

INDEXED_PER_STEP = 4096
"""Tokens that enter or leave the indexes before a step's drafts, at most: 2 to 8 ms when so many are waiting."""

KEPT_TOKENS = 1 << 16
"""Tokens of ended sequences that are kept: at 200 bytes per token and run length, 13 MB per run length."""

PLACES = 16
"""Places of one run that are found, the latest: enough to vote, and what a step may cost is bounded."""

NEAR = 8
"""Tokens before a context that is shared, among which others are looked for that both have."""
SLACK = 2
"""Tokens by which their distances may differ."""


class Text:
    """One sequence's tokens. Places up to `indexed` are in the shelf's indexes."""

    def __init__(self, tokens: Sequence[int], number: int) -> None:
        self.tokens = list(tokens)
        self.number = number
        self.indexed = 0

    @property
    def behind(self) -> int:
        """Tokens not indexed yet."""
        return len(self.tokens) - self.indexed


Place = tuple[Text, int]
"""The token `tokens[at]` of a text, as the one that followed what stands before it."""


class RunIndex:
    """Where the runs of `size` tokens went on, in all texts of a shelf.

    A place is one integer, `text number << 32 | at`: most runs occur once, and a million integers cost the garbage
    collector nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: dict[tuple[int, ...], int | list[int]] = {}

    def add(self, text: Text, start: int, stop: int) -> None:
        """The places `[start, stop)` of a text, in order. Changes state."""
        places, base = self._places, text.number << 32
        for run, at in self._runs(text.tokens, start, stop):
            known = places.get(run)
            if known is None:
                places[run] = base | at
            elif isinstance(known, int):
                places[run] = [known, base | at]
            else:
                known.append(base | at)
                if len(known) > 2 * PLACES:
                    del known[:PLACES]

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
        known = self._places.get(run)
        if known is None:
            return []
        return [known] if isinstance(known, int) else known[: -PLACES - 1 : -1]

    def __len__(self) -> int:
        return len(self._places)

    def _runs(self, tokens: list[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], int]]:
        size = self.size
        return ((tuple(tokens[at - size : at]), at) for at in range(max(start, size), stop))


class Shelf:
    """Texts that may learn from each other: those of one salt."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.indexes = {size: RunIndex(size) for size in sizes}
        self._texts: dict[int, Text] = {}

    def put(self, text: Text) -> None:
        """A text is here from now on, not indexed yet. Changes state."""
        self._texts[text.number] = text

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
            del self._texts[text.number]
        return stop - text.indexed

    def after(self, text: Text, size: int) -> list[Place]:
        """The latest places where a text's last `size` tokens occurred before, the latest first."""
        run = tuple(text.tokens[-size:])
        return [(self._texts[place >> 32], place & 0xFFFFFFFF) for place in self.indexes[size].latest(run)]

    @property
    def empty(self) -> bool:
        """No text is here."""
        return not self._texts


class LookupDrafter(Drafter, ABC):
    """A drafter over running sequences and the latest ended ones, which only those of one salt may learn from.

    The ended ones are the tokens that the prefix cache holds, as far as `requests` and `KEPT_TOKENS` allow.
    """

    def __init__(self, sizes: Sequence[int], requests: int, *, indexed_per_step: int = INDEXED_PER_STEP) -> None:
        """
        Args:
            sizes: lengths of the runs that are indexed.
            requests: ended sequences that are kept; 0 means that running ones do not learn from each other either.
        """
        self._sizes = tuple(sizes)
        self._requests = requests
        self._indexed_per_step = indexed_per_step
        self._numbers = count()
        self._shelves: dict[str, Shelf] = {}
        self._running: dict[int, tuple[str, Text]] = {}  # with the shelf's name
        self._ended: deque[tuple[str, Text]] = deque()  # the oldest first
        self._kept = 0  # tokens in them
        self._unfinished: list[tuple[str, Text]] = []  # ended, not indexed to their end yet
        self._leaving: deque[tuple[str, Text]] = deque()

    def begin(self, key: int, tokens: Sequence[int], salt: str = "") -> None:
        if key in self._running:
            raise ValueError(f"sequence {key} has begun already")
        text = Text(tokens, next(self._numbers))
        name = salt if self._requests else f"{text.number}"
        self._running[key] = name, text
        self._shelves.setdefault(name, Shelf(self._sizes)).put(text)

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self._running[key][1].tokens.extend(tokens)

    def end(self, key: int) -> None:
        name, text = self._running.pop(key)
        self._ended.append((name, text))
        self._unfinished.append((name, text))
        self._kept += len(text.tokens)
        while len(self._ended) > self._requests or self._kept > KEPT_TOKENS:
            oldest = self._ended.popleft()
            self._kept -= len(oldest[1].tokens)
            self._leaving.append(oldest)
            if oldest in self._unfinished:
                self._unfinished.remove(oldest)

    def draft(self, wanted: Mapping[int, int]) -> dict[int, Draft]:
        self._catch_up(wanted)
        drafts = {}
        for key, n in wanted.items():
            name, text = self._running[key]
            draft = self._continue(self._shelves[name], text, n)
            if draft is not None:
                drafts[key] = draft
        return drafts

    @abstractmethod
    def _continue(self, shelf: Shelf, text: Text, n: int) -> Draft | None:
        """Up to n tokens that may follow the text; None without an idea."""

    def _catch_up(self, wanted: Mapping[int, int]) -> None:
        """Within the step's bound: texts leave, then what is new is indexed, the text with the least of it first."""
        left = self._leave(self._indexed_per_step)
        behind = [*(self._running[key] for key in wanted), *self._unfinished]
        for name, text in sorted(behind, key=lambda pair: pair[1].behind):
            left -= self._shelves[name].index(text, left)
        self._unfinished = [pair for pair in self._unfinished if pair[1].behind]

    def _leave(self, left: int) -> int:
        """Take out what is not kept any more; returns what is left of the bound."""
        while left > 0 and self._leaving:
            name, text = self._leaving[0]
            left -= self._shelves[name].remove(text, left)
            if text.indexed == 0:
                self._leaving.popleft()
                if self._shelves[name].empty:
                    del self._shelves[name]
        return left


def shared(tokens: list[int], other: list[int], at: int, most: int) -> int:
    """Length of the context that `tokens` and `other[:at]` end with, `most` at most."""
    most = min(most, len(tokens), at)
    length = 0
    while length < most and tokens[-1 - length] == other[at - 1 - length]:
        length += 1
    return length


def alike(tokens: list[int], other: list[int], at: int, length: int) -> int:
    """Tokens that occur in both before the context of this length that `tokens` and `other[:at]` end with, at about the
    same distance from it: values differ in length."""
    ours, theirs = _distances(tokens, len(tokens) - length), _distances(other, at - length)
    return sum(token in theirs and abs(theirs[token] - distance) <= SLACK for token, distance in ours.items())


def _distances(tokens: list[int], end: int) -> dict[int, int]:
    """How far before `end` each token occurs for the last time, among the `NEAR` there."""
    return {tokens[at]: end - at for at in range(max(0, end - NEAR), end)}


def said(text: Text, source: Text, at: int, n: int) -> list[int]:
    """What a place says of how the text goes on, n tokens at most. One of the text itself reads on in what it read
    where the text ends: a loop goes on as a loop. Another text's falls silent there."""
    read = source.tokens[at : at + n]
    period = len(source.tokens) - at
    while source is text and len(read) < n:
        read.append(read[len(read) - period])
    return read


def trust(context: float) -> float:
    """How often a continuation that nothing contradicts is taken to be right, after so many equal tokens: 2/3 after
    two, 24/25 after 24, as if every context had failed once."""
    return context / (context + 1)
