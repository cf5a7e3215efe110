"""Stop strings, searched while the text is still arriving. Pure: knows text and a token count, no tokenizer.

Of all stop strings the one that is complete first ends the text; if several are complete with the same character, the
longest. So the result does not depend on how the text was cut into tokens. Text that may be the beginning of a stop
string is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found."""

    string: str
    n_tokens: int
    """Output tokens up to and including the one that completed it: what usage, logprobs and KV are clipped to."""


class StopStrings:
    """One search over one text.

    Args:
        strings: at least one character each.
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, strings: Iterable[str], *, include: bool = False) -> None:
        # Longest first: the first that is complete is then the longest of those complete with the same character.
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
            text: what the latest token added.
            n_tokens: output tokens so far, that one included.

        Returns:
            Text that is safe to show; nothing more after a match.
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
        """The text has ended without a match: what was held back. Empty after a match."""
        return self._release(len(self._held))

    def _release(self, end: int, *, keep: bool = True) -> str:
        shown, rest = self._held[:end], self._held[end:]
        self._held = rest if keep else ""
        return shown


class _Search:
    """Knuth, Morris and Pratt: how many characters of `string` the text ends with, in amortised constant time."""

    def __init__(self, string: str) -> None:
        if not string:
            raise ValueError("an empty stop string")
        self.string = string
        self.progress = 0
        self._fallback = [0] * len(string)  # [i]: progress that remains when string[:i + 1] cannot be continued
        for i in range(1, len(string)):
            self._fallback[i] = self._advance(self._fallback[i - 1], string[i])

    def step(self, char: str) -> bool:
        """Take one character; whether the string is complete."""
        self.progress = self._advance(self.progress, char)
        return self.progress == len(self.string)

    def _advance(self, progress: int, char: str) -> int:
        while progress and (progress == len(self.string) or self.string[progress] != char):
            progress = self._fallback[progress - 1]
        return progress + 1 if self.string[progress] == char else progress
