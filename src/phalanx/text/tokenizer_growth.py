"""Refuses a tokenizer whose rules expand a short text into a very long one.

The library `tokenizers` runs these rules in the server. Forty that each double a character, or one that replaces a
letter by a megabyte, use up all memory on one word of a client, or on the text that every start encodes. The rules of
SentencePiece's models are checked after transformers has translated them (`check_rules`).
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from phalanx.errors import ModelUnsupported
from phalanx.text.library_errors import library_errors
from phalanx.text.model_files import MAX_TOKENIZER, REPLACE, read_file
from phalanx.text.vocabulary import SAMPLE

MAX_TEXT = 256  # characters that a rule inserts; known rules have 3
MAX_GROWN = 1 << 16  # characters after all rules, of all these texts and SAMPLE; known rules expand none tenfold
MAX_SPECIAL = 256  # special tokens around every text; known are 4
EMPTY: Mapping[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}  # fmt: skip

Apply = Callable[[Any, str], str]
"""(a tokenizer with one rule, a text) -> the text after the rule."""
TO_TOKENS: Mapping[str, Apply] = {
    "normalizer": lambda tokenizer, text: str(tokenizer.normalizer.normalize_str(text)),
    "pre_tokenizer": lambda tokenizer, text: "".join(
        piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ),
}
TO_TEXT: Mapping[str, Apply] = {"decoder": lambda tokenizer, text: str(tokenizer.decoder.decode([text]))}
SEQUENCES = frozenset({"normalizers", "pretokenizers", "decoders"})
"""Keys of a rule that consists of others."""
TYPES = frozenset({"Replace", "Prepend", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "Strip"})
"""Rules with texts that they look for, or put into a text."""


class TokenizerRules(msgspec.Struct, frozen=True):
    """The rules of a tokenizer, as in tokenizer.json; each may be a sequence of others."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None


def check_growth(file: Path) -> None:
    """Check the rules of a tokenizer.json, if there is one that can be read.

    Every text that a rule inserts passes through all rules, so that growth in steps is found, whatever character begins
    it.

    Raises:
        ModelUnsupported: names the file and its part.
    """
    try:
        rules = msgspec.json.decode(read_file(file, MAX_TOKENIZER), type=TokenizerRules)
    except (FileNotFoundError, ValueError, RecursionError):
        return  # the library reports what is wrong with it
    check_rules(file, rules)


def rules_of(tokenizer: Tokenizer) -> TokenizerRules:
    """The rules of a tokenizer that is loaded."""
    parts = {name: getattr(tokenizer, name) for name in TokenizerRules.__struct_fields__}
    return TokenizerRules(**{name: json.loads(rule.__getstate__()) for name, rule in parts.items() if rule is not None})


def check_rules(file: Path, rules: TokenizerRules) -> None:
    """As `check_growth`, for the rules of a file or directory."""
    with library_errors(lambda reason: _refused(file, "", f"cannot be loaded: {reason}")):
        for parts in (TO_TOKENS, TO_TEXT):
            steps = [(part, rule) for part in parts for rule in _steps(getattr(rules, part))]
            texts = [text for _, rule in steps for text in _texts(rule)]
            if longest := next((text for text in texts if len(text) > MAX_TEXT), ""):
                raise _refused(file, "a rule", f"puts {len(longest)} characters into a text; {MAX_TEXT} is the most")
            _grow(file, parts, steps, "".join([SAMPLE, *dict.fromkeys(texts)])[:MAX_GROWN])
        if rules.post_processor is not None:
            n_special = _with_rule("post_processor", rules.post_processor).num_special_tokens_to_add(False)
            if n_special > MAX_SPECIAL:
                raise _refused(file, "post_processor", f"adds {n_special} tokens to a text; {MAX_SPECIAL} is the most")


def _grow(file: Path, parts: Mapping[str, Apply], steps: list[tuple[str, Any]], text: str) -> None:
    for part, rule in steps:
        try:
            text = parts[part](_with_rule(part, rule), text)
        except ValueError:
            return  # as in `check_growth`: the library reports it
        if len(text) > MAX_GROWN:
            raise _refused(file, part, "expands a short text into a very long one")


def _with_rule(part: str, rule: Any) -> Any:
    return Tokenizer.from_str(json.dumps({**EMPTY, part: rule}))


def _steps(rule: Any) -> Iterator[Any]:
    """The single rules of a rule, which may be a sequence of others."""
    nested = [value for name, value in rule.items() if name in SEQUENCES] if isinstance(rule, dict) else []
    if nested and isinstance(nested[0], list):
        for part in nested[0]:
            yield from _steps(part)
    elif rule is not None:
        yield rule


def _texts(rule: Any) -> Iterator[str]:
    """The texts of a rule."""
    kind = rule.get("type") if isinstance(rule, dict) else None
    values = rule.values() if kind in TYPES else ()
    for value in values:
        text = value.get("String") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text
    if kind == "Precompiled":
        # Of SentencePiece: the size of a trie of characters, the trie, and the texts that take their places.
        data = binascii.a2b_base64(str(rule.get("precompiled_charsmap")))
        yield from (
            text.decode(errors="replace") for text in data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        )


def _refused(file: Path, part: str, what: str) -> ModelUnsupported:
    return ModelUnsupported(f"{file}{part and f': {part}'} {what}.", remedy=REPLACE)
