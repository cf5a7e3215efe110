"""Long texts: the tokenizer library works without the interpreter's lock, and its longest token is known or unknown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.serving import make_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from phalanx.text.fast_backend import NFC_SHRINKS, FastBackend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def library(folder: Path) -> Library:
    return Library.from_file(str(folder / "tokenizer.json"))


def ticks_during(work: Callable[[], object]) -> int:
    """How often another thread runs while `work` does."""
    working, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while working.is_set():
            ticks += 1
            time.sleep(0)

    working.set()
    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    work()
    during = ticks - before
    working.clear()
    ticker.join()
    return during


def test_the_lock_is_free_while_a_long_text_is_tokenised(folder: Path) -> None:
    """`Tokenizer.encode` and `decode` of the library hold it from beginning to end: 0 or 1 ticks."""
    backend = FastBackend(library(folder), {}, {})
    text = "hello world é " * 20_000
    ids = backend.encode(text, add_special_tokens=False)
    assert ids == library(folder).encode(text).ids
    assert backend.decode(ids) == text
    for work in (lambda: backend.encode(text, add_special_tokens=False), lambda: backend.decode(ids * 10)):
        assert any(ticks_during(work) > 20 for _ in range(100))  # a busy machine may not let the other thread run


def test_the_longest_token_is_known_where_no_text_gets_lost(folder: Path) -> None:
    def longest(change: Callable[[Library], None] = lambda _: None) -> int | None:
        changed = library(folder)
        change(changed)
        return FastBackend(changed, {}, {}).longest_token

    def setting(name: str, value: object) -> Callable[[Library], None]:
        return lambda changed: setattr(changed, name, value)

    plain = longest()
    assert plain == max(map(len, library(folder).get_vocab()))
    assert longest(setting("normalizer", normalizers.NFC())) == NFC_SHRINKS * plain
    assert longest(lambda changed: changed.add_tokens([AddedToken("東" * 20)]) and None) == 60
    assert longest(lambda changed: changed.add_tokens([AddedToken("<mask>", lstrip=True)]) and None) is None
    assert longest(setting("normalizer", normalizers.NFKC())) is None
    removing = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    assert longest(setting("pre_tokenizer", removing)) is None


def test_the_longest_token_is_unknown_where_bytes_have_no_token(folder: Path) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary["unused"] = vocabulary.pop("~")
    backend = FastBackend(Library.from_str(json.dumps(description)), {}, {})
    assert backend.encode("~" * 100, add_special_tokens=False) == []
    assert backend.longest_token is None
