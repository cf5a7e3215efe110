"""GGUF models in several files: imported by any of them, and each fault in one line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import gguf, tiny_metadata, tiny_tensors, write_parts, write_tiny

from phalanx.catalog.imports import imports_folder
from phalanx.catalog.local_models import directory_of, find
from phalanx.errors import ModelNotFound, WeightsError
from phalanx.model.gguf import import_once
from phalanx.model.gguf.gguf_import import convert
from phalanx.model.gguf.import_once import import_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_of_the_files_means_the_model(number: int, home: Path, monkeypatch: pytest.MonkeyPatch):
    files = write_parts(home, "big", 3)
    made = import_gguf(files[number])
    write_tiny(home / "whole.gguf")
    convert(home / "whole.gguf", home / "whole")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (home / "whole" / name).read_bytes()
    assert made.name.startswith("big-") and "00003" not in made.name
    monkeypatch.setattr(import_once, "_sha256", lambda *_: pytest.fail("read a file again"))
    for file in files:
        assert import_gguf(file) == directory_of(str(file)) == made and find(str(file)).name == made.name
    os.utime(files[2])  # as any change does
    assert directory_of(str(files[0])) is None


def test_parts_of_other_content_are_another_model(home: Path):
    (home / "a").mkdir()
    (home / "b").mkdir()
    assert import_gguf(write_parts(home / "a", "m", 2)[0]) != import_gguf(write_parts(home / "b", "m", 2, seed=1)[0])


def remove(number: int) -> Callable[[list[Path]], None]:
    return lambda files: files[number].unlink()


def copy(number: int, over: int) -> Callable[[list[Path]], None]:
    return lambda files: files[over].write_bytes(files[number].read_bytes())


def cut(number: int) -> Callable[[list[Path]], None]:
    return lambda files: os.truncate(files[number], files[number].stat().st_size - 4096)


def renamed(files: list[Path]) -> None:
    files[0] = files[0].rename(files[0].with_name("mine.gguf"))


def of_two(files: list[Path]) -> None:
    """The third is of another model."""
    others = write_parts(files[0].parent, "other", 2)
    files[2].write_bytes(others[1].read_bytes())


FAULTS: dict[str, tuple[dict[int, dict[str, Any]], Callable[[list[Path]], None], str]] = {
    "second missing": ({}, remove(1), r"big-00002-of-00003\.gguf is missing: the model has 3 files\. Put all"),
    "first missing": ({}, remove(0), r"big-00001-of-00003\.gguf is missing"),
    "one twice": ({}, copy(1, 2), r"big-00003-of-00003\.gguf is not file 3 of these: split.no is 1, not 2"),
    "wrong count": ({1: {"split.count": 4}}, lambda _: None, r"00002-of-00003\.gguf is not file 2 .*count is 4, not 3"),
    "of a model in two": ({}, of_two, r"00003-of-00003\.gguf is not file 3 of these: split.count is 2, not 3"),
    "other number of tensors": ({2: {"split.tensors.count": 19}}, lambda _: None, "split.tensors.count is 19, not 20"),
    "no keys": ({1: {"split.count": None}}, lambda _: None, "split.count is missing, not 3"),
    "keys of other types": ({1: {"split.no": "x"}}, lambda _: None, "is damaged: split.no is 'x'"),
    "cut": ({}, cut(1), r"00002-of-00003\.gguf is damaged: tensor .* ends at"),
    "not named": ({}, renamed, r"mine\.gguf is one of 3 files .* Name it NAME-00001-of-00003\.gguf"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_several_files_is_one_line(fault: str, home: Path):
    wrong, change, match = FAULTS[fault]
    files = write_parts(home, "big", 3, wrong=wrong)
    change(files)
    with pytest.raises(ModelNotFound if "missing:" in match or fault == "first missing" else WeightsError) as raised:
        import_gguf(files[0] if files[0].exists() else files[1])
    raised.match(match)
    assert "\n" not in str(raised.value) and raised.value.remedy
    assert not imports_folder().exists() or [one.name for one in imports_folder().iterdir()] == [".locks"]


def test_a_tensor_in_two_of_the_files(home: Path):
    tensors = list(tiny_tensors("llama", "Q8_0", np.random.default_rng(0)).items())
    for part, share in enumerate((tensors[:10], [tensors[3], *tensors[11:]])):
        metadata = {**tiny_metadata("llama"), "split.no": part, "split.count": 2, "split.tensors.count": len(tensors)}
        (home / f"m-{part + 1:05}-of-00002.gguf").write_bytes(gguf(metadata, dict(share)))
    with pytest.raises(WeightsError, match=r"m-00001-of-00002\.gguf and m-00002-of-00002\.gguf both have tensor"):
        import_gguf(home / "m-00002-of-00002.gguf")
