"""Fixtures of the server's unit tests."""

from __future__ import annotations

import pytest
from support.scripted_model import tokenizer_of
from support.serving import make_tokenizer

from phalanx.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that calls tools in JSON between marks."""
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))
