"""Fixtures of the server's unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.scripted_model import tokenizer_of
from support.serving import make_tokenizer

from phalanx.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def _no_other_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers list the models on this disk beside their own: here there are none."""
    with pytest.MonkeyPatch.context() as patch:
        empty = str(tmp_path_factory.mktemp("disk"))
        patch.delenv("HF_HUB_CACHE", raising=False)
        patch.setenv("HF_HOME", empty)
        patch.setenv("XDG_CACHE_HOME", empty)
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that calls tools in JSON between marks."""
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))
