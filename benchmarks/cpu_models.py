"""Models with random 4-bit weights, of real shapes and a small one, in the formats of mlx-lm and of llama.cpp.

Both formats have 4.5 bits per weight: MLX's affine 4 bit in groups of 64 with 16-bit scale and offset, and Q4_0, in
which 32 weights share a 16-bit scale. MLX's 16 bits are bfloat16, as in published models of these shapes; in the small
model they are float32, since stock MLX on CPUs is 10 to 30 times slower with 16 bits and would be all that is measured.
Neither file needs training, a download or a quantiser. The rows of the output layer that belong to single bytes and to
the end-of-sequence token are zero, so that greedy decoding never picks them: answers are as long as asked for and every
token is text.
"""

from __future__ import annotations

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 64
SCALE = 0.01
Q4_0_BLOCK = 32  # weights
Q4_0_BYTES = 18  # a half, then 16 bytes of nibbles
VOCAB = 32_000
EOS = "<eos>"
BYTES = 256
CONFIG = {
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class Shape:
    """An architecture, as entries of its config.json."""

    name: str
    config: dict[str, Any]
    dtype: mx.Dtype = mx.bfloat16  # of scales, offsets and what is not quantised


def _config(model_type: str, **entries: Any) -> dict[str, Any]:
    return {**CONFIG, "model_type": model_type, **entries}


def _mixture(**entries: Any) -> dict[str, Any]:
    """A mixture of experts in every layer."""
    return _config(
        "qwen3_moe",
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        **entries,
    )


SMALL = Shape("random-llama-100m", CONFIG, mx.float32)
SHAPES = {
    "llama-1b": Shape(
        "llama-1b",
        _config(
            "llama",
            hidden_size=2048,
            num_hidden_layers=16,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
        ),
    ),
    "qwen3-1.5b": Shape(
        "qwen3-1.5b",
        _config(
            "qwen3",
            hidden_size=2048,
            num_hidden_layers=28,
            intermediate_size=6144,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
    ),
    "qwen3-moe": Shape(
        "qwen3-moe",
        _mixture(
            hidden_size=1024,
            intermediate_size=3072,
            moe_intermediate_size=384,
            num_experts=32,
            num_experts_per_tok=4,
            head_dim=64,
        ),
    ),
    "qwen3-moe-7b": Shape(  # of OLMoE's size: 7 G parameters, 1.3 G of them active per token
        "qwen3-moe-7b",
        _mixture(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
            head_dim=128,
        ),
    ),
}


def write_mlx(shape: Shape, folder: Path) -> Path:
    """Write the model for mlx-lm, unless it exists. Returns its path."""
    path = folder / f"{shape.name}-mlx"
    if (path / "complete").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    silent = sorted(write_tokenizer(path))
    config = {**shape.config, "quantization": {"group_size": GROUP, "bits": 4}}
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    nn.quantize(model, group_size=GROUP, bits=4, class_predicate=_quantised)
    draw = np.random.default_rng(0)
    tensors: dict[str, mx.array] = {}
    for name, array in tree_flatten(model.parameters()):
        tensor = _random(name, array, draw, shape.dtype)
        if name in ("lm_head.scales", "lm_head.biases"):
            tensor[mx.array(silent)] = 0.0
        tensors[name] = tensor
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "complete").touch()
    return path


def write_tokenizer(path: Path) -> set[int]:
    """Write a byte-level tokenizer: one token per byte of text. Returns the ids of EOS and the byte tokens."""
    draw = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words: dict[str, None] = {}
    while len(words) < VOCAB - 1 - len(alphabet):
        words["Ġ" + "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8)))] = None
    vocabulary = {token: i for i, token in enumerate([EOS, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return set(range(1 + len(alphabet)))


def _quantised(path: str, module: nn.Module) -> bool:
    """Whether a module is quantised: all but the router of a mixture of experts, as in converted models."""
    return hasattr(module, "to_quantized") and not path.endswith(".gate")


def _random(name: str, array: mx.array, draw: np.random.Generator, dtype: mx.Dtype) -> mx.array:
    if array.dtype == mx.uint32:
        return mx.array(draw.integers(0, 1 << 32, array.shape, np.uint32))
    if name.endswith(".scales"):
        return mx.full(array.shape, SCALE, dtype)
    if name.endswith(".biases"):
        return mx.full(array.shape, -7.5 * SCALE, dtype)
    if array.ndim == 1:
        return mx.ones(array.shape, dtype)
    return (mx.random.normal(array.shape) * 0.02).astype(dtype)


def write_gguf(shape: Shape, folder: Path) -> Path:
    """Write the same shape for llama.cpp: all matrices Q4_0 but the router of a mixture of experts."""
    path = folder / f"{shape.name}.gguf"
    if path.exists():
        return path
    config = shape.config
    kind = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}[config["model_type"]]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, kind)
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    experts = config.get("num_experts", 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    draw = np.random.default_rng(0)

    def quantised(name: str, *shape: int) -> None:
        blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // Q4_0_BLOCK, Q4_0_BYTES), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(SCALE).tobytes(), np.uint8)
        rows = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    quantised("token_embd.weight", config["vocab_size"], width)
    quantised("output.weight", config["vocab_size"], width)
    ones("output_norm.weight", width)
    for i in range(layers):
        ones(f"blk.{i}.attn_norm.weight", width)
        ones(f"blk.{i}.ffn_norm.weight", width)
        quantised(f"blk.{i}.attn_q.weight", heads * head_dim, width)
        quantised(f"blk.{i}.attn_k.weight", kv_heads * head_dim, width)
        quantised(f"blk.{i}.attn_v.weight", kv_heads * head_dim, width)
        quantised(f"blk.{i}.attn_output.weight", width, heads * head_dim)
        if kind != "llama":
            ones(f"blk.{i}.attn_q_norm.weight", head_dim)
            ones(f"blk.{i}.attn_k_norm.weight", head_dim)
        if experts:
            inner = config["moe_intermediate_size"]
            router = draw.normal(size=(experts, width)).astype(np.float32) * 0.02
            writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
            quantised(f"blk.{i}.ffn_gate_exps.weight", experts, inner, width)
            quantised(f"blk.{i}.ffn_up_exps.weight", experts, inner, width)
            quantised(f"blk.{i}.ffn_down_exps.weight", experts, width, inner)
        else:
            inner = config["intermediate_size"]
            quantised(f"blk.{i}.ffn_gate.weight", inner, width)
            quantised(f"blk.{i}.ffn_up.weight", inner, width)
            quantised(f"blk.{i}.ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)
    return path
