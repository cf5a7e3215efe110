"""Trains tiny tokenizers of every kind that models use, so that tests need no download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast

from phalanx.text.qwen2_rules import WORDS

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXT = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "  two  spaces\n\nand lines é"] * 5
SAMPLES = [
    "hello world",
    " leading and  double spaces ",
    "emoji 😀👩‍👩‍👧 in the middle",
    "日本語 and ελληνικά",
    "a ,b .c 'll do n't",  # what "clean-up" of spaces would change
    "",
    " ",
    "\n\n",
    "\ufffd is a character, too",
]


def save(fast: Fast, path: Path, **settings: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def byte_level(path: Path, **settings: Any) -> Path:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet,
                                                       special_tokens=SPECIAL, show_progress=False))  # fmt: skip
    fast.add_tokens([AddedToken("<tool> é", special=False)])
    return save(fast, path, **settings)


def sentencepiece(path: Path, *, strip: bool) -> Path:
    """As Llama 2's (`strip`) and Gemma's: ▁ for spaces, byte tokens for characters outside the vocabulary."""
    fast = Fast(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    fast.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False))
    saved = json.loads(fast.to_str())
    saved["added_tokens"] = [t for t in saved["added_tokens"] if not t["content"].startswith("<0x")]
    return save(Fast.from_str(json.dumps(saved)), path)


def wordpiece(path: Path) -> Path:
    fast = Fast(models.WordPiece(unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL,
                                                             show_progress=False))  # fmt: skip
    return save(fast, path, unk_token="<unk>")


def unigram(path: Path) -> Path:
    """As T5's: the decoder only replaces ▁."""
    fast = Fast(models.Unigram())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    fast.train_from_iterator(TEXT, trainers.UnigramTrainer(vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>",
                                                           show_progress=False))  # fmt: skip
    return save(fast, path, unk_token="<unk>")


def qwen(path: Path, **settings: Any) -> Path:
    """As Qwen 3's: rules that transformers' class for it brings, and added tokens behind the vocabulary."""
    fast = Fast(models.BPE())
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}
    tokens = {
        str(token): {field: getattr(added, field) for field in PROPERTIES}
        for token, added in fast.get_added_tokens_decoder().items()
    }
    save(fast, path, **{**names, "added_tokens_decoder": tokens, "errors": "replace", **settings})
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return path


PROPERTIES = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

KINDS = {
    "byte_level": byte_level,
    "llama2": lambda path: sentencepiece(path, strip=True),
    "gemma": lambda path: sentencepiece(path, strip=False),
    "wordpiece": wordpiece,
    "unigram": unigram,
}
BYTE_KINDS = ["byte_level", "llama2", "gemma"]  # every text has tokens
