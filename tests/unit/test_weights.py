"""Reading parts of tensors, and the number by which ranks see that they hold the same model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from phalanx.errors import WeightsError
from phalanx.model import weights
from phalanx.model.weights import Cut, Reader, fingerprint, read_headers

RNG = np.random.default_rng(0)
TENSORS = {
    "vector": RNG.integers(0, 100, (37,), np.uint8),
    "matrix": RNG.integers(0, 1 << 16, (24, 40), np.uint16),
    "experts": RNG.integers(0, 1 << 32, (3, 10, 7), np.uint32),
    "nothing": np.zeros((0, 4), np.float32),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    save_file(TENSORS, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def read(model: Path, name: str, cut: Cut | None) -> np.ndarray:
    info = read_headers(model)[name]
    whole = TENSORS[name]
    out = np.empty(whole.shape if cut is None else cut.shape(whole.shape), whole.dtype)
    with Reader([(info, cut)]) as reader:
        reader.begin(info, cut, out.reshape(-1).view(np.uint8)).wait()
        assert reader.copied == out.nbytes
    return out


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, Cut]:
    name = draw(st.sampled_from(["vector", "matrix", "experts"]))
    axis = draw(st.integers(0, TENSORS[name].ndim - 1))
    rows = TENSORS[name].shape[axis]
    starts = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    return name, Cut(axis, tuple((start, draw(st.integers(start + 1, rows))) for start in starts))


@pytest.mark.parametrize(("chunk", "direct"), [(64, 16), (1 << 20, 1 << 16), (1 << 20, 1)])
@settings(deadline=None)
@given(cuts())
def test_any_rows_along_any_axis(chunk: int, direct: int, model: Path, chosen: tuple[str, Cut]) -> None:
    name, cut = chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "CHUNK", chunk)
        patch.setattr(weights, "DIRECT", direct)
        indices = np.concatenate([np.arange(*run) for run in cut.runs])
        assert np.array_equal(read(model, name, cut), np.take(TENSORS[name], indices, axis=cut.axis))


@pytest.mark.parametrize("name", ["vector", "matrix", "experts"])
def test_whole_tensors(name: str, model: Path) -> None:
    assert np.array_equal(read(model, name, None), TENSORS[name])


def test_a_file_that_shrinks_while_it_is_read_is_named(model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model, tmp_path / "m"))
    info = read_headers(path)["matrix"]
    with (path / "model.safetensors").open("rb+") as file:
        file.truncate(info.start + 10)
    with Reader([]) as reader:
        copying = reader.begin(info, None, np.empty(info.nbytes, np.uint8))
        with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: it ended"):
            copying.wait()
    (path / "model.safetensors").unlink()
    with Reader([]) as reader, pytest.raises(WeightsError, match="cannot be read"):
        reader.begin(info, None, np.empty(info.nbytes, np.uint8))


def test_a_fingerprint_is_of_the_model_and_not_of_its_files(model: Path, tmp_path: Path) -> None:
    number = fingerprint(model)
    assert fingerprint(model) == number
    path = Path(shutil.copytree(model, tmp_path / "split"))
    (path / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, path / f"model-{i}.safetensors")
    assert fingerprint(path) == number


def test_a_directory_without_a_config_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config.json that can be read: No such file"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("change", ["config", "first byte", "last byte", "name", "dtype"])
def test_a_fingerprint_changes_with_the_model(change: str, model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(model, tmp_path / "m"))
    tensors = {name: tensor.copy() for name, tensor in TENSORS.items()}
    match change:
        case "config":
            (path / "config.json").write_text(json.dumps({"a": 1}))
        case "first byte":
            tensors["matrix"][0, 0] ^= 1
        case "last byte":
            tensors["experts"][-1, -1, -1] ^= 1 << 31
        case "name":
            tensors["vectors"] = tensors.pop("vector")
        case _:
            tensors["matrix"] = tensors["matrix"].view(np.int16)
    save_file(tensors, path / "model.safetensors")
    assert fingerprint(path) != fingerprint(model)
