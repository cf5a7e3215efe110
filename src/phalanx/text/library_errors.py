"""Errors of the library `tokenizers` as errors of this package.

It raises plain `Exception`s. If its Rust code panics, as on a regular expression of tokenizer.json that takes too long
on a text, it raises a `BaseException` that no handler expects. This module does not import the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.errors import PhalanxError


@contextmanager
def library_errors(error: Callable[[str], PhalanxError]) -> Iterator[None]:
    """Raise `error(message)` if the library fails; other errors pass."""
    try:
        yield
    except BaseException as problem:
        if type(problem) is not Exception and type(problem).__name__ != "PanicException":
            raise
        raise error(str(problem).strip()) from problem
