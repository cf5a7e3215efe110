"""Weights and config.json as people have them: loaded right, or refused with one line that names file and remedy."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.models import make_model

from phalanx.errors import ExitCode, ModelError, exit_code_of
from phalanx.model.loading.load import load, prepare
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.weight_files import INDEX

FILE = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98304\n"

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("whole"), dtype=mx.bfloat16)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def tensors(path: Path) -> dict[str, mx.array]:
    found = mx.load(str(path / FILE))
    assert isinstance(found, dict)
    return found


def shards(path: Path, keep: str = "*", index: bool = True) -> None:
    """Split the file in two, of which the matching ones are kept."""
    all_of_them = tensors(path)
    (path / FILE).unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(all_of_them))}
    for file in set(places.values()):
        if Path(file).match(keep):
            mx.save_safetensors(str(path / file), {name: all_of_them[name] for name in places if places[name] == file})
    if index:
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def names(*files: str) -> Edit:
    """An index that names these files."""
    return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(files))}))


def add(file: str, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Edit:
    return lambda path: mx.save_safetensors(str(path / file), change(tensors(path)))


def moved(*pairs: tuple[str, str]) -> Edit:
    def edit(path: Path) -> None:
        for old, new in pairs:
            (path / new).parent.mkdir(exist_ok=True)
            (path / old).rename(path / new)

    return edit


def write(file: str, content: str | bytes) -> Edit:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda path: (path / file).write_bytes(data)


def config(*without: str, **entries: Any) -> Edit:
    def edit(path: Path) -> None:
        values = {**json.loads((path / "config.json").read_text()), **entries}
        (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in without}))

    return edit


def both(*edits: Edit) -> Edit:
    return lambda path: [edit(path) for edit in edits]


def zeros(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {name: array * 0 for name, array in weights.items()}


LOADED: dict[str, tuple[Edit, str]] = {
    "one file": (lambda path: None, ""),
    "shards with an index": (shards, ""),
    "shards without an index": (lambda path: shards(path, index=False), ""),
    "an index of another split": (names("model-00001-of-00002.safetensors"), f"{INDEX} names none of the files"),
    "an empty index": (names(), ""),
    "a file that the index does not name": (
        both(names(FILE), add("model-mtp.safetensors", lambda _: {"x": mx.zeros(3)})), "not loading model-mtp",
    ),
    "a copy that the index does not name": (both(names(FILE), add("model (1).safetensors", zeros)), "not loading"),
    "Mistral's own file beside": (add("consolidated.safetensors", zeros), ""),
    "an adapter beside": (add("adapter_model.safetensors", zeros), ""),
    "an unfinished download of something else": (write("original.incomplete", "x"), ""),
    "tensors of a rotary embedding": (
        add(FILE, lambda w: {**w, "model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros(8)}), "",
    ),
    "no head_dim": (config(head_dim=None), ""),
    "no max_position_embeddings": (config("max_position_embeddings"), ""),
    "no rope scaling": (config(rope_scaling=None), ""),
    "empty rope scaling": (config(rope_scaling={}), ""),
    "the default as rope scaling": (config(rope_scaling={"rope_type": "default"}), ""),
    "no end of sequence": (config("eos_token_id"), ""),
    "any name of the dtype": (config(torch_dtype="float16", dtype=None), ""),
    "null for a quantisation": (config(quantization=None, quantization_config=None), ""),
    "an empty quantisation": (config(quantization_config={}), ""),
    "null for the text part": (config(text_config=None), ""),
    "no architectures": (config(architectures=None), ""),
    "no word about tied embeddings": (config("tie_word_embeddings"), ""),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "warning"), LOADED.values(), ids=LOADED)
def test_what_is_there_is_loaded(
    edit: Edit, warning: str, whole: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(model)
    with caplog.at_level(logging.WARNING, "phalanx"):
        loaded = load(model, dtype="bfloat16", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    mine = dict(tree_flatten(loaded.model.parameters()))
    assert all(mx.array_equal(mine[name], array) for name, array in tensors(whole).items())
    assert len(caplog.records) == bool(warning) and warning in caplog.text


AGAIN = "start it again"
REFUSED: dict[str, tuple[Edit, str, str]] = {
    "a shard is missing": (
        both(lambda path: shards(path, keep="*1-of*"), write("x.incomplete", "")),
        r"lacks 1 of 2 weight files: model-00002-of-00002.*unfinished download: x\.incomplete", AGAIN,
    ),
    "a shard is missing, and the index": (
        lambda path: shards(path, "*1-of*", index=False), "lacks 1 of 2 weight files: model-00002-of-00002", AGAIN,
    ),
    "two versions without an index": (
        add("model-copy.safetensors", zeros), "is in both model-copy.safetensors and model.safetensors", "Remove",
    ),
    "an index of files with other names": (
        both(moved((FILE, "w.safetensors")), names("w.safetensors")), "names w.safetensors", "convert",
    ),
    "only Mistral's own file": (
        moved((FILE, "consolidated.safetensors")), "no model.*only consolidated.safetensors", "for Transformers",
    ),
    "GGUF": (moved((FILE, "model-q4.gguf")), r"only model-q4\.gguf", "Name the GGUF file itself"),
    "PyTorch's file": (moved((FILE, "pytorch_model.bin")), r"only pytorch_model\.bin", "safetensors"),
    "mlx-lm's former format": (moved((FILE, "weights.npz")), r"only weights\.npz", "mlx_lm.convert"),
    "an adapter": (
        both(moved((FILE, "adapters.safetensors"), ("config.json", "adapter_config.json"))),
        "no config.json, only adapter_config.json", "mlx_lm.fuse",
    ),
    "the folder above": (
        moved((FILE, "main/" + FILE), ("config.json", "main/config.json")), "no config.json", "in .*model/main",
    ),
    "weights without config.json": (lambda path: (path / "config.json").unlink(), "no config.json", "Copy it"),
    "an unfinished download": (
        moved((FILE, f".cache/{FILE}"), (f".cache/{FILE}", f"{FILE}.incomplete")),
        r"unfinished download: model\.safetensors\.incomplete", AGAIN,
    ),
    "a pointer of Git LFS": (write(FILE, POINTER), f"{FILE} is a pointer of Git LFS", "git lfs pull"),
    "config.json as a pointer": (write("config.json", POINTER), "config.json is a pointer of Git LFS", "git lfs pull"),
    "an empty file": (write(FILE, ""), r"not a safetensors file \(0 bytes\)", "Download"),
    "a page instead of the file": (write(FILE, "<!DOCTYPE html><html>"), "not a safetensors file", "Download"),
    "a file that is cut short": (
        lambda path: write(FILE, (path / FILE).read_bytes()[:-9])(path), "is cut short", "Download",
    ),
    "an empty config.json": (write("config.json", "\n"), "config.json is empty", "Download"),
    "a list as config.json": (write("config.json", "[]"), "not a JSON object", "Download"),
    "config.json in UTF-16": (write("config.json", "{}".encode("utf-16")), "config.json is not UTF-8", "Download"),
    "no model_type": (config("model_type"), r"config\.json names no model_type", "convert"),
    "an unknown model_type": (config(model_type="llamma"), "no architecture 'llamma'; nearest: llama", "Check"),
    "fields are missing": (
        config("hidden_size", "num_attention_heads"),
        r"config\.json lacks 'hidden_size' and 'num_attention_heads', which a model of type 'llama' needs", "Download",
    ),
    "a size in words": (config(hidden_size="64"), "hidden_size is 64; it must be a whole number", "download"),
    "a vocabulary of another size": (config(vocab_size=300), "another shape than config.json says", "download"),
    "more layers than there are": (config(num_hidden_layers=9), r"lacks tensors: model\.layers\.", "download"),
    "untied, without a head": (
        add(FILE, lambda weights: {name: array for name, array in weights.items() if "lm_head" not in name}),
        "lacks tensors: lm_head.weight", "download",
    ),
    "an unknown rope": (config(rope_scaling={"rope_type": "magic", "factor": 2.0}), "RoPE type magic", "Check"),
    "AWQ of 8 bits": (config(quantization_config={"quant_method": "awq", "bits": 8}), "with 'awq'", "16 bits"),
    "GPTQ": (
        both(add(FILE, lambda w: {**w, "a.g_idx": mx.zeros(3)}), config(quantization_config={"quant_method": "gptq"})),
        "quantised with 'gptq'", "16 bits",
    ),
    "fp8": (
        both(add(FILE, lambda w: {**w, "a_scale": mx.zeros(3)}), config(quantization_config={"quant_method": "fp8"})),
        "quantised with 'fp8'", "16 bits",
    ),
    "a list where an object belongs": (config(text_config=[1]), r"config\.json: text_config is a list", "Download"),
    "a quantisation without a name": (config(quantization_config={"bits": 4}), "unnamed method", "16 bits"),
    "a quantisation without a group": (config(quantization={"bits": 4}), "'group_size'", "config.json"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "match", "remedy"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_refused_in_one_line(edit: Edit, match: str, remedy: str, model: Path) -> None:
    edit(model)
    with pytest.raises(ModelError, match=match) as raised:
        prepare(model, dtype="auto", trust_remote_code=False)
    assert re.search(remedy, raised.value.remedy)
    assert exit_code_of(raised.value) == ExitCode.CONFIG and "\n" not in str(raised.value)


def test_a_name_that_mlx_lm_takes_for_a_pattern_is_refused(model: Path, tmp_path: Path) -> None:
    path = model.rename(tmp_path / "model [4-bit]")
    with pytest.raises(ModelError, match=r"cannot load from .*model \[4-bit\].*link"):
        prepare(path, dtype="auto", trust_remote_code=False)
    (tmp_path / "link").symlink_to(path)
    prepare(tmp_path / "link", dtype="auto", trust_remote_code=False)


def test_the_current_directory_has_a_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert resolve(".").name == "model" and resolve("..").name == model.parent.name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_a_word_about_it_the_weights_say_whether_there_is_a_head(family: str, tmp_path: Path) -> None:
    """qwen3's config must have the field in mlx-lm."""
    make_model(family, tmp_path, tie_word_embeddings=True)
    config("tie_word_embeddings")(tmp_path)
    assert "lm_head" not in prepare(tmp_path, dtype="auto", trust_remote_code=False).model


