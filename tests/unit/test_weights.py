"""Reading parts of tensors, and the number by which ranks see that they hold the same model."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.examples import examples

from phalanx.errors import WeightsError
from phalanx.model.loading import reading
from phalanx.model.loading.reading import WeightReader
from phalanx.model.loading.weights import Cut, fingerprint, read_headers

RNG = np.random.default_rng(0)
TENSORS = {
    "vector": RNG.integers(0, 100, (37,), np.uint8),
    "matrix": RNG.integers(0, 1 << 16, (24, 40), np.uint16),
    "experts": RNG.integers(0, 1 << 32, (3, 10, 7), np.uint32),
    "nothing": np.zeros((0, 4), np.float32),
}


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT, and what the cache holds, are Linux's")


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
    with WeightReader() as reader:
        reader.begin(info, cut, out.reshape(-1).view(np.uint8)).wait()
        assert reader.copied == out.nbytes
    return out


def test_a_file_that_has_become_a_pipe_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    info = read_headers(folder)["vector"]
    info.file.unlink()
    os.mkfifo(info.file)
    with WeightReader() as reader, pytest.raises(WeightsError, match=r"model\.safetensors is a pipe"):
        reader.begin(info, None, np.empty(info.nbytes, np.uint8))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, Cut]:
    name = draw(st.sampled_from(["vector", "matrix", "experts"]))
    axis = draw(st.integers(0, TENSORS[name].ndim - 1))
    rows = TENSORS[name].shape[axis]
    starts = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    return name, Cut(axis, tuple((start, draw(st.integers(start + 1, rows))) for start in starts))


@pytest.mark.parametrize(("chunk", "narrow"), [(64, 16), (1 << 20, 1 << 16), (1 << 20, 1)])
@pytest.mark.parametrize("cached", [False, True])
@examples(30, soak=300)
@given(cuts())
def test_any_rows_along_any_axis(cached: bool, chunk: int, narrow: int, model: Path, chosen: tuple[str, Cut]) -> None:
    name, cut = chosen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading._PageCache, "holds", lambda *_: cached)
        patch.setattr(reading, "CHUNK", chunk)
        patch.setattr(reading, "MIN_SPAN", narrow)
        indices = np.concatenate([np.arange(*run) for run in cut.runs])
        assert np.array_equal(read(model, name, cut), np.take(TENSORS[name], indices, axis=cut.axis))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", ["vector", "matrix", "experts"])
def test_whole_tensors(name: str, cached: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading._PageCache, "holds", lambda *_: cached)
    assert np.array_equal(read(model, name, None), TENSORS[name])


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_shrinks_while_it_is_read_is_named(
    cached: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading._PageCache, "holds", lambda *_: cached)
    path = Path(shutil.copytree(model, tmp_path / "m"))
    info = read_headers(path)["matrix"]
    with (path / "model.safetensors").open("rb+") as file:
        file.truncate(info.start + 10)
    with WeightReader() as reader:
        copying = reader.begin(info, None, np.empty(info.nbytes, np.uint8))
        with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: it ended"):
            copying.wait()
    (path / "model.safetensors").unlink()
    with WeightReader() as reader, pytest.raises(WeightsError, match="cannot be read"):
        reader.begin(info, None, np.empty(info.nbytes, np.uint8))


@LINUX
def test_cached_pages_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb+") as file:
        file.write(bytes(1 << 20))
        file.truncate(2 << 20)  # nobody has read or written the second half
        file.flush()
        cache = reading._PageCache(file.fileno(), 2 << 20)
        assert cache.holds(5000, 100_000) and cache.holds(0, 1 << 20)
        assert not cache.holds((1 << 20) - 1, 2) and not cache.holds(1 << 20, 1 << 20)
        cache.close()


@LINUX
def test_a_slow_disk_is_read_through_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past: list[int] = []
    monkeypatch.setattr(reading._PageCache, "holds", lambda *_: False)
    real = reading._WeightFile._read_direct

    def counted(*args: Any) -> Any:
        found = real(*args)
        past.extend([args[1]] if found is not None else [])
        return found

    monkeypatch.setattr(reading._WeightFile, "_read_direct", counted)
    info = read_headers(model)["matrix"]
    with WeightReader() as reader:
        for seconds_per_gb, count in ((1.0, 1), (0.1, 2), (1e3, 2)):
            reader._direct_speed.record(reading.SPEED_AFTER, seconds_per_gb * reading.SPEED_AFTER / 1e9)
            out = np.empty(info.nbytes, np.uint8)
            reader.begin(info, None, out).wait()
            assert bytes(out) == TENSORS["matrix"].tobytes()
            assert len(past) == count


@LINUX
def test_a_file_system_that_refuses_when_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks may be larger than ours: no reason to say that the model is damaged."""
    real, refused = os.preadv, []
    monkeypatch.setattr(reading._PageCache, "holds", lambda *_: False)

    def refuse(file: int, *rest: Any) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, *rest)

    monkeypatch.setattr(reading.os, "preadv", refuse)
    assert np.array_equal(read(model, "matrix", None), TENSORS["matrix"]) and len(refused) == 1


