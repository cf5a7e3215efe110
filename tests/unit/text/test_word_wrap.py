"""Lines of whole words on a terminal of few columns, whether a text comes whole or in parts."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import struct
import termios
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TextIO

import pytest
from rich.cells import cell_len

from phalanx.text.word_wrap import WordWrap, fitted

COLUMNS = 20


def a_terminal(encoding: str = "utf-8") -> tuple[TextIO, int]:
    """One of 20 columns, and its other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    return os.fdopen(theirs, "w", encoding=encoding), ours


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    file, ours = a_terminal()
    with file:
        yield file
    os.close(ours)


def in_parts(text: str, file: TextIO, cuts: random.Random) -> str:
    wrap = WordWrap(file)
    at = sorted({0, len(text), *(cuts.randrange(len(text)) for _ in range(20))})
    return "".join(wrap.add(text[i:j]) for i, j in pairwise(at)) + wrap.end()


WRAPPED = {
    "the quick brown fox says hello": "the quick brown fox\nsays hello",
    "one\n\n  - two three four five": "one\n\n  - two three four\nfive",
    "exactly twenty chars a": "exactly twenty chars\na",
    "see https://example.com/a/b/c/d and more": "see\nhttps://example.com/a/b/c/d and more",
    "東京は日本の首都です。大きい": "東京は日本の首都です\n。大きい",
    "a b\n```sh\ncurl http://127.0.0.1:8000/v1/models\n```\nthe quick brown fox says": (
        "a b\n```sh\ncurl http://127.0.0.1:8000/v1/models\n```\nthe quick brown fox\nsays"
    ),
}


@pytest.mark.parametrize(("text", "shown"), WRAPPED.items())
def test_no_word_is_cut_that_a_line_has_room_for(text: str, shown: str, terminal: TextIO) -> None:
    wrap = WordWrap(terminal)
    assert wrap.add(text) + wrap.end() == shown


def test_the_same_in_parts(terminal: TextIO) -> None:
    cuts = random.Random(57)
    for text in (text for text in WRAPPED if "https" not in text):
        wrap = WordWrap(terminal)
        whole = wrap.add(text) + wrap.end()
        assert all(in_parts(text, terminal, cuts) == whole for _ in range(50))
        assert whole.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_an_address_that_comes_in_parts_is_not_broken(terminal: TextIO) -> None:
    cuts = random.Random(58)
    address = "https://example.com/" + 8 * "part/"
    assert all(address in in_parts(f"look at {address} now", terminal, cuts) for _ in range(50))


def test_a_long_word_does_not_wait_for_its_end(terminal: TextIO) -> None:
    """Some languages have no blanks."""
    wrap = WordWrap(terminal)
    assert len("".join(wrap.add("ก") for _ in range(3 * COLUMNS))) >= 2 * COLUMNS


def test_what_an_encoding_lacks_is_as_wide_as_its_escape() -> None:
    file, ours = a_terminal("ascii")
    with file:
        said = fitted("überlegen und übersetzen und übertragen", file)
    os.close(ours)
    assert said.replace("\n  ", " ") == "\\xfcberlegen und \\xfcbersetzen und \\xfcbertragen"
    assert all(cell_len(line) <= COLUMNS for line in said.splitlines()) and said.count("\n") == 2


def test_broken_lines_of_an_error_are_indented(terminal: TextIO) -> None:
    assert fitted("error: no room for it at all", terminal) == "error: no room for\n  it at all"


def test_a_file_gets_the_text_as_it_is() -> None:
    with Path(os.devnull).open("w") as file:
        text = "the quick brown fox says hello " * 9
        assert fitted(text, file) == text
        wrap = WordWrap(file)
        assert wrap.add("hel") == "hel"  # at once
