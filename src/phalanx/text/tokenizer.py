"""Text to token ids and back, chat templates, and the names of tokens. Used by the server process; computes nothing.

An adapter around mlx-lm's tokenizer wrapper (which loads any Hugging Face tokenizer and finds its chat template) that
adds what a server needs: exact streams, errors that are the client's, calls from several threads. Does not know HTTP.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import jinja2
from mlx_lm import tokenizer_utils

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.stop_strings import StopMatch, StopStrings
from phalanx.text.text_stream import ByteStream, TextStream, WindowStream

__all__ = ["StopMatch", "StopStrings", "TextStream", "Tokenizer"]

TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""A template is a program from the model's repository that runs on the client's data: these are its ways to fail."""
TOKENIZER_FILES = ("tokenizer*", "*.tiktoken", "tiktoken.model", "vocab.*", "*.spm", "spiece.model", "sentencepiece*")
TEMPLATE_INPUTS = frozenset({"tools", "documents"})
"""Parameters of `apply_chat_template` that go to the template; the others steer it and are not the client's."""


SAMPLE = "Speculation, 1234 times: a_b(c) == 'ünïcode' 東京\n\tend."
"""Text that tokenizers with the same tokens but other rules would cut differently."""


class HfTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer, fast or slow, of the library or from a model's repository."""

    bos_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]
    chat_template: Any

    def __len__(self) -> int: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, ids: Sequence[int], **kwargs: Any) -> str: ...
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...