# -- the rotary embedding's settings ---------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SAME_ROPE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "theta in the scaling": ("llama", {"rope_theta": 5e5}, {"rope_scaling": {"type": "default", "rope_theta": 5e5}}),
    "scaling": (
        "llama", {"rope_theta": 5e5, "rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e5}},
    ),
    "a model file that knows it": (
        "qwen3", {"rope_theta": 5e5, "rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e5}},
    ),
    "a part of the head": (
        "stablelm", {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    ),
    "by kind of attention": (
        "gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}},
    ),
    "in the text part": (
        "qwen3_vl", {"text_config": {"rope_theta": 5e5}}, {"text_config": {"rope_parameters": {"rope_theta": 5e5}}},
    ),
}  # fmt: skip
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq")


def logits(path: Path) -> mx.array:
    model = prepare(path, dtype="float32", trust_remote_code=False).model
    found: mx.array = model(mx.array([[5, 9, 3, 7, 11, 4]]))
    return found


@pytest.mark.parametrize(("family", "old", "new"), SAME_ROPE.values(), ids=SAME_ROPE)
def test_the_rotary_embedding_of_transformers_5_is_the_same(
    family: str, old: dict[str, Any], new: dict[str, Any], tmp_path: Path
) -> None:
    make_model(family, tmp_path, tie_word_embeddings=False)
    written = json.loads((tmp_path / "config.json").read_text())

    def answer(settings: dict[str, Any]) -> mx.array:
        entries = {name: value for name, value in written.items() if name not in ROPE}
        if "text_config" in settings:
            text = {name: value for name, value in entries["text_config"].items() if name not in ROPE}
            settings = {"text_config": {**text, **settings["text_config"]}}
        (tmp_path / "config.json").write_text(json.dumps({**entries, **settings}))
        return logits(tmp_path)

    assert mx.array_equal(answer(old), answer(new))
    plain = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert not mx.allclose(answer(new), answer({"text_config": plain} if "text_config" in new else plain), atol=1e-4)
