"""The tokenizer of the server process: text to token ids and back, chat templates, the text of single tokens.

Adds to a tokenizer library exact streaming, errors that blame the client's request, and thread safety. The library is
imported when a tokenizer is loaded, because a rank imports this module and usually loads no tokenizer. Does not know
HTTP or the engine.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.backend import Backend
from phalanx.text.stop_strings import StopMatch, StopStrings
from phalanx.text.text_stream import ByteStream, TextStream, WindowStream

__all__ = ["StopMatch", "StopStrings", "TextStream", "Tokenizer"]

TOKENIZER_FILES = ("tokenizer*", "*.tiktoken", "tiktoken.model", "vocab.*", "*.spm", "spiece.model", "sentencepiece*")
SAMPLE = "Speculation, 1234 times: a_b(c) == 'ünïcode' 東京\n\tend."
"""Text that tokenizers with the same vocabulary and different rules split differently."""


class Tokenizer:
    """A model's tokenizer. Threads may call all methods concurrently.

    Args:
        backend: the model's tokenizer, loaded by a library.
        eos_ids: ids that end a sequence.
        chat_template: source of a template that replaces the model's own.
    """

    def __init__(self, backend: Backend, eos_ids: frozenset[int], chat_template: str | None = None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special = backend.special
        self._anchor = self._find_anchor()
        self.vocab_size = backend.vocab_size
        self.eos_ids = eos_ids
        self.bos_id = backend.bos_id
        self.has_chat_template = chat_template is not None or backend.has_chat_template
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model's directory.

        The end-of-sequence ids are the tokenizer's and those of generation_config.json, else config.json.

        Raises:
            ModelUnsupported: the directory has no tokenizer, or no library can load it.
        """
        if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
            raise ModelUnsupported(f"{path} has no tokenizer.", remedy="Copy the model's tokenizer.json there.")
        backend: Backend | None = _library("fast_backend").read(path, trust_remote_code=trust_remote_code)
        if backend is None:
            library = _library("transformers_backend")
            backend = library.load(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        return cls(backend, _eos_ids(path) | backend.eos_ids, chat_template)

    def differs_from(self, other: Tokenizer) -> str:
        """The first difference between two tokenizers, in words; empty if all ids mean the same."""
        if self.vocab_size != other.vocab_size:
            return f"it has {other.vocab_size} tokens instead of {self.vocab_size}"
        for token in range(self.vocab_size):
            mine, theirs = self._backend.name_of(token), other._backend.name_of(token)
            if mine != theirs:
                return f"token {token} is {theirs!r} instead of {mine!r}"
        return "" if self.encode(SAMPLE) == other.encode(SAMPLE) else f"it cuts {SAMPLE!r} differently"

    # -- text to tokens --------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds the tokenizer's BOS token, if it uses one."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation, rendered by the chat template.

        Args:
            messages: OpenAI's message objects, not empty.
            add_generation_prompt: whether the template opens the assistant's turn.
            continue_final_message: leave the last message open instead, so that the model continues it.
            template_kwargs: the template's variables (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequest: the model has no template, the template refuses the messages, or a variable is reserved.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template."
            )
        reserved = sorted(set(template_kwargs) & self._backend.reserved)
        if reserved:
            raise InvalidRequest(f"{reserved[0]!r} is not a template variable.", param="chat_template_kwargs")
        try:
            text = self._backend.render(
                messages,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                variables=template_kwargs,
                chat_template=self._chat_template,
            )
        except self._backend.failures as error:
            raise InvalidRequest(
                f"The chat template refuses these messages: {error or type(error).__name__}", param="messages"
            ) from error
        return self.encode(text, add_special_tokens=False)

    # -- tokens to text --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, without "clean-up" of spaces. Ids beyond the vocabulary have no text."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        return self._decode([token for token in ids if token not in hidden])

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental decoder; its pieces add up to `decode`."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        if self._backend.byte_level:
            return ByteStream(lambda token: b"" if token in hidden else self.token_bytes(token))
        return WindowStream(self._decode, hidden)

    def token_text(self, token: int) -> str:
        """The text of one token inside a text, leading space included; U+FFFD for a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token inside a text; `token_bytes` caches them."""
        if not 0 <= token < self.vocab_size:
            return b""
        name = self._backend.name_of(token)
        if name is None:
            return b""
        if self._backend.byte_level:
            return _from_byte_level(name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        # Decode after another token, because decoders strip the space of the first one.
        return self._decode([self._anchor, token])[len(self._decode([self._anchor])) :].encode()

    def _decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return self._backend.decode(known)

    def _find_anchor(self) -> int:
        """A token that decodes to plain text: the last one of "a"."""
        ids = [token for token in self.encode("a", add_special_tokens=False) if token not in self._special]
        return ids[-1] if ids else 0


def _library(module: str) -> Any:
    """Import a module of this package that imports a tokenizer library or jinja2."""
    return importlib.import_module(f"phalanx.text.{module}")


def _eos_ids(path: Path) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json if it names any, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((path / name).read_text())
        except (OSError, ValueError):
            continue
        nested = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
        found = config.get("eos_token_id", nested.get("eos_token_id"))
        ids = found if isinstance(found, list) else [found]
        if any(isinstance(token, int) for token in ids):
            return frozenset(token for token in ids if isinstance(token, int))
    return frozenset()


# -- byte-level vocabularies ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, U+0100 and up for the other bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_byte_level(name: str) -> bytes:
    """The bytes of a token. A name with other characters is an added token, which the decoder takes as plain text."""
    table = _byte_of_character()
    if all(character in table for character in name):
        return bytes(table[character] for character in name)
    return name.encode()
