"""What is made of a GGUF file, and each refusal in one line."""

from __future__ import annotations

import array
import io
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.gguf_files import entries_of, gguf, tiny_metadata, tiny_tensors, unpaired, write_tiny
from tokenizers import Tokenizer

from phalanx.catalog.imports import imports_folder
from phalanx.catalog.pull_progress import PullProgress
from phalanx.errors import ModelError, ModelNotFound, ModelUnsupported, WeightsError
from phalanx.model.gguf import gguf_import
from phalanx.model.gguf.gguf_config import llama3_factors
from phalanx.model.gguf.gguf_header import parse_header
from phalanx.model.gguf.gguf_import import convert, halves
from phalanx.model.gguf.import_once import import_gguf
from phalanx.model.loading.resolve import resolve


def header_of(file: Path) -> bytes:
    """A file up to its weights."""
    data = file.read_bytes()
    return data[: parse_header("x", len(data), io.BytesIO(data).read).tensors[0].start]


@pytest.mark.grows
def test_mutations_of_a_whole_file_are_imported_or_refused_in_one_line(home: Path):
    """Metadata reach JSON, the library of tokenizers and sizes of arrays: none may fail in its own words."""
    write_tiny(home / "x.gguf", kind="Q4_0", tokenizer__ggml__add_bos_token=True)
    start, data = header_of(home / "x.gguf"), (home / "x.gguf").read_bytes()
    numbers = st.sampled_from([0, 1, 3, 8, 255])

    @examples(60, soak=2000)
    @given(st.lists(st.tuples(st.integers(24, len(start) - 1), numbers | st.integers(0, 255)), min_size=1, max_size=3))
    def check(changes: list[tuple[int, int]]) -> None:
        mutated = bytearray(data)
        for at, byte in changes:
            mutated[at] = byte
        (home / "y.gguf").write_bytes(mutated)
        shutil.rmtree(home / "made", ignore_errors=True)
        try:
            convert(home / "y.gguf", home / "made")
        except ModelError as error:
            assert str(error).isprintable() and "y.gguf" in str(error)
        else:
            assert json.loads((home / "made" / "config.json").read_text())["model_type"] == "llama"

    check()


def test_other_files_are_refused(home: Path):
    (home / "model.bin").write_bytes(b"PK")
    with pytest.raises(ModelNotFound, match=r"model.bin is a file\. Name the directory .* or a GGUF file"):
        resolve("model.bin")
    (home / "fake.gguf").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="is not a GGUF file"):
        resolve("fake.gguf")
    (home / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"lfs\.gguf is a pointer of Git LFS"):
        resolve("lfs.gguf")
    os.mkfifo(home / "pipe.gguf")
    with pytest.raises(ModelError, match=r"pipe\.gguf is a pipe, not a file"):
        resolve("pipe.gguf")


@pytest.mark.parametrize(
    "name", ["none.gguf", "./none.gguf", "folder/none.gguf", "/no/such/none.gguf", "dangling.gguf"]
)
def test_a_file_that_is_not_there_is_not_asked_of_the_hub(name: str, home: Path):
    (home / "dangling.gguf").symlink_to("none")
    with pytest.raises(ModelNotFound, match=f"There is no file '{name}'"):
        resolve(name)


# -- what is refused -----------------------------------------------------------------------------------------------


