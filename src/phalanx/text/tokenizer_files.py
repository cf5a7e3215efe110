"""A tokenizer's files: chooses the library that reads them, checks them, and finds the ids that end a sequence.

A library is imported only when a tokenizer is loaded: a rank imports this module and usually loads none.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from phalanx.errors import ModelUnsupported
from phalanx.text.library_errors import library_errors
from phalanx.text.model_files import check_settings, read_json
from phalanx.text.tokenizer_backend import Backend
from phalanx.text.vocabulary import SAMPLE, damage

log = logging.getLogger("phalanx.text")

TOKENIZER_FILES = (
    "tokenizer*",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.*",
    "*.spm",
    "spiece.model",
    "sentencepiece*",
)
MAX_EOS_IDS = 256  # every request carries them; known models have 8 at most


def load(path: Path, *, trust_remote_code: bool, chat_template: str | None) -> Backend:
    """The tokenizer of a directory, by the library that reads it correctly.

    Raises:
        ModelUnsupported: as `Tokenizer.load`.
    """
    check_settings(path)
    if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        if not (path / "config.json").exists():
            raise ModelUnsupported(
                f"{path} has no tokenizer and no config.json.",
                remedy="Name the directory that holds a model: config.json, tokenizer.json and *.safetensors.",
            )
        raise ModelUnsupported(f"{path} has no tokenizer.", remedy="Copy the model's tokenizer.json there.")
    _library("tokenizer_growth").check_growth(path / "tokenizer.json")
    fast = _library("fast_backend")
    backend: Backend | None = fast.read(path, trust_remote_code=trust_remote_code)
    if backend is not None:
        return _checked(path, backend)
    library = _transformers(path)
    try:
        with library_errors(lambda reason: unloadable(path, reason)):
            return _checked(path, library.load(path, trust_remote_code=trust_remote_code, chat_template=chat_template))
    except ModelUnsupported as error:
        # Conversions name classes whose rules are not those of the file, and settings that transformers refuses.
        backend = fast.read_as_it_is(path)
        if backend is None:
            raise
        log.warning("%s is read as it is, whatever the settings say: %s", path / "tokenizer.json", error.message)
        return _checked(path, backend)


def eos_ids(path: Path, backend: Backend) -> frozenset[int]:
    """End-of-sequence ids: the tokenizer's, those of generation_config.json, or else all of config.json.

    If generation_config.json names some, config.json may be out of date: of its ids only special tokens count.

    Raises:
        ModelUnsupported: a file names more than MAX_EOS_IDS.
    """
    stated, configured = _ids_in(path / "generation_config.json"), _ids_in(path / "config.json")
    return backend.eos_ids | stated | (configured & backend.special if stated else configured)


def unloadable(path: Path, reason: str) -> ModelUnsupported:
    """The error for a tokenizer on which its library fails with this message."""
    return ModelUnsupported(
        f"The tokenizer in {path} cannot be loaded: {reason}", remedy="Copy the model's tokenizer.json there."
    )


def _library(module: str) -> Any:
    """Import a module of this package that imports a tokenizer library or jinja2."""
    return importlib.import_module(f"phalanx.text.{module}")


def _transformers(path: Path) -> Any:
    """The module that uses transformers, which `make demo` leaves out: phalanx imports it for such tokenizers only."""
    try:
        return _library("transformers_backend")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModelUnsupported(
            f"The tokenizer in {path} can be read by transformers only, which is not installed.",
            remedy="Run `make venv`, or pip install transformers, in the version of phalanx's extra `engine`.",
        ) from error


def _checked(path: Path, backend: Backend) -> Backend:
    """The backend, if a sample of text comes back from encoding and decoding."""
    text = damage(
        lambda text: backend.encode(text, add_special_tokens=False), backend.decode, complete=backend.byte_level
    )
    if text is not None:
        raise ModelUnsupported(
            f"The tokenizer in {path} is damaged: {SAMPLE!r} is {text!r} once it is encoded and decoded.",
            remedy="Copy tokenizer.json and tokenizer_config.json from the model's origin; "
            "a conversion may have written its pre_tokenizer or decoder wrongly.",
        )
    return backend


def _ids_in(file: Path) -> frozenset[int]:
    """The ids of a file's `eos_token_id`, a number or a list."""
    try:
        config = read_json(file)
    except FileNotFoundError:
        return frozenset()
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, dict) else {}
    found = config.get("eos_token_id", nested.get("eos_token_id"))
    ids = found if isinstance(found, list) else [found]
    if len(ids) > MAX_EOS_IDS:
        raise ModelUnsupported(f"{file}: eos_token_id has {len(ids)} ids.", remedy="Repair the file.")
    return frozenset(token for token in ids if type(token) is int and 0 <= token < 1 << 31)
