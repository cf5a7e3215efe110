"""Models from GGUF files: MLX's weights are those of the file, and their logits mlx-lm's of the same weights."""

from __future__ import annotations

import importlib
import json
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
from phalanx.model.loading.load import load
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
