"""Fixtures of the server's unit tests."""

from __future__ import annotations

import pytest
from support.serving import make_tokenizer

from phalanx.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
