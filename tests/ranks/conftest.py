"""Models small enough to start a group of them in seconds, with heads for four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from groups import undisturbed
from support.lockstep import Models
from support.models import make_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="session")
def group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny llama."""
    return make_model("llama", tmp_path_factory.mktemp("group") / "llama", **HEADS)


@pytest.fixture(scope="session")
def expected(group_model: Path) -> dict[str, str]:
    """The answers of one rank, by prompt."""
    return undisturbed(group_model)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Random models of many families, and mlx-lm's answers."""
    return Models(tmp_path_factory.mktemp("models"))
