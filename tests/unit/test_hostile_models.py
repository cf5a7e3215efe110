"""Model directories made to harm: each is refused with one error that names the file, at once and in little memory."""

from __future__ import annotations

import json
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import ExitCode, ModelError, ModelUnsupported, WeightsError, exit_code_of
from phalanx.model.loading.plausible import check_sizes
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.weights import fingerprint, read_headers
from phalanx.text.model_files import MAX_CONFIG, check_settings, read_json

FILE = "model.safetensors"
DEEP = "[" * 200_000 + "]" * 200_000
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    write_weights(path, {"a": ENTRY})
    return path


def write_weights(path: Path, header: Any, data: bytes = bytes(8), length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / FILE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def refused(act: Callable[[], object], match: str) -> None:
    """The call is refused with these words, the exit code of a bad model, and less than 64 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=match) as raised:
            act()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert exit_code_of(raised.value) == ExitCode.CONFIG and raised.value.remedy
    assert peak < 64 << 20


# -- what is in the directory ----------------------------------------------------------------------------------------


def pipe(file: Path) -> None:
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.symlink_to("/dev/zero")


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def a_directory(file: Path) -> None:
    file.mkdir()


def listening(file: Path) -> None:
    os.chdir(file.parent)  # paths of sockets are short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(file.name)


def dangling(file: Path) -> None:
    file.symlink_to("nothing")


def secret(file: Path) -> None:
    (file.parent.parent / "secret").write_text("{}")
    file.symlink_to("../secret")


def huge(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


NAMES = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    FILE,
]
KINDS = [pipe, endless, loop, listening, dangling, secret]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_directory_with_anything_but_files_of_its_own_is_refused(name, make, model, monkeypatch):
    monkeypatch.chdir(model)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    refused(lambda: resolve(str(model)), f"{model}/{name} (is|cannot be read)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [pipe, endless, loop, listening, a_directory, huge], ids=lambda make: make.__name__)
def test_no_reader_waits_for_such_a_file_or_reads_it_without_end(name, make, model, monkeypatch):
    """Also where the directory is not checked, or changes after that."""
    monkeypatch.chdir(model)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    reader = read_headers if name == FILE else check_settings
    refused(lambda: reader(model), f"{model}/{name} (is|has|cannot be read)")


def test_links_of_the_hubs_cache_and_within_the_directory_are_followed(tmp_path):
    blob = tmp_path / "models--a--b" / "blobs" / "1234"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    for folder in (blob.parent, snapshot / "more"):
        folder.mkdir(parents=True)
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "other.json").symlink_to("config.json")
    (tmp_path / "named").symlink_to(snapshot)
    assert resolve(str(tmp_path / "named")) == tmp_path / "named"
    (snapshot / "more.json").symlink_to("../../elsewhere/1234")
    with pytest.raises(ModelUnsupported, match=r"more\.json cannot be read"):
        resolve(str(snapshot))


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": ' + DEEP + "}", "nested"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32"),
        (DEEP, "nested"),
        ('{"rope_theta": Infinity}', "rope_theta is inf"),
        ('{"a": {"rope_theta": [1, 1e999]}}', "rope_theta is inf"),
        ('{"a": NaN}', "a is nan"),
        ('{"time_step_limit": [-Infinity, 1]}', "time_step_limit is -inf"),
        ('{"a": ' + "9" * 100_000 + "}", "not JSON"),
        ("[]", "not a JSON object"),
        ("3", "not a JSON object"),
        ("{", "not JSON"),
        ("\udcff", "not UTF-8"),
        (" " * (MAX_CONFIG + 1), "is the most"),
    ],
    ids=range(13),
)
def test_settings_that_no_model_has_are_refused(text, match, model):
    (model / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(lambda: read_json(model / "config.json"), rf"{model}/config\.json.*{match}")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("shape", [lambda path: path, lambda path: [path], lambda path: {"a": path}])
def test_no_setting_makes_a_file_of_the_machine_a_vocabulary(shape, name, model, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret\n")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "secret"), "secret", "/dev/zero"):
        (model / name).write_text(json.dumps({"bos_token": "secret", "vocab": shape(path)}))
        refused(lambda: check_settings(model), f"{name}: vocab names '{path}'")


def test_what_models_do_write_is_read(model):
    (model / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "model_max_length": 1' + "0" * 30 + "}")
    assert read_json(model / "config.json")["time_step_limit"] == [0.0, float("inf")]
    own = {"tokenizer_file": str(model / "config.json"), "name_or_path": str(model), "vocab": "a\0b", "init_inputs": []}
    (model / "tokenizer_config.json").write_text(json.dumps(own))
    check_settings(model)


SIZES = {"num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 100_000),
        ("num_hidden_layers", 2),  # there is one tensor
        ("num_hidden_layers", -3),
        ("num_hidden_layers", "1"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 1.5),
        ("num_nextn_predict_layers", 10**9),
        ("hidden_size", 10**12),
        ("hidden_size", 1000),
        ("hidden_size", 0),
        ("vocab_size", 10**6),
        ("vocab_size", 10**30),
        ("n_routed_experts", 10**8),
        ("intermediate_size", [1, 10**8]),
        ("head_dim", -(10**9)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_sizes_that_the_weights_cannot_have_are_refused_by_name(field, value, nested, model):
    config = {**SIZES, field: value}
    config = {"text_config": config} if nested else config
    refused(lambda: check_sizes(model / "config.json", config, read_headers(model)), rf"config\.json: .*{field}")


@pytest.mark.parametrize("value", [2, 10**9, -1])
def test_an_index_beyond_its_array_is_refused_by_name(value, model):
    config = {"text_config": {**SIZES, "altup_num_inputs": 2, "altup_active_idx": value}}
    refused(
        lambda: check_sizes(model / "config.json", config, read_headers(model)), r"config\.json: altup_active_idx is"
    )


def test_sizes_that_fit_the_weights_are_accepted(model):
    check_sizes(model / "config.json", SIZES, read_headers(model))
    indexed = {**SIZES, "altup_num_inputs": 2, "altup_active_idx": 1}
    check_sizes(model / "config.json", indexed, read_headers(model))


# -- weights ---------------------------------------------------------------------------------------------------------

BESIDE = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}', "damaged header"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e400]}}', "tensor a"),
        (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "tensor a|damaged header"),
        ({"a": {**ENTRY, "data_offsets": [0.5, 8]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 9]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [1 << 62, (1 << 62) + 8]}}, "tensor a"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "cut short: .* bytes"),
        ({"a": {**ENTRY, "shape": [1 << 60, 1 << 60]}}, "tensor a"),
        ({"a": {**ENTRY, "shape": [2] * 100_000}}, "tensor a"),
        ({"a": {**ENTRY, "shape": [-2]}}, "tensor a"),
        ({"a": {**ENTRY, "shape": None}}, "tensor a"),
        ({"a": {**ENTRY, "dtype": "Q9"}}, "tensor a has the dtype 'Q9'"),
        ({"a": {**ENTRY, "dtype": 3}}, "tensor a"),
        ({"a": []}, "tensor a"),
        ({"a": ENTRY, "b": ENTRY}, "tensor b overlaps"),
        ({"a": ENTRY, "b": BESIDE}, "tensor b overlaps"),
        ({"b": BESIDE}, "tensor b leaves a gap"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' + json.dumps({"a": BESIDE}).encode()[1:], "gap"),
        (b'{"a":' + DEEP.encode() + b"}", "damaged header"),
        (b'{"__metadata__":' + DEEP.encode() + b"}", "damaged header"),
        (b"[]", "damaged header"),
        (b"\xff\xfe", "damaged header"),
    ],
    ids=range(24),
)  # fmt: skip
def test_a_header_that_lies_is_refused(header, match, model):
    write_weights(model, header)
    refused(lambda: read_headers(model), rf"{FILE}.*({match})")


@pytest.mark.parametrize("length", [0, 1, 1 << 31, 1 << 60, (1 << 64) - 1])
def test_a_header_of_absurd_length_is_not_read(length, model):
    write_weights(model, {"a": ENTRY}, length=length)
    refused(lambda: read_headers(model), f"{FILE} is not a safetensors file")


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{", "\xff"])
def test_a_damaged_index_is_refused(text, model):
    (model / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match=r"index\.json is damaged"):
        read_headers(model)


def test_a_fingerprint_waits_for_no_pipe(model):
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    refused(lambda: fingerprint(model), "is a pipe")
