"""`phalanx pull`, `list` and `generate` with GGUF files, and imports that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import HIDDEN, tiny_tensors, write_tiny
from support.gguf_texts import five_hundred
from support.gguf_vocabularies import marks, recorded
from support.real_model import real_model
from tokenizers import Tokenizer

LIMIT_S = 240.0


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_CACHE"))}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def phalanx(variables: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed_at(variables: dict[str, str], file: Path, line: int) -> dict[str, Any]:
    """Start a pull, and kill it when it has written so many lines. Returns the last of them."""
    command = [sys.executable, "-m", "phalanx", "pull", "--json", str(file)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(line)]
        process.kill()
    found: dict[str, Any] = json.loads(said[-1])
    return found


def test_a_file_is_pulled_listed_and_served_by_path_and_by_name(tmp_path: Path, variables: dict[str, str]):
    file = tmp_path / "tiny.gguf"
    write_tiny(file, "qwen3", "Q4_K")
    made = Path(phalanx(variables, "pull", str(file)).strip())
    assert made.is_dir() and made.parent == tmp_path / "cache" / "phalanx" / "imported"
    assert made.name in phalanx(variables, "list") and str(made) in phalanx(variables, "show", str(file))
    asked = ["-p", "hello", "--raw", "--max-tokens", "8", "--temperature", "0", "--json", "--memory-guard-gb", "0.2"]
    answers = [
        json.loads(phalanx(variables, "generate", name, *asked, "--kv-cache-gb", "0.1"))
        for name in (str(file), made.name)
    ]
    assert answers[0]["text"] == answers[1]["text"] and answers[0]["usage"]["prompt_tokens"] == 1


def test_an_import_that_is_killed_starts_anew(tmp_path: Path, variables: dict[str, str]):
    """While the file is read, and at the first, a middle and the last rows."""
    file = tmp_path / "large.gguf"
    tensors = tiny_tensors("llama", "F16", np.random.default_rng(0))
    embedding = np.random.default_rng(1).standard_normal((100_000, HIDDEN)).astype("<f2")
    write_tiny(file, tensors={**tensors, "token_embd.weight": ("F16", embedding)})
    chunks = -(-file.stat().st_size // (4 << 20))
    imported = tmp_path / "cache" / "phalanx" / "imported"
    for line in (2, chunks + 1, chunks + 6, chunks + 15):
        status = killed_at(variables, file, line)["status"]
        assert status == ("reading large.gguf" if line == 2 else "importing large.gguf")
        assert not imported.exists() or all(entry.name.startswith(".") for entry in imported.iterdir())
        assert "large" not in phalanx(variables, "list")
    made = Path(phalanx(variables, "pull", str(file)).strip())
    assert sorted(entry.name for entry in imported.iterdir()) == sorted([".lock", made.name])
    weights = (made / "model.safetensors").read_bytes()
    assert embedding.tobytes() in weights


def test_smollm2_has_llama_cpps_tokens_of_every_text():
    tokenizer = Tokenizer.from_file(str(real_model() / "tokenizer.json"))
    assert marks(encoded.ids for encoded in tokenizer.encode_batch(five_hundred())) == recorded("smollm2")
