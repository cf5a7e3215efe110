"""Random models of mlx-lm, written as GGUF by PyPI's `gguf` the way llama.cpp's converter writes them.

Names of tensors and keys are that package's. What the converter changes is written here: rows of queries and keys
(`paired`), norms with 1 added, and names that differ from those of Transformers. Shares nothing with
`phalanx.model.gguf`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from support.gguf_files import CONTROLS, MERGES, byte_letters, random_blocks, unpaired

Array = npt.NDArray[Any]
Value = tuple[str, Any]
"""The end of a method of GGUFWriter, and what it takes."""
HIDDEN, HEADS, KV_HEADS, HEAD, FF, EXPERTS = 256, 4, 2, 64, 512, 4
VOCABULARY = len(CONTROLS) + 256 + len(MERGES)
SCALES = {"Q4_K": 0.0004, "Q5_K": 0.0004, "MXFP4": 0.02}
"""Of random blocks, for types that the package dequantises only."""
MIXED = ("Q4_K", "Q8_0", "F16", "Q4_0", "Q5_K", "F32")


class Original(NamedTuple):
    """An architecture: a config.json, and what llama.cpp's converter does with it."""

    arch: str
    """gguf's MODEL_ARCH."""
    config: dict[str, Any]
    """Over `CONFIG`; a `head_dim` of None takes the field out."""
    values: Callable[[dict[str, Any]], list[Value]] = lambda config: []
    """Metadata beside the common ones."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of mlx-lm's names -> what the converter calls them."""
    paired: bool = False
    plus_one: bool = False
    factors: Mapping[str, Array] = {}
    split_keys: bool = False
    """Whether the rows of keys and values in `kv_b_proj` become two tensors, the first transposed."""


CONFIG = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "intermediate_size": FF, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": VOCABULARY,
    "max_position_embeddings": 512, "head_dim": HEAD, "tie_word_embeddings": True,
}  # fmt: skip
COMMON = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv", "rms_norm_eps": "layer_norm_rms_eps",
    "rope_theta": "rope_freq_base", "vocab_size": "vocab_size", "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count", "num_experts": "expert_count", "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}  # fmt: skip
EXPERTS_AS_3D = (("mlp.switch_mlp", "mlp.experts"),)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


