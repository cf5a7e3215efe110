"""A home of its own for each test, and a small GGUF file in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gguf_files import write_tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "Tiny one.gguf")
    return tmp_path / "Tiny one.gguf"
