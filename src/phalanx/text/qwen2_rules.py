"""Checks that a tokenizer.json describes exactly what transformers' class for Qwen 2 and 3 builds from its vocabulary.

That class takes vocabulary, merges and added tokens from the file, and has rules and special tokens of its own. If the
file has the same ones, it can be read as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

CLASSES = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})

MODELS = frozenset("qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe".split())
"""Model types for which transformers takes this class if the files name it."""

FORCED = "qwen2"
"""The model type for which it always takes this class."""

DEFAULTS = {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
"""Special tokens of settings that name none."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Model(msgspec.Struct, frozen=True):
    type: str
    vocab: dict[str, int]
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only vocabulary and merges are set."""
        affixes = self.continuing_subword_prefix or self.end_of_word_suffix
        switches = self.fuse_unk or self.byte_fallback or self.ignore_merges
        return self.type == "BPE" and not (self.dropout or self.unk_token or affixes or switches)


class _File(msgspec.Struct, frozen=True):
    model: _Model
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any


def applies(settings: Mapping[str, Any], model_type: str) -> bool:
    """Whether transformers takes this class for such a model.

    Args:
        settings: of tokenizer_config.json.
    """
    return model_type in MODELS and (settings.get("tokenizer_class") in CLASSES or model_type == FORCED)


def are_the_files(text: bytes, added: Sequence[tuple[int, str]], settings: Mapping[str, Any]) -> bool:
    """Whether the class builds the tokenizer that the file describes.

    Args:
        text: of tokenizer.json.
        added: its added tokens, id and content.
        settings: of tokenizer_config.json.
    """
    decoder = settings.get("added_tokens_decoder")
    if decoder is not None and {token.get("content") for token in decoder.values()} != {name for _, name in added}:
        return False
    if settings.get("add_prefix_space"):
        return False
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError:
        return False
    rules = file.normalizer == {"type": "NFC"} and _splits_words(file.pre_tokenizer)
    decodes = isinstance(file.decoder, dict) and file.decoder.get("type") == "ByteLevel"
    return rules and decodes and file.model.is_plain and _numbered_in_order(added, file.model.vocab)


def _splits_words(rule: Any) -> bool:
    if not isinstance(rule, dict) or rule.get("type") != "Sequence":
        return False
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in rule.get("pretokenizers", ())]
    return steps == [split, to_bytes]  # offsets are not ids


def _numbered_in_order(added: Sequence[tuple[int, str]], vocab: Mapping[str, int]) -> bool:
    """Whether added tokens outside the vocabulary have the ids after it, as in the class."""
    behind = len(vocab)
    for token, name in sorted(added):
        if token != vocab.get(name, behind):
            return False
        behind += name not in vocab
    return True
