"""Plans for models that are not downloaded: their headers are fetched by range, and what is wrong is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stub_hub import StubHub, stub_hub, variables_of

from phalanx.demo import MODEL_DIR
from phalanx.errors import ExitCode

NAME = "some/demo"
TOKEN = "hf_secret"


@pytest.fixture
def hub() -> Iterator[StubHub]:
    files = {file.name: file.read_bytes() for file in MODEL_DIR.iterdir() if file.is_file()}
    with stub_hub({NAME: files, "some/gguf": {"a.gguf": b"GGUF"}}) as made:
        yield made


def plan(hub: StubHub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "plan", *words, "--memory-only", "--memory-guard-gb", "0.5"]
    variables = {**variables_of(hub, home), "HF_TOKEN": TOKEN}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)


def weights_of(done: subprocess.CompletedProcess[str]) -> list[int]:
    plans = json.loads(done.stdout)["plans"]
    return [sum(rank["weights"] for rank in one["fit"]["ranks"]) for one in plans]


def test_a_model_that_is_not_downloaded_is_planned_by_its_headers(hub: StubHub, tmp_path: Path):
    known = plan(hub, tmp_path, "demo", "--json")
    assert hub.asked == []
    done = plan(hub, tmp_path, NAME, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert weights_of(done) == weights_of(known)
    (asked,) = hub.ranges()
    assert asked == f"bytes=0-{(1 << 17) - 1}" and len(hub.repositories[NAME]["model.safetensors"]) > 4 * (1 << 17)
    assert not any(path.endswith("tokenizer.json") for _, path, _ in hub.asked) and not hub.leaked
    files = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert sum(file.stat().st_blocks * 512 for file in files) < 1 << 20
    again = plan(hub, tmp_path, NAME, "--json")
    assert weights_of(again) == weights_of(known) and len(hub.ranges()) == 1


def test_headers_outlive_the_download_that_they_were_linked_to(hub: StubHub, tmp_path: Path):
    """`pull`, stopped, leaves small files in the hub's cache; `rm` deletes them."""
    hub.repositories[NAME]["original/model.safetensors.index.json"] = b"{}"
    first = plan(hub, tmp_path, NAME, "--json")
    (config,) = (tmp_path / "cache" / "phalanx" / "headers").rglob("config.json")
    config.unlink()
    config.symlink_to(tmp_path / "deleted")
    again = plan(hub, tmp_path, NAME, "--json")
    assert again.returncode == ExitCode.OK, again.stderr
    assert weights_of(again) == weights_of(first)


def test_a_longer_header_is_asked_for_once_more(hub: StubHub, tmp_path: Path):
    data = hub.repositories[NAME]["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    padded = data[8 : 8 + length] + b" " * (1 << 18)
    hub.repositories[NAME]["model.safetensors"] = len(padded).to_bytes(8, "little") + padded + data[8 + length :]
    done = plan(hub, tmp_path, NAME, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert hub.ranges() == [f"bytes=0-{(1 << 17) - 1}", f"bytes=0-{len(padded) + 7}"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("some/gguf", "some/gguf has no safetensors"),
        ("some/other", "the hub has no such repository"),
    ],
)
def test_what_has_no_headers_is_one_line(hub: StubHub, tmp_path: Path, name: str, said: str):
    done = plan(hub, tmp_path, name)
    assert done.returncode != ExitCode.OK and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == done.stderr.splitlines()[:1]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"x" * (1 << 18), "does not begin with a header of safetensors"),
        ((1 << 40).to_bytes(8, "little") + b"{}" * (1 << 17), "does not begin with a header of safetensors"),
        (b"", "could not be fetched from the hub"),
    ],
)
def test_a_hub_that_sends_something_else_is_one_line(hub: StubHub, tmp_path: Path, sent: bytes, said: str):
    hub.sends["model.safetensors"] = sent
    done = plan(hub, tmp_path, NAME)
    assert done.returncode != ExitCode.OK and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr, done.stderr
    assert list((tmp_path / "cache" / "phalanx" / "headers").iterdir()) == []


def test_a_hub_that_is_away_is_one_line(hub: StubHub, tmp_path: Path):
    away = StubHub({}, url="http://127.0.0.1:9")
    done = plan(away, tmp_path, NAME)
    assert done.returncode != ExitCode.OK
    assert "the hub cannot be reached" in done.stderr and "Traceback" not in done.stderr
