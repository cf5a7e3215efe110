"""Loads any tokenizer that transformers supports, through mlx-lm, which finds chat template and thinking tokens.

Importing this module costs a second. `Tokenizer.load` uses it for tokenizers that `fast_backend.py` declines: with
their own code, without a tokenizer.json, or of a class that builds its own rules. Does not know HTTP.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm import tokenizer_utils

from phalanx.errors import ModelUnsupported
from phalanx.text.backend import Backend
from phalanx.text.chat_template import FAILURES

TEMPLATE_INPUTS = frozenset({"tools", "documents"})
"""Parameters of `apply_chat_template` that a template reads; the others control the rendering."""


class TransformersBackend(Backend):
    """A tokenizer of transformers: fast or slow, of the library or from a model's repository.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
    """

    failures = FAILURES

    def __init__(self, wrapper: Any) -> None:
        _drop_limits(wrapper)
        self._wrapper = wrapper
        self.hf: Any = wrapper._tokenizer  # the wrapper forwards attributes, but not __len__ or its type
        self.vocab_size = len(self.hf)
        self.bos_id = self.hf.bos_token_id
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.special = frozenset(self.hf.all_special_ids) | {
            token for token, added in self.hf.added_tokens_decoder.items() if added.special
        }
        self.byte_level = _is_byte_level(self.hf)
        self.has_chat_template = bool(wrapper.has_chat_template)
        self.reserved = _steering_parameters(type(self.hf))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if _accepts(self.hf.encode, "add_special_tokens"):
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        return list(self.hf.encode(text))  # a tokenizer with its own `encode` adds no special tokens (B6)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def name_of(self, token: int) -> str | None:
        name: str | None = self.hf.convert_ids_to_tokens(token)
        return name

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        chosen = {} if chat_template is None else {"chat_template": chat_template}
        text: str = self._wrapper.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **chosen,
            **variables,
        )
        return text


def load(path: Path, *, trust_remote_code: bool, chat_template: str | None) -> TransformersBackend:
    """Load the tokenizer of a model's directory.

    Args:
        chat_template: source of a template that replaces the model's own.

    Raises:
        ModelUnsupported: transformers cannot load the tokenizer; says why.
    """
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if chat_template is not None:
        extra["chat_template_type"] = None  # else a renderer of mlx-lm takes precedence over the given template
    try:
        return TransformersBackend(tokenizer_utils.load(path, extra))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ModelUnsupported(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {str(error).strip()}",
            remedy="Copy the model's tokenizer.json there"
            + ("." if trust_remote_code else ", or allow its own code with --trust-remote-code if you trust it."),
        ) from error


def _accepts(function: Any, parameter: str) -> bool:
    """Whether a tokenizer's method takes a keyword argument. A class of a model's repository may misread it (B6)."""
    parameters = inspect.signature(function).parameters
    if parameter in parameters:
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not _is_remote(function)


def _is_remote(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers_modules")


def _steering_parameters(tokenizer_class: type[Any]) -> frozenset[str]:
    """Parameters of `apply_chat_template`, in any class that defines it, that are not template variables."""
    methods = [vars(c)["apply_chat_template"] for c in tokenizer_class.__mro__ if "apply_chat_template" in vars(c)]
    names = {name for method in methods for name in inspect.signature(method).parameters}
    return frozenset(names) - TEMPLATE_INPUTS - {"kwargs", "thinking"}


def _drop_limits(wrapper: Any) -> None:
    """Drop truncation and padding saved in tokenizer.json.

    A prompt must not be cut silently. And a call that changes these settings makes a fast tokenizer fail with "Already
    borrowed" if two threads use it.
    """
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "no_truncation"):
        backend.no_truncation()
        backend.no_padding()


def _is_byte_level(hf: Any) -> bool:
    """Whether a fast tokenizer's decoder takes every token as a fixed byte string, as GPT-2's."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str") or backend.decoder is None:
        return False
    return type(backend.decoder).__name__ == "ByteLevel"
