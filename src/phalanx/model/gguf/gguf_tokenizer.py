"""Writes tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from phalanx.model.gguf.gguf_header import shown
from phalanx.model.gguf.gguf_metadata import Metadata
from phalanx.model.gguf.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer

Prefix = Literal["always", "first", "never"]  # behind each special token too, at the start of a text only, or nowhere
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens: <unk>, those such as <|im_end|>, those that a text may have
BLANK = "▁"  # a space in the vocabularies of SentencePiece
MAX_LETTERS = 512  # of a token that is merged from others
MAX_MERGES = 1 << 21  # some 400 MB; Gemma, with the largest known vocabulary, has 600,000
SENTENCEPIECE = ("gemma4", "sarvam-moe")
"""Pre-tokenizers of merges whose tokens are text as in SentencePiece: BLANK for spaces, <0xE2> for bytes."""
TURN_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
))  # fmt: skip
"""Tokens that end an answer whatever the metadata say of them: many files name one end only (llama-vocab.cpp)."""
TURN_ENDS_OF_CONTROL = frozenset(("</s>", "<eos>"))
"""The same, if the file has them as control tokens: to Gemma, </s> is a piece of HTML."""
GOES_ON = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""The token that ends a message but not the answer if the vocabulary has one of these pairs (gpt-oss, Solar)."""
KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3, whose other special tokens swallow the blanks behind them


def write_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Write both files.

    Raises:
        ModelUnsupported: the tokenizer is of a kind that is not taken over; names it.
        WeightsError: its parts do not belong together.
    """
    names = token_names(metadata)
    tokenizer, has_bos = _tokenizer(metadata, names)
    for special, tokens in _added(metadata, names):
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)
    if (frame := _frame(metadata, names, has_bos)) is not None:
        tokenizer.post_processor = frame
    described = json.dumps(_described(metadata, names), indent=1)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "tokenizer_config.json").write_text(described)


def token_names(metadata: Metadata) -> list[str]:
    """The texts of all tokens, by id; those without one get one as in llama.cpp.

    Raises:
        WeightsError: they are not texts, or one is there twice.
    """
    names = [name or f"[EMPTY_{i}]" for i, name in enumerate(metadata.strings("tokenizer.ggml.tokens"))]
    if len(set(names)) != len(names):
        raise metadata.damaged("tokenizer.ggml.tokens has a token twice")
    return names


def end_ids(metadata: Metadata) -> list[int]:
    """The ids that end an answer; the first is the metadata's own.

    Raises:
        WeightsError: there is none, or one is not in the vocabulary.
    """
    names = token_names(metadata)
    known = set(names)
    roles = (role for role in ("eos", "eot", "eom") if _has(metadata, f"{role}_token_id"))
    ends = [_token(metadata, role, names) for role in roles]
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(names))
    by_name = [i for i, name in enumerate(names) if name in TURN_ENDS]
    by_name += [i for i, name in enumerate(names) if name in TURN_ENDS_OF_CONTROL and kinds[i] == CONTROL]
    message_end, pairs = GOES_ON
    if any(pair <= known for pair in pairs):
        by_name = [i for i in by_name if names[i] != message_end]
    found = list(dict.fromkeys([*ends, *by_name]))
    if not found:
        raise metadata.damaged("tokenizer.ggml.eos_token_id is missing")
    return found


# -- models --------------------------------------------------------------------------------------------------------


def _tokenizer(metadata: Metadata, names: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer without special tokens, and whether it puts a BOS token before a text."""
    kind = metadata.get("tokenizer.ggml.model", str)
    pre = kind if kind == "gemma4" else metadata.get("tokenizer.ggml.pre", str, "default")
    stated = metadata.get("tokenizer.ggml.add_bos_token", bool) if _has(metadata, "add_bos_token") else None
    if kind == "llama":
        merges = _scored_merges(metadata, names)
        return _sentencepiece(metadata, names, merges, _prefix(metadata, names)), stated is not False
    if kind not in ("gpt2", "gemma4"):
        raise metadata.refused(
            f"its tokenizer is of the kind {shown(kind)}, taken are gpt2 (byte-level BPE), llama (SentencePiece)"
            " and gemma4"
        )
    if pre in SENTENCEPIECE:
        tokenizer = _sentencepiece(metadata, names, _merges(metadata, names), "never")
        return tokenizer, pre == "gemma4" or stated is True  # early files of Gemma 4 say false
    if pre not in PRE_TOKENIZERS:
        known = ", ".join((*PRE_TOKENIZERS, *SENTENCEPIECE))
        raise metadata.refused(f"its pre-tokenizer {shown(pre)} is not known, those are {known}")
    rule = PRE_TOKENIZERS[pre]
    return _byte_level(metadata, names, rule), rule.add_bos if stated is None else stated


