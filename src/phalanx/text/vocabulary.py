"""How a vocabulary spells text: as bytes in GPT-2's alphabet, or as words with marks for spaces.

The vocabulary decides how tokens are decoded: files and classes also name a decoder, but some conversions have written
it wrongly, so that answers are full of marks. Imports no library.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache

NEVER_IN_UTF8 = frozenset(map(chr, [0xC0, 0xC1, *range(0xF5, 0x100)]))
"""In GPT-2's alphabet, where these bytes stand for themselves."""

SPACE = "\u2581"
"""Stands for a space in the vocabularies of SentencePiece."""

SAMPLE = "Hello, world! naïve café – 你好 Привет 😀 x = 1\n\nThe end."
MARKS = ("Ġ", "Ċ", SPACE, "<0x")
"""Characters that a wrong decoder shows instead of spaces, line ends and bytes."""


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, U+0100 and up for the other bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def from_byte_level(name: str) -> bytes:
    """The bytes of a token. A name with other characters is an added token, which the decoder takes as plain text."""
    table = byte_of_character()
    if all(character in table for character in name):
        return bytes(table[character] for character in name)
    return name.encode()


def is_byte_level(token_to_id: Callable[[str], int | None]) -> bool:
    """Whether a vocabulary has a token for every byte, and none for SentencePiece's space.

    (Large vocabularies of SentencePiece have tokens for all characters of GPT-2's alphabet, too.)
    """
    letters = byte_of_character().keys() - NEVER_IN_UTF8
    return token_to_id(SPACE) is None and all(token_to_id(letter) is not None for letter in letters)


def damage(encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], *, complete: bool) -> str | None:
    """A sample of text after encoding and decoding; None if it is unchanged.

    Args:
        complete: the vocabulary can spell every text. Others may lose characters, but not all, and show no marks.
    """
    text = decode(encode(SAMPLE))
    lost = _plain(text) != _plain(SAMPLE) if complete else not text.strip()
    return text if lost or any(mark in text for mark in MARKS) else None


def _plain(text: str) -> list[str]:
    """The words of a text without case and accents, which normalisers of vocabularies change."""
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letters).casefold().split()
