"""Rules of a tokenizer.json that make a long text of a short one are refused before the library runs them on a text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.serving import EOS, make_tokenizer

from phalanx.errors import ModelUnsupported
from phalanx.text.tokenizer import Tokenizer
from phalanx.text.tokenizer_growth import check_growth

Rule = dict[str, Any]
BYTES: Rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def sequence(kind: str, *rules: Rule) -> Rule:
    return {kind: {"type": "Sequence", {"pre_tokenizer": "pretokenizers"}.get(kind, f"{kind}s"): list(rules)}}


def replace(pattern: str, content: str, kind: str = "String") -> Rule:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def special(n: int, ids: int) -> Rule:
    eos = {"SpecialToken": {"id": EOS, "type_id": 0}}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    token = {"id": EOS, "ids": [0] * ids, "tokens": [EOS] * ids}
    return {
        "post_processor": {
            "type": "TemplateProcessing", "single": [*[eos] * n, pair[0]], "pair": pair, "special_tokens": {EOS: token},
        }
    }  # fmt: skip


def charsmap(text: str) -> Rule:
    """Rules of SentencePiece, with an empty trie, and this text for some character."""
    data = (0).to_bytes(4, "little") + b"a\0" + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def write(folder: Path, rules: Rule) -> Path:
    make_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **rules}))
    return file


BOMBS: dict[str, tuple[Rule, str]] = {
    "a megabyte for a letter": (sequence("normalizer", replace("\u2603", "x" * 10**6)), "puts 1000000 characters"),
    "a megabyte before a text": (
        sequence("normalizer", {"type": "Prepend", "prepend": "x" * 10**6}), "puts 1000000 characters"
    ),
    "doubled forty times": (
        sequence("normalizer", *[replace("\u2603", "\u2603\u2603")] * 40), "normalizer expands a short text"
    ),
    "one after another": (
        sequence("normalizer", replace("a", "b" * 99), replace("b", "cd" * 99), replace(".", "x" * 99, "Regex")),
        "normalizer expands a short text",
    ),
    "sequences in sequences": (
        sequence("normalizer", *[sequence("normalizer", replace("e", "ee"))["normalizer"]] * 40), "normalizer expands"
    ),
    "bytes of bytes": (sequence("normalizer", *[{"type": "ByteLevel"}] * 40), "normalizer expands a short text"),
    "bytes of bytes in words": (sequence("pre_tokenizer", *[BYTES] * 40), "pre_tokenizer expands a short text"),
    "decoded": (sequence("decoder", *[replace("\u2603", "\u2603\u2603")] * 40), "decoder expands a short text"),
    "decoded at once": (sequence("decoder", replace("\u2603", "x" * 10**6)), "puts 1000000 characters"),
    "of SentencePiece": ({"normalizer": charsmap("x" * 1000)}, "puts 1000 characters"),
    "many special tokens": (special(10**4, 1), "post_processor adds 10000 tokens"),
    "a special token of many": (special(1, 10**5), "post_processor adds 100000 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "match"), BOMBS.values(), ids=BOMBS)
def test_rules_that_make_much_of_little_are_refused(rules: Rule, match: str, tmp_path: Path) -> None:
    file = write(tmp_path, rules)
    with pytest.raises(ModelUnsupported, match=f"{file}: .*{match}") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.remedy


FINE: dict[str, Rule] = {
    "Llama 2": {
        **sequence("normalizer", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
        **sequence("decoder", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}),
    },
    "T5": sequence("normalizer", {"type": "NFKC"}, replace(" {2,}", "\u2581", "Regex"), replace("``", '"')),
    "many ligatures": sequence("normalizer", *[replace(chr(0xFC00 + i), "\u0644\u0645" * 4) for i in range(60)]),
    "many classes": sequence("normalizer", *[replace(f"[{chr(0x600 + i)}]+", "ab", "Regex") for i in range(60)]),
    "special tokens": special(2, 1),
    "no rules": {"normalizer": None, "pre_tokenizer": None, "decoder": None, "post_processor": None},
}  # fmt: skip


@pytest.mark.parametrize("rules", FINE.values(), ids=FINE)
def test_rules_of_models_are_let_pass(rules: Rule, tmp_path: Path) -> None:
    check_growth(write(tmp_path, rules))


@pytest.mark.parametrize("text", ["", "[", "[]", "[" * 100_000, '{"normalizer": {"type": "None"}}', '{"decoder": 3}'])
def test_what_cannot_be_read_is_left_to_the_library(text: str, tmp_path: Path) -> None:
    """Or refused: as long as it is one error."""
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelUnsupported):
        Tokenizer.load(tmp_path)
