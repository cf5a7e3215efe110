"""Loads any tokenizer that transformers supports, through mlx-lm, which finds chat template and thinking tokens.

Importing this module costs a second. `Tokenizer.load` uses it for tokenizers that `fast_backend.py` declines: with
their own code, without a tokenizer.json, or of a class that builds its own rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from mlx_lm import tokenizer_utils
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from phalanx.errors import ModelUnsupported
from phalanx.text import template_files
from phalanx.text.chat_template import FAILURES
from phalanx.text.fast_backend import decodes_bytes
from phalanx.text.template_process import TemplateRenderer
from phalanx.text.tokenizer_backend import Backend
from phalanx.text.tokenizer_growth import check_rules, rules_of

# Its own handler writes text of a model's files unescaped, line ends and escape sequences included.
transformers_logging.disable_default_handler()
transformers_logging.enable_propagation()

_GENERAL_RENDERING = PreTrainedTokenizerBase.apply_chat_template

LOAD_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError, StrictDataclassError,
)  # fmt: skip
"""Errors of transformers on a directory that it cannot use; the last one is about values in config.json."""
CODE_FAILURES = (AssertionError, NotImplementedError)
"""Exceptions with which rendering code refuses messages, besides those of templates."""
MAX_ERROR = 300  # characters of an error of transformers, whose texts fill a screen

TEMPLATE_INPUTS = frozenset({"tools", "documents"})
"""Parameters of `apply_chat_template` that a template reads; the others control the rendering."""


class TransformersBackend(Backend):
    """A tokenizer of transformers: fast or slow, of the library or from a model's repository.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        chat_templates: name -> source, of the model's files.
    """

    longest_token = None  # unknown with a tokenizer's own code

    def __init__(self, wrapper: Any, chat_templates: Mapping[str, str]) -> None:
        _drop_limits(wrapper)
        self._wrapper = wrapper
        self.hf: Any = wrapper._tokenizer  # the wrapper forwards attributes, but not __len__ or its type
        self.vocab_size = len(self.hf)
        self.bos_id = self.hf.bos_token_id
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.special = frozenset(self.hf.all_special_ids) | {
            token for token, added in self.hf.added_tokens_decoder.items() if added.special
        }
        self.added = {str(added.content): token for token, added in self.hf.added_tokens_decoder.items()}
        self.byte_level = _is_byte_level(self.hf)
        self._chat_templates = chat_templates or _own_templates(self.hf)
        self._library = _plain_decoder(self.hf)
        self.named = {name: token for name, token in self.hf.special_tokens_map.items() if isinstance(token, str)}
        self.chat_template = self._chat_templates.get(template_files.DEFAULT)
        self.reserved = _steering_parameters(type(self.hf))
        self.renderer = TemplateRenderer()
        own = getattr(type(self.hf), "apply_chat_template", None)
        self._renders_itself = wrapper._chat_template is not None or own is not _GENERAL_RENDERING
        self.failures = (*FAILURES, *CODE_FAILURES) if self._renders_itself else FAILURES
        self.has_chat_template = bool(self._chat_templates) or (self._renders_itself and wrapper.has_chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if _accepts(self.hf.encode, "add_special_tokens"):
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        return list(self.hf.encode(text))  # a tokenizer with its own `encode` adds no special tokens

    def decode(self, ids: Sequence[int]) -> str:
        if self._library is not None:
            # transformers calls `decode`, which holds the interpreter's lock.
            return str(self._library.decode_batch([list(ids)], skip_special_tokens=False)[0])
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def name_of(self, token: int) -> str | None:
        name: str | None = self.hf.convert_ids_to_tokens(token)
        return name

    def template_source(self, chat_template: str | None) -> str:
        return template_files.shown(self._chat_templates, chat_template)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        if not self._renders_itself:
            return self.renderer.render(
                template_files.choose(self._chat_templates, chat_template, tools=variables.get("tools") is not None),
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables={**self.hf.special_tokens_map, "enable_thinking": self._wrapper.has_thinking, **variables},
            )
        # Not a template, but code of mlx-lm, of transformers, or of the model's repository, which the user trusts.
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
    chat_templates = template_files.read_templates(path)
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if chat_template is not None:
        extra["chat_template_type"] = None  # else a renderer of mlx-lm takes precedence over the given template
    try:
        wrapper = tokenizer_utils.load(path, extra)
        if isinstance(wrapper._tokenizer, PreTrainedTokenizerFast):
            check_rules(path, rules_of(wrapper._tokenizer.backend_tokenizer))
        return TransformersBackend(wrapper, chat_templates)
    except LOAD_ERRORS as error:
        why = " ".join(str(error).split())[:MAX_ERROR]
        has_code = not trust_remote_code and any(path.glob("*.py"))
        raise ModelUnsupported(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {why}",
            remedy="Copy the model's tokenizer.json there"
            + (", or allow its own code with --trust-remote-code if you trust it." if has_code else "."),
        ) from error


def _accepts(function: Any, parameter: str) -> bool:
    """Whether a tokenizer's method takes a keyword argument. A class of a model's repository may misread it."""
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


def _plain_decoder(hf: Any) -> Any:
    """The library's tokenizer if its `decode` is all that the class's does; else None."""
    own = [vars(c) for c in type(hf).__mro__ if c not in (PreTrainedTokenizerFast, PreTrainedTokenizerBase)]
    overrides = any({"decode", "_decode"} & names.keys() for names in own)
    return hf.backend_tokenizer if isinstance(hf, PreTrainedTokenizerFast) and not overrides else None


def _is_byte_level(hf: Any) -> bool:
    """Whether a fast tokenizer's decoder takes every token as a fixed byte string, as GPT-2's does."""
    backend = getattr(hf, "backend_tokenizer", None)
    return backend is not None and hasattr(backend, "to_str") and decodes_bytes(backend)


def _own_templates(hf: Any) -> dict[str, str]:
    found = getattr(hf, "chat_template", None)
    return {template_files.DEFAULT: found} if isinstance(found, str) and found.strip() else {}
