"""Flags in lists of arguments."""

from __future__ import annotations

from collections.abc import Sequence


def split_flag(words: Sequence[str], *names: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments without a flag, which may have several names, and the values that it had."""
    rest: list[str] = []
    values: list[str] = []
    for word in words:
        if rest and rest[-1] in names:
            rest.pop()
            values.append(word)
        elif word.partition("=")[0] in names and "=" in word:
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return tuple(rest), tuple(values)


def flag_value(words: Sequence[str], name: str) -> str | None:
    """The value of a flag; the last one counts."""
    return next(reversed(split_flag(words, name)[1]), None)
