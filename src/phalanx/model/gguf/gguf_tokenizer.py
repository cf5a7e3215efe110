"""Writes tokenizer.json and tokenizer_config.json from a GGUF file's metadata: byte-level BPE of known kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phalanx.model.gguf.gguf_header import shown
from phalanx.model.gguf.gguf_metadata import Metadata

CONTROL, USER_DEFINED = 3, 4  # types of tokens such as <|im_end|>, and of those that a text may have
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end_of_text|>")
"""Control tokens that end an answer whatever the metadata say: many files name one end only, as llama.cpp knows."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {
    "smollm": "digits", "gpt-2": "gpt2", "gpt2": "gpt2", "default": "default", "llama-bpe": "llama3",
    "llama3": "llama3", "llama-v3": "llama3", "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
}  # fmt: skip
"""`tokenizer.ggml.pre` -> how a text is cut before its parts are merged."""


def write_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Write both files.

    Raises:
        ModelUnsupported: the tokenizer is of a kind that is not taken over; names it.
        WeightsError: its parts do not belong together.
    """
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise metadata.refused(f"its tokenizer is of the kind {shown(kind)}, taken is gpt2 (byte-level BPE)")
    pre = metadata.get("tokenizer.ggml.pre", str, "default")
    if pre not in RULES:
        raise metadata.refused(f"its pre-tokenizer {shown(pre)} is not known, those are {', '.join(RULES)}")
    rules = RULES[pre]
    names = token_names(metadata)
    tokenizer = Tokenizer(models.BPE(
        vocab={name: token for token, name in enumerate(names)}, merges=_merges(metadata, set(names)),
        ignore_merges=rules == "llama3",
    ))  # fmt: skip
    if rules == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_cuts(rules))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(names))
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        found = [name for name, kind in zip(names, kinds, strict=True) if kind == wanted]
        tokens = [AddedToken(name, special=special, normalized=False) for name in found]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    if (frame := _frame(metadata, names, rules)) is not None:
        tokenizer.post_processor = frame
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_described(metadata, names), indent=1))


def token_names(metadata: Metadata) -> list[str]:
    """The texts of all tokens, by id.

    Raises:
        WeightsError: they are not texts, or one is there twice.
    """
    names = metadata.strings("tokenizer.ggml.tokens")
    if len(set(names)) != len(names):
        raise metadata.damaged("tokenizer.ggml.tokens has a token twice")
    return names


def end_ids(metadata: Metadata) -> list[int]:
    """The ids that end an answer; the first is the metadata's own."""
    names = token_names(metadata)
    others = (role for role in ("eot", "eom") if metadata.raw(f"tokenizer.ggml.{role}_token_id") is not None)
    ends = [_token(metadata, role, names) for role in ("eos", *others)]
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(names))
    ends += [token for token, name in enumerate(names) if name in TURN_ENDS and kinds[token] == CONTROL]
    return list(dict.fromkeys(ends))


def _token(metadata: Metadata, role: str, names: list[str]) -> int:
    found: int = metadata.get(f"tokenizer.ggml.{role}_token_id", int)
    if not 0 <= found < len(names):
        raise metadata.damaged(f"the {role} token is {found} of {len(names)}")
    return found


def _merges(metadata: Metadata, known: set[str]) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise metadata.damaged(f"merge {shown(merge)} is not one of two tokens")
        merges.append((left, right))
    return merges


def _cuts(rules: str) -> list[Any]:
    """The library's pre-tokenizers of a kind of rules."""

    def isolate(*patterns: str) -> list[Any]:
        return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]

    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match rules:
        case "digits":
            return [pre_tokenizers.Digits(individual_digits=True), as_gpt2]
        case "llama3":
            return [*isolate(WORDS.replace("DIGITS", "{1,3}")), as_bytes]
        case "qwen2":
            return [*isolate(WORDS.replace("DIGITS", "")), as_bytes]
        case "default":  # llama.cpp's, also for files that name none
            return [*isolate(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), as_bytes]
    return [as_gpt2]


def _frame(metadata: Metadata, names: list[str], rules: str) -> processors.TemplateProcessing | None:
    """What adds the tokens before and after a text; None if there are none."""
    before = metadata.get("tokenizer.ggml.add_bos_token", bool, rules == "llama3")
    after = metadata.get("tokenizer.ggml.add_eos_token", bool, False)
    added = [(role, _token(metadata, role, names)) for role, wanted in (("bos", before), ("eos", after)) if wanted]
    if not added:
        return None
    single = [*(["bos"] if before else []), "$A", *(["eos"] if after else [])]
    special = [{"id": role, "ids": [token], "tokens": [names[token]]} for role, token in added]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def _described(metadata: Metadata, names: list[str]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    described["eos_token"] = names[_token(metadata, "eos", names)]
    if metadata.raw("tokenizer.ggml.bos_token_id") is not None:
        described["bos_token"] = names[_token(metadata, "bos", names)]
    described["model_max_length"] = metadata.count("*.context_length")
    described["clean_up_tokenization_spaces"] = False
    if metadata.raw("tokenizer.chat_template") is not None:
        described["chat_template"] = metadata.get("tokenizer.chat_template", str)
    return described
