"""Models with tied embeddings whose files hold a head as well: as a copy, which is left out, or as something else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.families import FAMILIES, VOCAB
from support.models import make_model
from support.splitting import UNBUILDABLE, Ranks
from support.stages import even, load_part, staged_runner

from phalanx.errors import WeightsError
from phalanx.model.loading.load import load, prepare
from phalanx.model.loading.weights import read_headers
from phalanx.sched.plan import Admit, Forward, Resize

FILE = "model.safetensors"
COMPOSED = "language_model.lm_head.weight"
HEAD_OF = {
    "internlm2": "output.weight", "llama4_text": "output.weight",
    **dict.fromkeys(["gemma4", "kimi_k3", "lfm2-vl", "minimax_m3_vl", "mistral3", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
                     "qwen3_vl", "qwen3_vl_moe"], COMPOSED),
}  # fmt: skip
"""The tensor's name in the families where it is not lm_head.weight."""
OWN_HEAD = {
    "Klear", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "gemma3", "gemma3_text",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "gptj", "helium", "kimi_k25", "kimi_vl",
    "llama4", "longcat_flash", "longcat_flash_ngram", "mimo_v2_flash", "muse_spark", "nanochat", "nemotron_h", "phi",
    "phimoe", "phixtral", "pixtral", "plamo", "qwen", "qwen2_moe", "recurrent_gemma", "solar_open", "stablelm",
    "step3p5", "talkie",
}  # fmt: skip
"""Families whose model file always makes a head."""
TIED = sorted({name for name in FAMILIES if ":" not in name} - OWN_HEAD - set(UNBUILDABLE) - {"phi3small"})
PROMPT = [7, 11, 30, 5, 80, 3]


def make_tied(family: str, path: Path, **more: Any) -> Path:
    entries: dict[str, Any] = {"tie_word_embeddings": True}
    if "text_config" in FAMILIES[family]:
        entries["text_config"] = {**FAMILIES[family]["text_config"], **entries}
    return make_model(family, path, **entries, **more)


def tensors(path: Path) -> dict[str, mx.array]:
    found = mx.load(str(path / FILE))
    assert isinstance(found, dict)
    return found


def add_head(path: Path, name: str, change: Callable[[mx.array], mx.array] = lambda array: array) -> None:
    """Write the embedding once more under the name of a head, with its scales if it is quantised."""
    found = tensors(path)
    wide = [key for key in found if key.endswith(".weight") and found[key].ndim == 2 and len(found[key]) == VOCAB]
    module = next(key for key in wide if "per_layer" not in key).removesuffix(".weight")
    head = name.removesuffix("weight")
    copies = {head + kind: change(found[f"{module}.{kind}"]) for kind in ("weight", "scales", "biases")
              if f"{module}.{kind}" in found}  # fmt: skip
    mx.save_safetensors(str(path / FILE), {**found, **copies})


def other(array: mx.array) -> mx.array:
    return array * 0.5 if mx.issubdtype(array.dtype, mx.floating) else array


def logits(path: Path) -> mx.array:
    model = load(path, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None).model
    found: mx.array = model(mx.array([PROMPT]))
    return found


@pytest.mark.parametrize("family", TIED)
def test_a_head_beside_a_tied_embedding_is_left_out(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, name = make_tied(family, tmp_path), HEAD_OF.get(family, "lm_head.weight")
    add_head(path, name)
    plan = prepare(path, dtype="float32", trust_remote_code=False).plan
    assert read_headers(path)[name] not in [entry.source for entry in plan]
    assert "differs from" not in caplog.text
    mx.save_safetensors(str(path / FILE), {**tensors(path), name: tensors(path)[name] * 0.5})
    prepare(path, dtype="float32", trust_remote_code=False)
    assert f"the files' {name} differs from it; the embedding is used" in caplog.text


@pytest.mark.parametrize("family", ["olmo2", "qwen3_vl", "starcoder2", "llama"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4}, {"mode": "mxfp4", "bits": 4}], ids=str)
def test_the_answers_are_the_embeddings(
    family: str, quantize: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a copy nor another head changes a logit."""
    path = make_tied(family, tmp_path, quantize=quantize, dtype=mx.bfloat16)
    expected = logits(path)
    add_head(path, HEAD_OF.get(family, "lm_head.weight"))
    assert mx.array_equal(logits(path), expected) and "differs from" not in caplog.text
    name = HEAD_OF.get(family, "lm_head.weight")
    mx.save_safetensors(str(path / FILE), {**tensors(path), name: other(tensors(path)[name]) + 1})
    assert mx.array_equal(logits(path), expected) and "differs from" in caplog.text


def test_a_rank_and_a_stage_read_no_copy(tmp_path: Path) -> None:
    path = make_tied("olmo2", tmp_path / "model", num_hidden_layers=4)
    expected = [Ranks(path, 2).forward(PROMPT), [one.weights_bytes for one in Ranks(path, 2).loaded]]
    part = load_part(path, even(2, 1)).weights_bytes
    add_head(path, "lm_head.weight")
    ranks = Ranks(path, 2)
    assert all(mx.array_equal(mine, before) for mine, before in zip(ranks.forward(PROMPT), expected[0], strict=True))
    assert [one.weights_bytes for one in ranks.loaded] == expected[1]
    assert load_part(path, even(2, 1)).weights_bytes == part
    runner = staged_runner(path, 2)
    runner.apply([Resize(0, 1, 16), Admit(0, 0, 0)])
    assert runner.forward(Forward(0, 0, (0,), (tuple(PROMPT),), (len(PROMPT),), sample=True), [0]) is not None
    assert runner.different == []


def test_a_head_of_another_form_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A quantised embedding with a head in 16 bits, as conversions by hand leave them."""
    path = make_tied("olmo2", tmp_path, quantize={"bits": 4})
    mx.save_safetensors(str(path / FILE), {**tensors(path), "lm_head.weight": mx.zeros((VOCAB, 64))})
    prepare(path, dtype="float32", trust_remote_code=False)
    assert "the files' lm_head.weight differs from it; the embedding is used" in caplog.text


def test_a_family_that_keeps_its_head_says_that_it_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_model("gemma3_text", tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    prepare(path, dtype="float32", trust_remote_code=False)
    assert "differs from it; the head is used" in caplog.text


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_a_head_that_config_json_asks_for_is_not_left_out(family: str, tmp_path: Path) -> None:
    """These families have none in mlx-lm; the model would be another one."""
    path = make_model(family, tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))
    add_head(path, "lm_head.weight", other)
    with pytest.raises(WeightsError, match=r"does not: lm_head\.weight"):
        prepare(path, dtype="float32", trust_remote_code=False)


def test_what_only_looks_like_a_head_stays_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tied("olmo2", tmp_path)
    with caplog.at_level(logging.WARNING):
        for name in ("model.layers.0.lm_head.weight", "lm_head_2.weight", "model.extra.weight"):
            mx.save_safetensors(str(path / FILE), {**tensors(path), name: mx.zeros((VOCAB, 64))})
            with pytest.raises(WeightsError, match=name):
                prepare(path, dtype="float32", trust_remote_code=False)
