"""Incremental detokenisation: token by token to text, never half a character, the pieces adding up to the whole.

Two ways, by the tokenizer's kind: where a token is a fixed string of bytes, bytes are decoded as they come; elsewhere
the last few tokens are decoded again with each new one. Knows decoding functions, no tokenizer class.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
LONGEST_PARTIAL = 3  # bytes of a UTF-8 character that is not complete yet


class TextStream(ABC):
    """The text of one sequence. Used by one thread at a time; streams of one tokenizer are independent."""

    @abstractmethod
    def add(self, token: int) -> str:
        """Append a token; the text that is certain now (often empty for a part of a character)."""

    @abstractmethod
    def finish(self) -> str:
        """The rest: what an unfinished character decodes to. The stream is then empty."""


class ByteStream(TextStream):
    """For byte-level vocabularies: a token's bytes do not depend on its neighbours. O(1) per token.

    Args:
        token_bytes: the bytes of a token, empty for one that shows nothing.
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

    The window's first part gives context (a decoder that strips the first space must not strip every space). A text
    that ends in replacement characters waits, as far as an unfinished character can reach.

    Args:
        decode: token ids to text, special tokens shown or not as the caller wants.
        hidden: ids that show nothing and are no context.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._window: list[int] = []
        self._context = 0  # tokens at the window's start whose text has been shown
        self._shown = ""  # what the window's text begins with and needs no showing
        self._fresh = 0  # characters of that which tokens after the context gave

    def add(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._text()
        uncertain = len(text) - len(text.rstrip(REPLACEMENT))
        delta = self._show(text[: len(text) - min(LONGEST_PARTIAL, uncertain)])
        if delta and not uncertain:
            self._start_window(self._window[self._context :])
        return delta

    def finish(self) -> str:
        rest = self._show(self._text()) if self._window else ""
        self._start_window([])
        return rest

    def _show(self, text: str) -> str:
        delta = text[len(self._shown) :]
        if delta:
            self._shown = text
            self._fresh += len(delta)
        return delta

    def _text(self) -> str:
        """The window's text, which begins with what was shown."""
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            # New tokens changed the text of old ones (bytes that turned out not to be UTF-8). What was shown stays.
            self._window = self._window[self._context :]
            self._context = 0
            text = self._decode(self._window)
            self._shown = text[: self._fresh]
        return text

    def _start_window(self, context: list[int]) -> None:
        """Everything is shown: the tokens that gave the latest text become the context."""
        self._window, self._context, self._fresh = context, len(context), 0
        self._shown = self._decode(context) if context else ""