class Tokenizer:
    """A model's tokenizer. All methods may be called from several threads at once.

    Args:
        wrapper: as mlx-lm loads it.
        eos_ids: ids that end a sequence.
        chat_template: text of a template that replaces the model's own.
    """

    def __init__(self, wrapper: Any, eos_ids: frozenset[int], chat_template: str | None = None) -> None:
        self._wrapper = wrapper
        self._hf: HfTokenizer = wrapper._tokenizer  # the wrapper hands everything else through, but not __len__ or type
        self._chat_template = chat_template
        self._special = frozenset(self._hf.all_special_ids) | {
            token for token, added in self._hf.added_tokens_decoder.items() if added.special
        }
        self._byte_level = _is_byte_level(self._hf)
        self._anchor = self._find_anchor()
        self.vocab_size = len(self._hf)
        self.eos_ids = eos_ids
        self.bos_id = self._hf.bos_token_id
        self.has_chat_template = chat_template is not None or bool(wrapper.has_chat_template)
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load from a model's directory; end-of-sequence ids from its generation_config.json, else config.json.

        Raises:
            ModelUnsupported: no tokenizer there, or one that cannot be loaded.
        """
        if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
            raise ModelUnsupported(f"{path} has no tokenizer.", remedy="Copy the model's tokenizer.json there.")
        extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if chat_template is not None:
            extra["chat_template_type"] = None  # a renderer of mlx-lm's own would win over the template given
        try:
            wrapper = tokenizer_utils.load(path, extra)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
            raise ModelUnsupported(
                f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {str(error).strip()}",
                remedy="Copy the model's tokenizer.json there"
                + ("." if trust_remote_code else ", or allow its own code with --trust-remote-code if you trust it."),
            ) from error
        _unlimit(wrapper)
        return cls(wrapper, _eos_ids(path) | frozenset(wrapper.eos_token_ids), chat_template)

    def differs_from(self, other: Tokenizer) -> str:
        """The first difference in what token ids mean, in words; empty where they mean the same."""
        if self.vocab_size != other.vocab_size:
            return f"it has {other.vocab_size} tokens instead of {self.vocab_size}"
        for token in range(self.vocab_size):
            mine, theirs = self._hf.convert_ids_to_tokens(token), other._hf.convert_ids_to_tokens(token)
            if mine != theirs:
                return f"token {token} is {theirs!r} instead of {mine!r}"
        return "" if self.encode(SAMPLE) == other.encode(SAMPLE) else f"it cuts {SAMPLE!r} differently"

    # -- text to tokens --------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the tokenizer starts a text with (BOS), if anything."""
        if _accepts(self._hf.encode, "add_special_tokens"):
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        return list(self._hf.encode(text))  # tokenizers with an encode of their own add nothing (B6)

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
            add_generation_prompt: whether the assistant's turn is opened.
            continue_final_message: the last message is left open instead, to be continued.
            template_kwargs: the template's variables (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequest: there is no template, it refuses these messages, or a variable is not the client's to set.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template."
            )
        reserved = sorted(set(template_kwargs) & _steering_parameters(type(self._hf)))
        if reserved:
            raise InvalidRequest(f"{reserved[0]!r} is not a template variable.", param="chat_template_kwargs")
        chosen = {} if self._chat_template is None else {"chat_template": self._chat_template}
        try:
            text = self._wrapper.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **chosen,
                **template_kwargs,
            )
        except TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"The chat template refuses these messages: {error or type(error).__name__}", param="messages"
            ) from error
        return self.encode(text, add_special_tokens=False)

    # -- tokens to text --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, unaltered (no "clean-up" of spaces). Ids beyond the vocabulary have no text."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        return self._decode([token for token in ids if token not in hidden])

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new incremental decoder; its pieces add up to `decode`."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        if self._byte_level:
            return ByteStream(lambda token: b"" if token in hidden else self.token_bytes(token))
        return WindowStream(self._decode, hidden)

    def token_text(self, token: int) -> str:
        """How one token reads inside a text, leading space included; replacement characters for parts of one."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for inside a text (`token_bytes` caches them)."""
        if not 0 <= token < self.vocab_size:
            return b""
        name = self._hf.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._byte_level:
            return _from_byte_level(name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        # Behind another token, because decoders strip the space of a first one.
        return self._decode([self._anchor, token])[len(self._decode([self._anchor])) :].encode()

    def _decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self.vocab_size]
        return str(self._hf.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_anchor(self) -> int:
        """A token that decodes to a letter or something as plain."""
        ids = [token for token in self.encode("a", add_special_tokens=False) if token not in self._special]
        return ids[-1] if ids else 0


def _accepts(function: Any, parameter: str) -> bool:
    """Whether a tokenizer's method knows a keyword argument; models' own classes may refuse or misread it (B6)."""
    parameters = inspect.signature(function).parameters
    if parameter in parameters:
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not _is_remote(function)


def _is_remote(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers_modules")


@lru_cache(maxsize=8)
def _steering_parameters(tokenizer_class: type[Any]) -> frozenset[str]:
    """Named parameters of `apply_chat_template` that are not template variables, in any class it is defined."""
    methods = [vars(c)["apply_chat_template"] for c in tokenizer_class.__mro__ if "apply_chat_template" in vars(c)]
    names = {name for method in methods for name in inspect.signature(method).parameters}
    return frozenset(names) - TEMPLATE_INPUTS - {"kwargs", "thinking"}


def _unlimit(wrapper: Any) -> None:
    """Drop truncation and padding saved in tokenizer.json.

    Prompts must not be cut silently, and changing these settings during a call is what makes a fast tokenizer fail
    with "Already borrowed" when two threads use it.
    """
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "no_truncation"):
        backend.no_truncation()
        backend.no_padding()


def _eos_ids(path: Path) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's where it names some, else config.json's."""
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


def _is_byte_level(hf: HfTokenizer) -> bool:
    """Whether every token is a fixed string of bytes (GPT-2's kind), by the decoder of a fast tokenizer."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str") or backend.decoder is None:
        return False
    return type(backend.decoder).__name__ == "ByteLevel"


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are themselves, the other bytes are the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_byte_level(name: str) -> bytes:
    """A token's bytes. A name with any other character (an added token) is plain text, as the decoder has it."""
    table = _byte_of_character()
    if all(character in table for character in name):
        return bytes(table[character] for character in name)
    return name.encode()