@LINUX
def test_a_file_system_without_reads_past_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(reading.os, "open", refuse)
    assert np.array_equal(read(model, "matrix", None), TENSORS["matrix"])


class Mac:
    """macOS's way past the cache: calls of fcntl, and reads as (descriptor, start, size)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.uncached: list[int] = []
        self.reads: list[tuple[int, int, int]] = []
        self._refuses = refuses
        real = os.preadv

        def preadv(file: int, buffers: Any, start: int) -> int:
            self.reads.append((file, start, len(buffers[0])))
            return real(file, buffers, start)

        monkeypatch.setattr(reading, "sys", SimpleNamespace(platform="darwin"))
        monkeypatch.setattr(reading, "fcntl", SimpleNamespace(F_NOCACHE=48, fcntl=self._fcntl))
        monkeypatch.setattr(reading, "BLOCK", 16384)
        monkeypatch.setattr(reading.os, "preadv", preadv)

    def _fcntl(self, file: int, command: int, value: int) -> int:
        if self._refuses:
            raise OSError(errno.ENOTSUP, "Operation not supported")
        assert (command, value) == (48, 1)
        self.uncached.append(file)
        return 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 20 MiB that starts where no page does."""
    path = tmp_path_factory.mktemp("large")
    save_file({"a": RNG.integers(0, 256, (20 << 20) + 5, np.uint8)}, path / "model.safetensors")
    return path


def read_large(large: Path, *, shared: bool = False) -> None:
    (info,) = read_headers(large).values()
    out = np.empty(info.nbytes, np.uint8)
    with WeightReader(shared=shared) as reader:
        reader.begin(info, None, out).wait()
    assert out.tobytes() == (large / "model.safetensors").read_bytes()[info.start :]


def test_macos_reads_past_the_cache_in_whole_pages_and_large_pieces(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac = Mac(monkeypatch)
    monkeypatch.setattr(reading, "CHUNK", 8 << 20)
    read_large(large)
    (file,) = mac.uncached
    assert len(mac.reads) == 3 and {read[0] for read in mac.reads} == {file}
    assert all(start % 16384 == size % 16384 == 0 for _, start, size in mac.reads)
    assert max(size for _, _, size in mac.reads) >= 8 << 20


def test_macos_keeps_in_its_cache_what_several_ranks_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = Mac(monkeypatch)
    read_large(large, shared=True)
    assert mac.reads and not {read[0] for read in mac.reads} & set(mac.uncached)


def test_macos_reads_through_the_cache_where_it_cannot_be_passed(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And closes what it had opened for that."""
    mac = Mac(monkeypatch, refuses=True)
    before = psutil.Process().num_fds()
    read_large(large)
    assert mac.reads and psutil.Process().num_fds() == before


def test_a_fingerprint_is_of_the_model_and_not_of_its_files(model: Path, tmp_path: Path) -> None:
    number = fingerprint(model)
    assert fingerprint(model) == number
    path = Path(shutil.copytree(model, tmp_path / "split"))
    (path / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, path / f"model-{i}.safetensors")
    assert fingerprint(path) == number


def test_a_directory_without_a_config_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
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
