"""Models from GGUF files: MLX's weights are those of the file, and their logits mlx-lm's of the same weights."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.gguf_files import (
    CONTROLS,
    HALVES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MERGES,
    Array,
    dequantised,
    random_blocks,
    unpaired,
    weights_of,
    write_tiny,
)

from phalanx.model.gguf.gguf_blocks import BITS, mode_of, pack, to_groups
from phalanx.model.loading.load import load, prepare
from phalanx.model.loading.parameters import gpu_dtype
from phalanx.model.loading.resolve import resolve
from phalanx.text.tokenizer import Tokenizer

NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "token_embd": "model.embed_tokens",
    "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip
TOLERANCE = 2e-5  # of the largest logit: sums of 256 products of float32, in another order, through two layers
PROMPT = [[5, 100, 42, 7, 200, 33, 260, 1]]


@pytest.mark.parametrize("kind", [kind for kind in BITS if kind not in ("Q2_K", "Q6_K", "IQ2_XS", "IQ2_S")])
def test_mlx_dequantises_every_bit(kind: str):
    stored = random_blocks(kind, 8, 512, np.random.default_rng(0), 0.1)
    found = to_groups("t", kind, stored.reshape(-1, stored.shape[-1]))
    packed = np.ascontiguousarray(pack(found.codes, BITS[kind])).reshape(8, -1).view(np.uint32)
    parts = [mx.array(part.reshape(8, -1)) for part in (found.scales, found.biases) if part is not None]
    wide = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in parts]
    ours = mx.dequantize(mx.array(packed), *wide, group_size=32, bits=BITS[kind], mode=mode_of(kind), dtype=mx.float32)
    assert np.array_equal(np.array(ours), dequantised(kind, stored).reshape(8, 512))


def test_mxfp4_of_every_finite_exponent():
    exponents, codes = np.arange(253, dtype=np.uint8)[:, None], np.arange(16, dtype=np.uint8)
    blocks = np.concatenate([exponents, np.broadcast_to(codes | (codes[::-1] << 4), (253, 16))], axis=1)
    found = to_groups("t", "MXFP4", blocks)
    packed = mx.array(np.ascontiguousarray(pack(found.codes, 4)).view(np.uint32))
    scales = mx.array(found.scales[:, None])
    ours = np.array(mx.dequantize(packed, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32))
    assert np.array_equal(ours, dequantised("MXFP4", blocks)) and ours[0].any() and np.isfinite(ours).all()


def theirs(architecture: str, tensors: dict[str, tuple[str, Array]], *, tied: bool) -> Any:
    """mlx-lm's model with the reference's weights of a file, in float32."""
    config = {
        "model_type": architecture, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "vocab_size": len(CONTROLS) + 256 + len(MERGES), "max_position_embeddings": 512, "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = {}
    for name, (kind, stored) in tensors.items():
        *place, ours, part = name.split(".")
        values = weights_of(kind, stored)
        if architecture == "llama" and ours in ("attn_q", "attn_k"):
            values = unpaired(values, {"attn_q": HEADS, "attn_k": KV_HEADS}[ours])
        before = f"model.layers.{place[1]}." if place else ""
        weights[f"{before}{NAMES[ours]}.{part}"] = mx.array(values)
    model.load_weights(list(weights.items()), strict=True)
    return model


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "MXFP4", "IQ3_S", "TQ2_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_are_mlx_lms_of_the_same_weights(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tied = kind != "Q4_0"
    tensors = write_tiny(tmp_path / "x.gguf", architecture, kind, tied=tied)
    path = resolve(str(tmp_path / "x.gguf"))
    ours = load(path, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    format_ = "mxfp4" if kind == "MXFP4" else f"{BITS.get(kind)}-bit affine"
    assert ours.quantization == (f"{format_} g32" if kind in HALVES else "none")
    wanted = theirs(architecture, tensors, tied=tied)(mx.array(PROMPT))
    off = mx.abs(ours.model(mx.array(PROMPT)) - wanted).max() / mx.abs(wanted).max()
    assert off.item() < TOLERANCE, off.item()
    assert mx.abs(wanted[:, 1:] - wanted[:, :-1]).max().item() > 0.1, "the logits say nothing"


def test_mxfp4_beside_other_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in gpt-oss: each module of the smaller part is named in config.json with its mode."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mixed, other = (write_tiny(tmp_path / "x.gguf", "llama", kind) for kind in ("Q8_0", "MXFP4"))
    mixed |= {name: other[name] for name in other if "ffn_down" in name}
    write_tiny(tmp_path / "x.gguf", tensors=mixed)
    path = resolve(str(tmp_path / "x.gguf"))
    downs = {f"model.layers.{layer}.mlp.down_proj": "mxfp4" for layer in range(LAYERS)}
    quantization = json.loads((path / "config.json").read_text())["quantization"]
    assert quantization.pop("mode") == "affine" and quantization.pop("bits") == 8
    assert {name: own["mode"] for name, own in quantization.items() if name != "group_size"} == downs
    ours = load(path, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    assert ours.quantization == "8-bit affine g32 (also mxfp4 g32)"
    wanted = theirs("llama", mixed, tied=True)(mx.array(PROMPT))
    assert (mx.abs(ours.model(mx.array(PROMPT)) - wanted).max() / mx.abs(wanted).max()).item() < TOLERANCE


def some(**dtypes: mx.Dtype) -> dict[str, mx.array]:
    """Parameters by their last names, each half as large as the one before it."""
    names = {name.replace("__", "."): dtype for name, dtype in dtypes.items()}
    return {name: mx.zeros(64 >> i, dtype=dtype) for i, (name, dtype) in enumerate(names.items())}


def test_what_auto_casts_to_on_a_gpu():
    """Scales of 32 bits become float16, and norms of 32 bits what most is; nothing else changes."""
    f32, f16, bf16 = mx.float32, mx.float16, mx.bfloat16
    plain = some(a__weight=bf16, a__e_score_correction_bias=f32)
    four = some(a__weight=mx.uint32, a__scales=f32, b__scales=f16, norm__weight=f32)
    eight = some(a__weight=mx.uint32, a__scales=f16, input_layernorm__weight=f32)
    mxfp4 = some(a__weight=mx.uint32, a__scales=mx.uint8, b__weight=bf16, norm__weight=f32)
    assert [gpu_dtype(one, "llama") for one in (plain, four, eight, mxfp4)] == [None, f16, f16, bf16]
    assert [gpu_dtype(one, "gemma3_text") for one in (four, eight)] == [bf16, bf16]
    assert gpu_dtype(four, "gpt_oss") == bf16
    assert gpu_dtype(some(a__weight=f32, norm__weight=f32), "llama") is None
    assert gpu_dtype(some(a__weight=bf16, a__scales=bf16, norm__weight=bf16), "llama") is None


def test_on_a_gpu_wide_scales_are_rounded_and_the_error_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tiny(tmp_path / "x.gguf", "llama", "Q4_K")
    path = resolve(str(tmp_path / "x.gguf"))
    exact = load(path, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    assert "rounded" not in caplog.text
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        prepared = prepare(path, dtype="auto", trust_remote_code=False)
    assert prepared.dtype == mx.float16 and not any(one.dtype == mx.float32 for one in prepared.plan)
    rounded = prepared.materialise(0, lambda *_: None)
    said = re.search(r"rounded to float16: weights differ by at most (\S+) \((\S+)\); --dtype", caplog.text)
    assert said is not None
    ours, theirs = (dict(one.model.named_modules())[said[2]] for one in (rounded, exact))
    off = mx.abs(dequantise(ours) - dequantise(theirs)).max().item()
    assert 0 < off <= float(said[1]) < 4 * off


def dequantise(module: Any) -> mx.array:
    scales, biases = (module[part].astype(mx.float32) for part in ("scales", "biases"))
    return mx.dequantize(module["weight"], scales, biases, group_size=module.group_size, bits=module.bits)


def test_mixed_types_and_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Q4_K_M has them: most matrices Q4_K, some Q6_K, an embedding of F16. Text comes back through our tokenizer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from_4, from_6 = (write_tiny(tmp_path / "x.gguf", "llama", kind) for kind in ("Q4_K", "Q6_K"))
    plain = write_tiny(tmp_path / "x.gguf", "llama", "F16")
    mixed = {**from_4, "token_embd.weight": plain["token_embd.weight"]}
    mixed |= {name: from_6[name] for name in from_6 if "ffn_down" in name}
    write_tiny(tmp_path / "x.gguf", tensors=mixed)
    path = resolve(str(tmp_path / "x.gguf"))
    config = json.loads((path / "config.json").read_text())
    four, eight = ({"group_size": 32, "bits": bits, "mode": "affine"} for bits in (4, 8))
    six = {f"model.layers.{layer}.mlp.down_proj": eight for layer in range(LAYERS)}
    assert config["quantization"] == {**four, **six}
    ours = load(path, dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    wanted = theirs("llama", mixed, tied=True)(mx.array(PROMPT))
    off = mx.abs(ours.model(mx.array(PROMPT)) - wanted).max() / mx.abs(wanted).max()
    assert TOLERANCE < off.item() < 0.05, "Q6_K is quantised again"
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode("hello, wörld")) == "hello, wörld" and tokenizer.eos_ids == {2}