def _byte_level(metadata: Metadata, names: list[str], rule: PreTokenizer) -> Tokenizer:
    model = models.BPE(vocab=_vocab(names), merges=_merges(metadata, names), ignore_merges=rule.whole_words)
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rule.cuts]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _prefix(metadata: Metadata, names: list[str]) -> Prefix:
    """Where a blank is put before words. Mistral's templates have their own one behind [INST]."""
    if not metadata.get("tokenizer.ggml.add_space_prefix", bool, True):
        return "never"
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(names))
    return "first" if "[INST]" in names and kinds[names.index("[INST]")] == CONTROL else "always"


def _sentencepiece(metadata: Metadata, names: list[str], merges: list[tuple[str, str]], prefix: Prefix) -> Tokenizer:
    known = set(names)
    if missing := next((f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in known), None):
        raise metadata.refused(f"its tokenizer lacks {missing}, so that it cannot write all texts")
    tokenizer = Tokenizer(models.BPE(vocab=_vocab(names), merges=merges, byte_fallback=True))
    spaces = normalizers.Replace(" ", BLANK)
    match prefix:
        case "always":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), spaces])
        case "first":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "first", split=False)
        case "never":
            tokenizer.normalizer = spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix != "never" else []
    texts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*texts, *strip])
    return tokenizer


def _vocab(names: list[str]) -> dict[str, int]:
    return {name: token for token, name in enumerate(names)}


def _merges(metadata: Metadata, names: list[str]) -> list[tuple[str, str]]:
    known = set(names)
    merges = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise metadata.damaged(f"merge {shown(merge)} is not one of two tokens")
        merges.append((left, right))
    return merges


def _scored_merges(metadata: Metadata, names: list[str]) -> list[tuple[str, str]]:
    """All ways to make a token of two, best score first: SentencePiece joins the neighbours of the best.

    Of equal scores the lower id is first: files that were made without scores keep the order of the merges.
    """
    scores = metadata.numbers("tokenizer.ggml.scores", len(names))
    if not all(map(math.isfinite, scores)):
        raise metadata.damaged("tokenizer.ggml.scores has a number that is not finite")
    if longest := next((name for name in names if len(name) > MAX_LETTERS), None):
        raise metadata.damaged(f"the token {shown(longest)} has {len(longest)} letters")
    known = set(names)
    order = sorted(range(len(names)), key=scores.__getitem__, reverse=True)
    pairs = (
        (left, right)
        for name in map(names.__getitem__, order)
        for at in range(len(name) - 1, 0, -1)
        if (left := name[:at]) in known and (right := name[at:]) in known
    )
    merges = list(itertools.islice(pairs, MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise metadata.damaged(f"its tokens can be made of two others in more than {MAX_MERGES} ways")
    return merges


# -- tokens of their own -------------------------------------------------------------------------------------------


def _added(metadata: Metadata, names: list[str]) -> Iterator[tuple[bool, list[AddedToken]]]:
    """Tokens that a text is searched for before it is cut: first the special ones, then those that are text."""
    kinds = metadata.numbers("tokenizer.ggml.token_type", len(names))
    special = {name for name, kind in zip(names, kinds, strict=True) if kind in (UNKNOWN, CONTROL) or name in TURN_ENDS}
    defined = {name for name, kind in zip(names, kinds, strict=True) if kind == USER_DEFINED} - special
    model = f"{metadata.architecture} {metadata.get('general.name', str, '')}".lower()
    is_phi3 = metadata.raw("tokenizer.ggml.model") == "llama" and ("phi3" in model or "phi-3" in model)
    for found, is_special in ((special, True), (defined, False)):
        yield (
            is_special,
            [
                AddedToken(name, special=is_special, normalized=False, rstrip=is_phi3 and name not in KEEPS_BLANKS)
                for name in names
                if name in found
            ],
        )


def _has(metadata: Metadata, key: str) -> bool:
    return metadata.raw(f"tokenizer.ggml.{key}") is not None


def _token(metadata: Metadata, role: str, names: list[str]) -> int:
    found: int = metadata.get(f"tokenizer.ggml.{role}_token_id", int)
    if not 0 <= found < len(names):
        raise metadata.damaged(f"the {role} token is {found} of {len(names)}")
    return found


def _frame(metadata: Metadata, names: list[str], before: bool) -> processors.TemplateProcessing | None:
    """The post-processor that adds tokens before and after a text; None without any."""
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
    described["eos_token"] = names[end_ids(metadata)[0]]
    if _has(metadata, "bos_token_id"):
        described["bos_token"] = names[_token(metadata, "bos", names)]
    described["model_max_length"] = metadata.count("*.context_length")
    described["clean_up_tokenization_spaces"] = False
    if templates := _templates(metadata):
        described["chat_template"] = templates
    return described


def _templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """The chat template, or a list of named ones."""
    key = "tokenizer.chat_template"
    default = metadata.get(key, str) if metadata.raw(key) is not None else None
    names = metadata.strings("tokenizer.chat_templates") if metadata.raw("tokenizer.chat_templates") is not None else []
    named = [
        {"name": name, "template": template}
        for name in dict.fromkeys(names)
        if type(template := metadata.raw(f"{key}.{name}")) is str
    ]
    if not named:
        return default
    return named if default is None else [{"name": "default", "template": default}, *named]
