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


def killed_at(variables: dict[str, str], file: Path, line: int) -> list[dict[str, Any]]:
    """Start a pull, and kill it when it has written so many lines, or has ended before. Returns the lines."""
    command = [sys.executable, "-m", "phalanx", "pull", "--json", str(file)]
    said = []
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while len(said) < line and (text := process.stdout.readline()):
            said.append(json.loads(text))
        process.kill()
    return said


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


def test_an_import_that_is_killed_ten_times_goes_on(tmp_path: Path, variables: dict[str, str]):
    """At random lines of its progress; what comes out is what one goes makes."""
    file = tmp_path / "large.gguf"
    rng = np.random.default_rng(0)
    tensors = tiny_tensors("llama", "F16", rng)
    for name in [name for name in tensors if ".ffn_" in name and "norm" not in name]:
        shape = (HIDDEN, 150_000) if "down" in name else (150_000, HIDDEN)
        tensors[name] = ("F16", rng.integers(0, 1 << 14, shape, np.uint16).view("<f2"))
    write_tiny(file, tensors=tensors, llama__feed_forward_length=150_000)
    imported = tmp_path / "cache" / "phalanx" / "imported"
    chunks = -(-file.stat().st_size // (4 << 20))
    lines = np.random.default_rng(5)
    went_on = []
    for kill in range(10):
        most = chunks if kill % 5 == 0 else 2 * chunks  # some while the file is read
        said = killed_at(variables, file, int(lines.integers(2, most)))
        importing = [one for one in said if one["status"] == "importing large.gguf"]
        went_on.append(importing[0]["completed"] > 80_000_000 if importing else False)
        visible = [entry.name for entry in imported.iterdir()] if imported.exists() else []
        assert all(name.startswith(".") for name in visible) or said[-1] == {"status": "success"}
        if any(name.startswith(".part-") for name in visible):
            assert f"not whole: phalanx pull {file}" in phalanx(variables, "list")
    made = Path(phalanx(variables, "pull", str(file)).strip())
    assert any(went_on) and sorted(entry.name for entry in imported.iterdir()) == sorted([".locks", made.name])
    whole = Path(phalanx({**variables, "XDG_CACHE_HOME": str(tmp_path / "other")}, "pull", str(file)).strip())
    names = sorted(entry.name for entry in whole.iterdir())
    assert names == sorted(entry.name for entry in made.iterdir())
    assert all((made / name).read_bytes() == (whole / name).read_bytes() for name in names)


def test_smollm2_has_llama_cpps_tokens_of_every_text():
    tokenizer = Tokenizer.from_file(str(real_model() / "tokenizer.json"))
    assert marks(encoded.ids for encoded in tokenizer.encode_batch(five_hundred())) == recorded("smollm2")