MISTRAL = {
    **YARN, "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0, "mscale": 1.0,
    "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.25,
}  # fmt: skip
LONG, SHORT = (np.linspace(1, last, HEAD // 2).astype(np.float32) for last in (6, 1.5))


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama3_factors() -> Array:
    """As the converter computes them, for heads of `HEAD` and a theta of 500,000."""
    factors = []
    for pair in range(HEAD // 2):
        length = 2 * math.pi * 500000.0 ** (2 * pair / HEAD)
        smooth = (8192 / length - 1) / (4 - 1)
        factors.append(1.0 if length < 8192 / 4 else 8.0 if length > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, np.float32)


def yarn_values(scaling: Mapping[str, Any]) -> list[Value]:
    return [
        ("rope_scaling_type", gguf.RopeScalingType.YARN), ("rope_scaling_factor", scaling["factor"]),
        ("rope_scaling_orig_ctx_len", scaling["original_max_position_embeddings"]),
        ("rope_scaling_yarn_beta_fast", scaling["beta_fast"]), ("rope_scaling_yarn_beta_slow", scaling["beta_slow"]),
    ]  # fmt: skip


def rotated(config: Mapping[str, Any]) -> list[Value]:
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return [("rope_dimension_count", int(width * config.get("partial_rotary_factor", 1)))]


def expert_width(config: Mapping[str, Any]) -> list[Value]:
    return [("expert_feed_forward_length", config.get("moe_intermediate_size", config["intermediate_size"]))]


ORIGINALS: dict[str, Original] = {
    "llama": Original("LLAMA", {"model_type": "llama"}, rotated, paired=True),
    "llama with long rotary factors": Original(
        "LLAMA", {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3}, rotated, paired=True,
        factors={"rope_freqs.weight": llama3_factors()},
    ),
    "qwen2": Original("QWEN2", {"model_type": "qwen2", "head_dim": None}),
    "qwen3": Original("QWEN3", {"model_type": "qwen3", "rope_scaling": YARN}, lambda _: yarn_values(YARN)),
    "qwen3moe": Original(
        "QWEN3MOE",
        {
            "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": 256, "norm_topk_prob": True, "tie_word_embeddings": False,
        },
        expert_width, EXPERTS_AS_3D,
    ),
    "gemma3": Original(
        "GEMMA3",
        {
            "model_type": "gemma3_text", "num_hidden_layers": 7, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": HEAD, "sliding_window": 4, "sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        lambda config: [
            ("sliding_window", 4), ("rope_scaling_type", gguf.RopeScalingType.LINEAR), ("rope_scaling_factor", 8.0),
        ],
        plus_one=True,
    ),
    "gpt-oss": Original(
        "GPT_OSS",
        {
            "model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 4,
            "rope_scaling": YARN, "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
        lambda config: [("sliding_window", 4), *expert_width(config), *yarn_values(YARN)],
        (("self_attn.sinks", "self_attn.sinks.weight"),),
    ),
    "mistral3": Original(
        "MISTRAL3",
        {"model_type": "ministral3", "head_dim": 128, "rope_parameters": MISTRAL, "tie_word_embeddings": False},
        lambda config: [
            *rotated(config), *yarn_values(MISTRAL), ("rope_scaling_yarn_log_mul", 0.5),
            ("attn_temperature_scale", MISTRAL["llama_4_scaling_beta"]),
        ],
        paired=True,
    ),
    "mistral3 without temperature": Original("MISTRAL3", {"model_type": "llama"}, rotated, paired=True),
    "gemma2": Original(
        "GEMMA2",
        {
            "model_type": "gemma2", "query_pre_attn_scalar": HEAD, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0, "max_position_embeddings": 512,
        },
        lambda config: [
            ("sliding_window", 256), ("attn_logit_softcapping", 5.0), ("final_logit_softcapping", 3.0),
        ],
        plus_one=True,
    ),
    "phi3": Original(
        "PHI3",
        {
            "model_type": "phi3", "head_dim": None, "partial_rotary_factor": 0.75, "tie_word_embeddings": False,
            "original_max_position_embeddings": 512,
        },
        lambda config: [*rotated(config), ("rope_scaling_orig_ctx_len", 512), ("sliding_window", 2)],
    ),
    "phi3 with a long context": Original(
        "PHI3",
        {
            "model_type": "phi3", "head_dim": None, "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "long_factor": LONG.tolist(), "short_factor": SHORT.tolist()},
        },
        lambda config: [
            *rotated(config), ("rope_scaling_orig_ctx_len", 128), ("sliding_window", 0),
            ("rope_scaling_attn_factors", math.sqrt(1 + math.log(512 / 128) / math.log(128))),
        ],
        factors={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    ),
    "olmo2": Original("OLMO2", {"model_type": "olmo2", "head_dim": None, "tie_word_embeddings": False}),
    "olmo3": Original(
        "OLMO2",
        {
            "model_type": "olmo3", "head_dim": None, "num_hidden_layers": 4, "sliding_window": 4,
            "rope_scaling": YARN, "tie_word_embeddings": False,
        },
        lambda config: [("sliding_window", 4), ("sliding_window_pattern", [True] * 3 + [False]), *yarn_values(YARN)],
    ),
    "smollm3": Original("SMOLLM3", {"model_type": "smollm3", "num_hidden_layers": 5}, rotated, paired=True),
    "glm4": Original(
        "GLM4",
        {
            "model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
        },
        rotated,
    ),
    "mixtral": Original(
        "LLAMA",
        {
            "model_type": "mixtral", "head_dim": None, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
        rotated,
        tuple(
            (f"model.layers.{i}.block_sparse_moe.switch_mlp.{ours}", f"layers.{i}.feed_forward.experts.{theirs}")
            for i in range(2) for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
        ),
        paired=True,
    ),
    "qwen2moe": Original(
        "QWEN2MOE",
        {
            "model_type": "qwen2_moe", "head_dim": None, "num_experts": EXPERTS, "num_experts_per_tok": 2,
            "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "tie_word_embeddings": False,
        },
        lambda config: [*expert_width(config), ("expert_shared_feed_forward_length", 256)], EXPERTS_AS_3D,
    ),
}  # fmt: skip


DEEPSEEK = {
    "head_dim": None, "num_hidden_layers": 3, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": EXPERTS, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
    "num_key_value_heads": HEADS, "tie_word_embeddings": False,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip


def deepseek_values(config: Mapping[str, Any], latent: bool = True) -> list[Value]:
    key = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    values: list[Value] = [
        *expert_width(config), *yarn_values(config["rope_scaling"]), ("kv_lora_rank", config["kv_lora_rank"]),
        ("rope_scaling_yarn_log_mul", 0.1 * config["rope_scaling"]["mscale_all_dim"]),
        ("rope_dimension_count", config["qk_rope_head_dim"]), ("expert_shared_count", config["n_shared_experts"]),
        ("expert_weights_scale", config["routed_scaling_factor"]),
        ("leading_dense_block_count", config["first_k_dense_replace"]),
    ]  # fmt: skip
    if config["q_lora_rank"] is not None:
        values += [("q_lora_rank", config["q_lora_rank"])]
    if not latent:
        return [*values, ("key_length", key), ("value_length", config["v_head_dim"])]
    rank = config["kv_lora_rank"]
    return [
        *values, ("head_count_kv", 1), ("key_length", rank + config["qk_rope_head_dim"]), ("value_length", rank),
        ("key_length_mla", key), ("value_length_mla", config["v_head_dim"]),
    ]  # fmt: skip


ORIGINALS |= {
    "deepseek2": Original(
        "DEEPSEEK2", {"model_type": "deepseek_v2", **DEEPSEEK}, deepseek_values, EXPERTS_AS_3D, split_keys=True
    ),
    "deepseek2 lite": Original(
        "DEEPSEEK2", {"model_type": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None}, deepseek_values, EXPERTS_AS_3D,
        split_keys=True,
    ),
    "deepseek2 before its keys were split": Original(
        "DEEPSEEK2", {"model_type": "deepseek_v2", **DEEPSEEK},
        lambda config: deepseek_values(config, latent=False), EXPERTS_AS_3D,
    ),
    "deepseek2 with sigmoid": Original(
        "DEEPSEEK2",
        {
            "model_type": "deepseek_v3", **DEEPSEEK, "n_group": 2, "topk_group": 1, "n_routed_experts": 8,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        lambda config: [
            *deepseek_values(config), ("expert_group_count", 2), ("expert_group_used_count", 1),
            ("expert_weights_norm", True), ("expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID),
        ],
        (
            *EXPERTS_AS_3D, ("self_attn.embed_q", "self_attn.k_b_proj"),
            ("self_attn.unembed_out", "self_attn.v_b_proj"), ("e_score_correction_bias", "e_score_correction.bias"),
        ),
    ),
}  # fmt: skip


class Written(NamedTuple):
    """The original of a file, with the weights that the file has."""

    model: Any
    config: dict[str, Any]
    weights: dict[str, Array]
    """By mlx-lm's names, in float32."""
    kinds: dict[str, str]
    """Types in the file, by mlx-lm's names."""


def write_original(
    file: Path,
    name: str,
    kind: str,
    *,
    values: Mapping[str, Any] | None = None,
    change: Callable[[str, Array], Array | None] = lambda theirs, stored: stored,
) -> Written:
    """Write a random model.

    Args:
        kind: the type of its matrices, or "mixed".
        values: further metadata, as in `Value`; they replace the original's.
        change: from the name and content of a tensor to what is written; None leaves it out.
    """
    original = ORIGINALS[name]
    config = {**CONFIG, **original.config}
    if config["head_dim"] is None:
        del config["head_dim"]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    if config["model_type"] == "gemma3_text" and config["tie_word_embeddings"]:
        model.sanitize({})  # it decides by the weights
    rng, matrices = np.random.default_rng(0), 0
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[original.arch]])
    add_values(writer, original, config, values or {})
    weights, kinds = {}, {}
    for ours, value in tree_flatten(model.parameters()):
        parts = split_shapes(config, ours) if original.split_keys and "kv_b_proj" in ours else {ours: value.shape}
        found = {}
        for part, shape in parts.items():
            kinds[part] = "F32"
            if is_matrix(part, shape):
                kinds[part] = MIXED[matrices % len(MIXED)] if kind == "mixed" else kind
                matrices += 1
            if kinds[part] == "MXFP4" and "experts" not in part:
                kinds[part] = "Q8_0"  # as OpenAI's
            if kinds[part].endswith("_K") and shape[-1] % 256:
                kinds[part] = "Q8_0"  # as llama.cpp falls back
            found[part], stored = made(original, part, shape, kinds[part], rng)
            raw = None if kinds[part] in ("F32", "F16") else gguf.GGMLQuantizationType[kinds[part]]
            theirs = converted_name(original, config, part)
            if (changed := change(theirs, stored)) is not None:
                writer.add_tensor(theirs, changed, raw_dtype=raw)
        weights[ours] = found[ours] if ours in found else joined(*found.values())
    for theirs, factors in original.factors.items():
        writer.add_tensor(theirs, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_weights([(ours, mx.array(value)) for ours, value in weights.items()], strict=True)
    return Written(model, config, weights, kinds)


def split_shapes(config: Mapping[str, Any], ours: str) -> dict[str, tuple[int, ...]]:
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    return {
        ours.replace("kv_b_proj", "k_b_proj"): (heads, latent, config["qk_nope_head_dim"]),
        ours.replace("kv_b_proj", "v_b_proj"): (heads, config["v_head_dim"], latent),
    }


def joined(keys: Array, values: Array) -> Array:
    """The reverse of what the converter does: each head has the rows of its keys, then those of its values."""
    rows = [row for key, value in zip(keys, values, strict=True) for row in (*key.T, *value)]
    return np.stack(rows)


def is_matrix(ours: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp's quantiser would convert it: not vectors, biases and routers."""
    router = ours.endswith(("mlp.gate.weight", "router.weight", "moe.gate.weight", "shared_expert_gate.weight"))
    return len(shape) > 1 and ours.endswith(".weight") and not router


def made(
    original: Original, ours: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Random weights: those of mlx-lm's parameter, and what the file has."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    turned = turned_heads(original, ours)
    if kind in SCALES:
        stored = random_blocks(kind, rows, width, rng, SCALES[kind])
        stored = stored.reshape(rows, -1)
    else:
        weights = random_weights(original, ours, shape, rng)
        stored = weights.reshape(rows, width)
        if turned:
            stored = permuted(stored.reshape(-1, *shape[1:]), turned).reshape(rows, width)
        if original.plus_one and ours.endswith("norm.weight"):
            return weights, weights + np.float32(1)
        stored = gguf.quants.quantize(stored, gguf.GGMLQuantizationType[kind])
    plain = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).reshape(shape).astype(np.float32)
    whole = stored.reshape(*shape[:-1], -1) if len(shape) > 1 else stored.reshape(shape)
    return (unpaired(plain, turned) if turned else plain), whole


def random_weights(original: Original, ours: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if ours.endswith("norm.weight"):  # of bfloat16's precision, as those of checkpoints
        return np.float32(0 if original.plus_one else 1) + (rng.integers(-64, 64, shape) / 256).astype(np.float32)
    scale = {"sinks": 1.0, "bias": 0.1}.get(ours.rpartition(".")[2], 0.08)
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def turned_heads(original: Original, ours: str) -> int:
    """How many heads have their rows in llama.cpp's order; 0: none."""
    if not original.paired:
        return 0
    return HEADS if ".q_proj." in ours else KV_HEADS if ".k_proj." in ours else 0


def permuted(weights: Array, heads: int) -> Array:
    """Rows of queries or keys as the converter's `permute` has them: those of a pair side by side."""
    size = len(weights) // heads
    order = [h * size + r // 2 + (r % 2) * (size // 2) for h in range(heads) for r in range(size)]
    return weights[order]


def converted_name(original: Original, config: Mapping[str, Any], ours: str) -> str:
    """The name in the file, by gguf's table of Transformers' names."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[original.arch], config["num_hidden_layers"])
    theirs = ours
    for part, other in original.renamed:
        theirs = theirs.replace(part, other)
    found = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
    assert found is not None, theirs
    return found


def add_values(writer: Any, original: Original, config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """The metadata of a model, and of a tokenizer with one token for each byte."""
    values: list[Value] = [(key, config[field]) for field, key in COMMON.items() if field in config]
    if "head_dim" in config:
        values += [("key_length", config["head_dim"]), ("value_length", config["head_dim"])]
    tokens = [*CONTROLS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    values += [
        *original.values(config), ("tokenizer_model", "gpt2"), ("tokenizer_pre", "gpt-2"), ("token_list", tokens),
        ("token_merges", MERGES), ("token_types", [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS))),
        ("bos_token_id", 1), ("eos_token_id", 2),
    ]  # fmt: skip
    for key, value in {**dict(values), **own}.items():
        getattr(writer, f"add_{key}")(value)
