"""Incremental detokenisation: decodes token by token, never half a character; the pieces add up to the whole text.

If every token is a fixed byte string, `ByteTextStream` decodes the bytes as they arrive. For other tokenizers,
`WindowStream` decodes the last few tokens again with each new one.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_PARTIAL = 3  # bytes of an incomplete UTF-8 character
MAX_WINDOW = 64  # tokens without a certain end; no character and no word's first space is so far back
CONTEXT = 8  # tokens of such a window that the next one begins with; more than a character has bytes


class TextStream(ABC):
    """Decodes the text of one sequence. For one thread at a time; streams of one tokenizer are independent."""

    @abstractmethod
    def add(self, token: int) -> str:
        """Append a token. Returns the text that is now certain; empty within a character."""

    @abstractmethod
    def finish(self) -> str:
        """End the text. Returns the decoding of an incomplete character, and resets the stream."""


class ByteTextStream(TextStream):
    """For byte-level vocabularies: a token's bytes do not depend on its neighbours. O(1) per token.

    Args:
        token_bytes: token id -> its bytes, empty for hidden tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class WindowStream(TextStream):
    """For any tokenizer: decodes a window, the tokens of the latest text and those after it. O(window) per token.

    The window begins with tokens whose text was returned before: this context keeps a decoder that strips the first
    space of a text from stripping every token's. Up to `MAX_PARTIAL` trailing replacement characters are held back,
    because the next token may complete them. A window of many tokens whose end stays uncertain (the model writes bytes
    that are not UTF-8) is cut anyway: otherwise each token would cost as much as all before it.

    Args:
        decode: token ids -> text, special tokens included.
        hidden: ids without text; they do not enter the window.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # leading tokens of the window whose whole text was returned
        self._shown = ""  # beginning of the window's text that was returned
        self._fresh = 0  # characters of `_shown` that come from tokens after the context

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._text()
        delta = self._show(_certain(text))
        if delta and not text.endswith(REPLACEMENT):
            self._start_window(self._window[self._context :])
        elif len(self._window) - self._context >= MAX_WINDOW:
            self._start_window(self._window[-CONTEXT:])
        return delta

    def finish(self) -> str:
        rest = self._show(self._text()) if self._window else ""
        self._start_window([])
        return rest

    def _show(self, text: str) -> str:
        """The part of the window's text that was not returned yet."""
        delta = text[len(self._shown) :]
        if delta:
            self._shown = text
            self._fresh += len(delta)
        return delta

    def _text(self) -> str:
        """Decode the window. The result begins with `_shown`."""
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # A new token changed the text of earlier ones (their bytes were not UTF-8). Returned text stays.
            self._window = self._window[self._context :]
            self._context = 0
            text = self._decode(self._window)
            self._shown = text[: self._fresh]
        return text

    def _start_window(self, context: list[int]) -> None:
        """Begin a new window, after all certain text was returned, with `context` as its first tokens."""
        self._window, self._context, self._fresh = context, len(context), 0
        self._shown = _certain(self._decode(context)) if context else ""


def _certain(text: str) -> str:
    """The text without trailing replacement characters that the next token may complete."""
    uncertain = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(MAX_PARTIAL, uncertain)]
