"""Searches stop strings in a text that grows token by token. Pure: knows text and token counts, no tokenizer.

The stop string that is complete first ends the text; of several that end with the same character, the longest does. The
result therefore does not depend on how the text is split into tokens. Text that may begin a stop string is held back
until the next characters decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended the text."""

    string: str
    n_tokens: int
    """Output tokens up to the one that completed the string, included. Usage, logprobs and KV are clipped to it."""


class StopStrings:
    """The search of some stop strings in one text.

    Args:
        strings: at least one character each.
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, strings: Iterable[str], *, include: bool = False) -> None:
        # Longest first: of strings that end with the same character, the first found is then the longest.
        self._searches = [_Search(string) for string in sorted(strings, key=len, reverse=True)]
        self._include = include
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
            found = [search.string for search in self._searches if search.step(char)]
            if found:
                self._match = StopMatch(found[0], n_tokens)
                end = done if self._include else done - len(found[0])
                return self._release(end, keep=False)
        undecided = max((search.progress for search in self._searches), default=0)
        return self._release(len(self._held) - undecided)

    def finish(self) -> str:
        """End the text. Returns what was held back; empty after a match."""
        return self._release(len(self._held))

    def _release(self, end: int, *, keep: bool = True) -> str:
        shown, rest = self._held[:end], self._held[end:]
        self._held = rest if keep else ""
        return shown


class _Search:
    """Knuth-Morris-Pratt: tracks how many characters of `string` the text ends with, in amortised constant time."""

    def __init__(self, string: str) -> None:
        if not string:
            raise ValueError("an empty stop string")
        self.string = string
        self.progress = 0
        self._fallback = [0] * len(string)  # [i]: the progress to fall back to if string[:i + 1] does not continue
        for i in range(1, len(string)):
            self._fallback[i] = self._advance(self._fallback[i - 1], string[i])

    def step(self, char: str) -> bool:
        """Append one character. Returns whether the string is complete."""
        self.progress = self._advance(self.progress, char)
        return self.progress == len(self.string)

    def _advance(self, progress: int, char: str) -> int:
        while progress and (progress == len(self.string) or self.string[progress] != char):
            progress = self._fallback[progress - 1]
        return progress + 1 if self.string[progress] == char else progress