def refusal(home: Path, match: str, *, kind: type[ModelError] = ModelUnsupported, **own: Any) -> None:
    write_tiny(home / "x.gguf", **own)
    with pytest.raises(kind, match=match) as raised:
        import_gguf(home / "x.gguf")
    assert raised.value.remedy and "\n" not in str(raised.value) and "x.gguf" in str(raised.value)
    assert entries_of(imports_folder()) == []


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general__architecture": "mamba"},
        "architecture 'mamba', taken are llama, .*gemma3.* Download the model in mlx-lm's or Transformers' format",
    ),
    "adapter": ({"general__type": "adapter"}, "general.type is 'adapter', not a model"),
    "experts": ({"llama__expert_count": 8}, "tensor 'blk.0.ffn_.*weight' is not known of llama"),
    "window": ({"llama__attention__sliding_window": 8}, "it has 'llama.attention.sliding_window', which is not taken"),
    "scale": ({"llama__logit_scale": 0.5}, "it has 'llama.logit_scale', which is not taken over"),
    "unknown": ({"llama__swirl": "left"}, "it has 'llama.swirl', which is not taken over"),
    "not causal": ({"llama__attention__causal": False}, "it has 'llama.attention.causal'"),
    "growth": ({"llama__rope__scaling__attn_factor": 1.2}, "it has 'llama.rope.scaling.attn_factor'"),
    "partial rotary": ({"llama__rope__dimension_count": 32}, "its rope.dimension_count is not 64"),
    "widths": (
        {"llama__feed_forward_length": array.array("I", [256, 512])},
        "llama.feed_forward_length is another in each",
    ),
    "values": ({"llama__attention__value_length": 32}, "its attention.value_length is not 64"),
    "scaling": ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type 'longrope', which mlx-lm's llama"),
    "tokenizer": ({"tokenizer__ggml__model": "rwkv"}, "its tokenizer is of the kind 'rwkv', taken are gpt2"),
    "pre-tokenizer": ({"tokenizer__ggml__pre": "jina-v2-de"}, "its pre-tokenizer 'jina-v2-de' is not known"),
}
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no architecture": ({"general__architecture": None}, "general.architecture is missing"),
    "type": ({"llama__embedding_length": "many"}, "llama.embedding_length is 'many', not of type int"),
    "no layers": ({"llama__block_count": 0}, "llama.block_count is 0, not a number from 1"),
    "layers": ({"llama__block_count": (1 << 31) - 1}, "2147483647 layers, but has 20 tensors"),
    "a layer more": ({"llama__block_count": 3}, "it lacks tensor blk.2.attn_k.weight"),
    "not finite": ({"llama__rope__freq_base": float("inf")}, "llama.rope.freq_base is 'inf'"),
    "rows": (
        {"llama__attention__head_count": 1, "llama__attention__head_count_kv": 1},
        r"tensor blk.0.attn_k.weight has the shape \(128, 256\), by its metadata it has \(256, 256\)",
    ),
    "eos": ({"tokenizer__ggml__eos_token_id": 99999}, "the eos token is 99999 of 264"),
    "bos": ({"tokenizer__ggml__bos_token_id": 99999}, "the bos token is 99999 of 264"),
    "merge": ({"tokenizer__ggml__merges": ["x yz"]}, "merge 'x yz' is not one of two tokens"),
    "tokens": ({"tokenizer__ggml__tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
    "too many tokens": (
        {
            "tokenizer__ggml__tokens": [*tiny_metadata("llama")["tokenizer.ggml.tokens"], "more"],
            "tokenizer__ggml__token_type": array.array("i", [1] * 265),
        },
        "it has 265 tokens, but embeddings of 264",
    ),
    "types of tokens": ({"tokenizer__ggml__token_type": array.array("i", [1])}, "token_type has 1 elements, 264 are"),
    "no texts": ({"tokenizer__ggml__tokens": array.array("i", [1])}, "tokenizer.ggml.tokens is .*, not of type list"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_taken_over_is_named(name: str, home: Path):
    own, match = UNSUPPORTED[name]
    refusal(home, match, **own)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_metadata_are_named(name: str, home: Path):
    own, match = DAMAGED[name]
    refusal(home, match, kind=WeightsError, **own)


def test_damaged_weights_are_named(home: Path):
    tensors = tiny_tensors("llama", "Q8_0", np.random.default_rng(0))
    tensors["blk.1.ffn_up.weight"][1][-1, -1, :2] = (0x00, 0x7C)
    (home / "x.gguf").write_bytes(gguf(tiny_metadata("llama"), tensors))
    with pytest.raises(WeightsError, match=r"x\.gguf: tensor blk\.1\.ffn_up\.weight has a scale that is not finite"):
        import_gguf(home / "x.gguf")
    assert entries_of(imports_folder()) == []


def test_tensors_that_are_not_taken_over_are_named(home: Path):
    def refuse(match: str, change: Callable[[dict[str, Any]], None], kind: type[ModelError] = ModelUnsupported) -> None:
        tensors = tiny_tensors("llama", "F16", np.random.default_rng(0))
        change(tensors)
        shutil.rmtree(home / "made", ignore_errors=True)
        (home / "x.gguf").write_bytes(gguf(tiny_metadata("llama"), tensors))
        with pytest.raises(kind, match=match):
            convert(home / "x.gguf", home / "made")

    name, ones = "blk.0.ffn_up.weight", np.ones(4, np.float32)
    blocks = np.zeros((256, 1, 292), np.uint8)
    refuse(r"blk\.0\.ffn_up\.weight is of type Q8_K. Take .* Q4_K_M", lambda t: t.update({name: ("Q8_K", blocks)}))
    refuse("'blk.0.attn_q.bias' is not known of llama", lambda t: t.update({"blk.0.attn_q.bias": ("F32", ones)}))
    refuse("'blk.7.x' is not known of llama", lambda t: t.update({"blk.7.x": ("F32", ones)}))
    refuse("it lacks tensor token_embd.weight", lambda t: t.pop("token_embd.weight"), WeightsError)
    refuse(r"blk.0.ffn_up.weight has the shape \(4,\)", lambda t: t.update({name: ("F32", ones)}), WeightsError)
    refuse("are not those of Llama 3", lambda t: t.update({"rope_freqs.weight": ("F32", ones * 9)}))
    refuse("rope_freqs.weight is of type F16", lambda t: t.update({"rope_freqs.weight": ("F16", ones.astype("<f2"))}))


# -- what comes out ------------------------------------------------------------------------------------------------


def config_of(home: Path, architecture: str = "llama", **own: Any) -> dict[str, Any]:
    shutil.rmtree(home / "made", ignore_errors=True)
    write_tiny(home / "x.gguf", architecture, **own)
    convert(home / "x.gguf", home / "made")
    found: dict[str, Any] = json.loads((home / "made" / "config.json").read_text())
    return found


def test_rotary_scaling(home: Path):
    linear = config_of(home, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    own = {"type": "yarn", "factor": 2.0, "original_context_length": 256}
    yarn = config_of(home, "qwen3", **{f"qwen3__rope__scaling__{key}": one for key, one in own.items()})
    wanted = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    assert yarn["rope_scaling"] == wanted and "rope_scaling" not in config_of(home)


def test_llama_3s_factors_are_known_by_their_values(home: Path):
    tensors = tiny_tensors("llama", "F16", np.random.default_rng(0))
    tensors["rope_freqs.weight"] = ("F32", llama3_factors(8.0, 500000.0, 32).astype(np.float32))
    metadata = tiny_metadata("llama", llama__rope__freq_base=500000.0)
    (home / "x.gguf").write_bytes(gguf(metadata, tensors))
    convert(home / "x.gguf", home / "made")
    scaling = json.loads((home / "made" / "config.json").read_text())["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_llama_3s_factors_are_those_of_its_converter():
    """Of Llama 3.1 8B, pair by pair as llama.cpp's convert_hf_to_gguf.py computes them."""
    wanted = []
    for pair in range(64):
        length = 2 * np.pi * 500000.0 ** (2 * pair / 128)
        if length < 8192 / 4:
            wanted.append(1.0)
        elif length > 8192 / 1:
            wanted.append(8.0)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            wanted.append(1 / ((1 - smooth) / 8 + smooth))
    assert np.allclose(llama3_factors(8.0, 500000.0, 64), wanted, rtol=1e-9) and 1 < wanted[34] < 8


def test_the_ends_of_an_answer(home: Path):
    assert config_of(home)["eos_token_id"] == 2
    assert config_of(home, tokenizer__ggml__eos_token_id=1)["eos_token_id"] == [1, 2], "<|im_end|> ends a turn"
    assert config_of(home, tokenizer__ggml__eot_token_id=0)["eos_token_id"] == [2, 0]


def test_rows_of_rotary_pairs_come_apart():
    rows = np.arange(16, dtype=np.uint8)[:, None].repeat(3, axis=1)
    assert np.array_equal(halves(rows, 8), unpaired(rows, 2))
    assert halves(rows, 8)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_chunks_of_rows_make_the_same_file(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch):
    convert(file, home / "whole")
    monkeypatch.setattr(gguf_import, "CHUNK", 1000)
    convert(file, home / "parts")
    assert (home / "whole" / "model.safetensors").read_bytes() == (home / "parts" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q6_K"])
def test_an_import_holds_a_part_of_a_tensor_in_memory(kind: str, home: Path):
    """Far less than the largest tensor: that is 120 MB here, and a model's may have gigabytes."""
    bytes_of_a_row = {"F16": 512, "Q8_0": 272, "Q6_K": 210}[kind]
    tensors = tiny_tensors("llama", "Q8_0", np.random.default_rng(0))
    one = tiny_tensors("llama", kind, np.random.default_rng(0))["token_embd.weight"][1]
    tensors["token_embd.weight"] = (kind, np.resize(one, (120_000_000 // bytes_of_a_row, *one.shape[1:])))
    write_tiny(home / "x.gguf", tensors=tensors)
    del tensors
    tracemalloc.start()
    try:
        convert(home / "x.gguf", home / "made")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000_000, peak  # whole tensors take 240 MB or more


def test_the_largest_error_is_said(home: Path):
    write_tiny(home / "x.gguf", kind="Q6_K")
    said: list[PullProgress] = []
    errors = convert(home / "x.gguf", home / "made", said.append)
    worst = max(errors, key=lambda name: errors[name])
    assert len(errors) == 15 and all(0 < error < 0.1 for error in errors.values())
    line = said[-1].status
    assert line == f"15 tensors are quantised again, to 8 bits; the largest error is {errors[worst]:.2g} ({worst})"


# -- tokenizers ----------------------------------------------------------------------------------------------------

TEXT = "It's 12345 hello\n\n  x²!=y"
PIECES = {
    "gpt-2": ["It", "'s", "Ġ12345", "Ġhello", "ĊĊĠ", "Ġx", "Â²", "!=", "y"],
    "smollm": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġhello", "ĊĊĠ", "Ġx", "Â²", "!=", "y"],
    "llama-bpe": ["It", "'s", "Ġ", "123", "45", "Ġhello", "ĊĊ", "Ġ", "Ġx", "Â²", "!=", "y"],
    "qwen2": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġhello", "ĊĊ", "Ġ", "Ġx", "Â²", "!=", "y"],
    "default": ["It", "'", "s", "Ġ", "123", "45", "Ġhello", "ĊĊĠ", "Ġx", "Â²", "!=", "y"],
    None: ["It", "'", "s", "Ġ", "123", "45", "Ġhello", "ĊĊĠ", "Ġx", "Â²", "!=", "y"],
}


def tokenizer_of(home: Path, **own: Any) -> Tokenizer:
    config_of(home, **own)
    return Tokenizer.from_file(str(home / "made" / "tokenizer.json"))


@pytest.mark.parametrize("pre", PIECES)
def test_texts_are_cut_by_the_rules_of_their_kind(pre: str | None, home: Path):
    tokenizer = tokenizer_of(home, tokenizer__ggml__pre=pre)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)] == PIECES[pre]
    encoded = tokenizer.encode(f"{TEXT}<|im_end|>", add_special_tokens=False)
    assert "hell" not in encoded.tokens and "hello" in "".join(encoded.tokens) and encoded.ids[-1] == 2
    assert tokenizer.decode(encoded.ids) == TEXT


def test_tokens_around_a_text(home: Path):
    def ids(**own: Any) -> list[int]:
        found: list[int] = tokenizer_of(home, **own).encode("hello").ids
        return found

    [hello] = ids()
    assert ids(tokenizer__ggml__add_bos_token=True) == [1, hello]
    assert ids(tokenizer__ggml__add_eos_token=True) == [hello, 2]
    assert ids(tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True) == [1, hello, 2]
    assert ids(tokenizer__ggml__pre="llama-bpe") == [1, hello], "llama.cpp adds it where the file does not say"
    tokens = ["<pad>", "$B:x", *tiny_metadata("llama")["tokenizer.ggml.tokens"][2:]]
    assert ids(tokenizer__ggml__tokens=tokens, tokenizer__ggml__add_bos_token=True) == [1, hello], "no template of ours"
    assert ids(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=False) == [hello]


def test_user_defined_tokens_are_text(home: Path):
    kinds = array.array("i", [3, 4, 3] + [1] * 261)
    tokenizer = tokenizer_of(home, tokenizer__ggml__token_type=kinds)
    assert tokenizer.encode("<s>", add_special_tokens=False).ids == [1] and tokenizer.decode([1, 2]) == "<s>"


def test_the_template_comes_along(home: Path):
    config_of(home)
    described = json.loads((home / "made" / "tokenizer_config.json").read_text())
    assert described["chat_template"].startswith("{% for") and described["bos_token"] == "<s>"
    assert (described["eos_token"], described["model_max_length"]) == ("<|im_end|>", 512)
    config_of(home, tokenizer__chat_template=None, tokenizer__ggml__bos_token_id=None)
    described = json.loads((home / "made" / "tokenizer_config.json").read_text())
    assert not described.keys() & {"chat_template", "bos_token"}
