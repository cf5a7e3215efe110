"""What a tokenizer's library raises, its panics among it, becomes one error of this package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.serving import make_tokenizer

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.tokenizer import Tokenizer

SLOW = "(x+x+)+y"
"""Takes more steps on many x than the library's engine may take, which makes it panic."""


def changed(folder: Path, **parts: object) -> Path:
    """A tokenizer of which parts of its tokenizer.json are others."""
    make_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


def split(expression: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def test_a_text_on_which_the_library_panics_is_refused_and_the_next_one_is_not(tmp_path):
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    rules = {"type": "Sequence", "pretokenizers": [split(SLOW), to_bytes]}
    tokenizer = Tokenizer.load(changed(tmp_path, pre_tokenizer=rules))
    with pytest.raises(InvalidRequest, match="fails on this text"):
        tokenizer.encode("x" * 60)
    assert tokenizer.encode("a")


LONG = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 60}


@pytest.mark.parametrize(("normalizer", "expression"), [(None, "((("), (LONG, SLOW)], ids=["invalid", "panics"])
def test_a_tokenizer_that_fails_at_once_is_refused_as_a_model(normalizer, expression, tmp_path):
    with pytest.raises(ModelUnsupported, match="cannot be loaded"):
        Tokenizer.load(changed(tmp_path, normalizer=normalizer, pre_tokenizer=split(expression)))
