"""Searches stop strings in a text that grows token by token.

The stop string that is complete first ends the text; of several that end with the same character, the longest does. So
the result does not depend on how the text is split into tokens. Text that may begin a stop string is held back until
the next characters decide.

All strings are searched at once (Aho and Corasick, "Efficient string matching", 1975): a character costs the same
however many strings there are and however long they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended the text."""

    string: str
    n_tokens: int
    """Output tokens up to and including the one that completed the string. Usage and KV are clipped to it."""


class StopAutomaton:
    """The stop strings of a request, prepared once for all its choices. Immutable.

    A state is the longest prefix of any string that the text ends with. State 0 is the empty prefix.

    Args:
        strings: at least one character each.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest proper suffix of a state that is a state too
        self._complete: list[str | None] = [None]  # the longest string that a state ends with
        self.depth = [0]
        """By state: its number of characters."""
        for string in strings:
            self._insert(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character; takes amortised constant time."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def complete(self, state: int) -> str | None:
        """The longest string that the text ends with in this state."""
        return self._complete[state]

    def _insert(self, string: str) -> None:
        if not string:
            raise ValueError("an empty stop string")
        state = 0
        for char in string:
            after = self._next[state].get(char)
            if after is None:
                after = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._complete.append(None)
                self.depth.append(self.depth[state] + 1)
            state = after
        self._complete[state] = string

    def _link(self) -> None:
        """Set the fallbacks, shorter states first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, after in self._next[state].items():
                fallback = self.step(self._fallback[state], char)
                self._fallback[after] = fallback
                self._complete[after] = self._complete[after] or self._complete[fallback]
                waiting.append(after)


class StopStrings:
    """The search of a request's stop strings in the text of one choice.

    Args:
        automaton: of the strings.
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, automaton: StopAutomaton, *, include: bool = False) -> None:
        self._automaton = automaton
        self._include = include
        self._state = 0
        self._held = ""
        self._match: StopMatch | None = None

    @property
    def matched(self) -> StopMatch | None:
        """The stop string that ended the text, if one did."""
        return self._match

    def add(self, text: str, n_tokens: int) -> str:
        """Append text.

        Args:
            text: of the latest token.
            n_tokens: output tokens so far, that one included.

        Returns:
            Text that can no longer begin a stop string. Empty after a match.
        """
        if self._match is not None:
            return ""
        self._held += text
        done = len(self._held) - len(text)
        for char in text:
            done += 1
            self._state = self._automaton.step(self._state, char)
            found = self._automaton.complete(self._state)
            if found is not None:
                self._match = StopMatch(found, n_tokens)
                end = done if self._include else done - len(found)
                return self._release(end, keep=False)
        return self._release(len(self._held) - self._automaton.depth[self._state])

    def finish(self) -> str:
        """End the text. Returns the text that was held back; empty after a match."""
        return self._release(len(self._held))

    def _release(self, end: int, *, keep: bool = True) -> str:
        shown, rest = self._held[:end], self._held[end:]
        self._held = rest if keep else ""
        return shown
