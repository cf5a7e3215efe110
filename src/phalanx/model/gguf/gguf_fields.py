"""Sizes and fields of config.json that a table cannot say: each is computed from a GGUF file's metadata."""

from __future__ import annotations

from typing import Any

from phalanx.model.gguf.gguf_metadata import Metadata

Config = dict[str, Any]


def head_size(metadata: Metadata) -> int:
    """Width of an attention head.

    Raises:
        ModelUnsupported: keys and values differ.
    """
    size = metadata.count("*.attention.key_length", default_head(metadata))
    if metadata.count("*.attention.value_length", size) != size:
        raise metadata.refused(f"its attention.value_length is not {size}, the width of its keys")
    return size


def default_head(metadata: Metadata) -> int:
    """Width of a head where the file names none."""
    return max(1, metadata.count("*.embedding_length") // metadata.count("*.attention.head_count"))


def kv_heads(metadata: Metadata) -> int:
    """Number of key and value heads."""
    return metadata.count("*.attention.head_count_kv", metadata.count("*.attention.head_count"))


def sliding_layers(metadata: Metadata, period: int) -> list[bool]:
    """Which layers attend to a window: all but every so many, or as an array says.

    Args:
        period: without a key.
    """
    layers, key = metadata.count("*.block_count"), "*.attention.sliding_window_pattern"
    found = metadata.raw(key)
    if found is None or type(found) is int:
        period = metadata.count(key, period)
        return [(layer + 1) % period != 0 for layer in range(layers)]
    return [bool(one) for one in metadata.numbers(key, layers)]


def kinds_of_layers(metadata: Metadata, period: int) -> Config:
    """The window, and the kind of attention of each layer, for model files that want both kinds."""
    sliding = sliding_layers(metadata, period)
    if len(set(sliding)) == 1:
        raise metadata.refused("its layers have one kind of attention, mlx-lm's model file wants two")
    kinds = ["sliding_attention" if one else "full_attention" for one in sliding]
    return {"sliding_window": metadata.count("*.attention.sliding_window"), "layer_types": kinds}


def gemma3(metadata: Metadata, config: Config) -> Config:
    """Gemma 3. mlx-lm's model file has full attention in every so many layers."""
    own = {"query_pre_attn_scalar": _gemma_scalar(metadata, layers_of_27b=62), "sliding_window_pattern": 1}
    if not metadata.get("*.attention.sliding_window", int, 0):
        return own
    sliding = sliding_layers(metadata, 6)
    periods = (p for p in range(1, len(sliding) + 1) if sliding == [(i + 1) % p != 0 for i in range(len(sliding))])
    if (period := next(periods, None)) is None:
        raise metadata.refused("its full attention is not in every so many layers")
    own |= {"sliding_window": metadata.count("*.attention.sliding_window"), "sliding_window_pattern": period}
    return {**own, "rope_local_base_freq": metadata.get("*.rope.freq_base_swa", float, 10000.0)}


def gemma2(metadata: Metadata, config: Config) -> Config:
    """mlx-lm attends to all tokens in all layers: up to the window that is the same."""
    window = metadata.count("*.attention.sliding_window", 4096)
    return {
        "query_pre_attn_scalar": _gemma_scalar(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.get("*.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.get("*.final_logit_softcapping", float, 30.0),
        "max_position_embeddings": min(config["max_position_embeddings"], window),
    }


def _gemma_scalar(metadata: Metadata, layers_of_27b: int) -> int:
    """llama.cpp's rule: the files do not tell."""
    is_27b = metadata.count("*.block_count") == layers_of_27b
    return default_head(metadata) if is_27b else head_size(metadata)


def phi3(metadata: Metadata, config: Config) -> Config:
    """Phi 3 and 4."""
    metadata.raw("*.attention.sliding_window")  # neither llama.cpp nor mlx-lm computes it
    length = metadata.count("*.rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"original_max_position_embeddings": length}


def ministral3(metadata: Metadata, config: Config) -> Config:
    """Ministral 3, whose queries grow with the position; its rotary fields lie in one of their own."""
    scaling = config.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise metadata.refused("it has attention.temperature_scale without rope.scaling.type 'yarn'")
    return {"rope_parameters": {
        **scaling, "rope_theta": config["rope_theta"], "mscale": 1.0,
        "mscale_all_dim": metadata.get("*.rope.scaling.yarn_log_multiplier", float, 0.0),
        "llama_4_scaling_beta": metadata.get("*.attention.temperature_scale", float),
    }}  # fmt: skip


# -- DeepSeek ------------------------------------------------------------------------------------------------------


def latent_key(metadata: Metadata) -> int:
    """Width of a key of multi-head latent attention, both parts; files from before it have it as that of any key."""
    return metadata.count("*.attention.key_length_mla", metadata.count("*.attention.key_length"))


def latent_value(metadata: Metadata) -> int:
    """Width of a value of multi-head latent attention."""
    return metadata.count("*.attention.value_length_mla", metadata.count("*.attention.value_length"))


def deepseek(metadata: Metadata, config: Config) -> Config:
    """Fields that DeepSeek 2 and 3 share."""
    rotated = metadata.count("*.rope.dimension_count")
    own = {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": latent_key(metadata) - rotated,
        "v_head_dim": latent_value(metadata),
        "q_lora_rank": metadata.count("*.attention.q_lora_rank") if has_latent_queries(metadata) else None,
        "first_k_dense_replace": metadata.get("*.leading_dense_block_count", int, 0),
        "routed_scaling_factor": metadata.get("*.expert_weights_scale", float, 1.0),
        "n_group": metadata.count("*.expert_group_count", 1),
        "topk_group": metadata.count("*.expert_group_used_count", 1),
    }
    size, rest = divmod(config["n_routed_experts"], own["n_group"])
    if rest or size < min(2, own["n_group"]) or own["topk_group"] > own["n_group"]:  # a group's two best are compared
        raise metadata.damaged("its expert_group_count and expert_group_used_count do not go with its expert_count")
    scaling = dict(config.get("rope_scaling", {}))
    multiplier = metadata.get("*.rope.scaling.yarn_log_multiplier", float, 0.0)
    if scaling and multiplier:  # the converter has multiplied it by 0.1
        scaling["mscale"] = scaling["mscale_all_dim"] = round(multiplier * 10, 6)
    return {**own, "rope_scaling": scaling} if scaling else own


def has_latent_queries(metadata: Metadata) -> bool:
    """Whether queries are compressed."""
    return bool(metadata.raw("*.attention.q_lora_rank"))


def deepseek2(metadata: Metadata, config: Config) -> Config:
    """DeepSeek 2. mlx-lm's model file always scales, be it by 1."""
    if metadata.get("*.expert_weights_norm", bool, False):
        raise metadata.refused("it has expert_weights_norm, which mlx-lm's deepseek_v2 does not compute")
    own = {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}, **deepseek(metadata, config)}
    return {**own, "topk_method": "group_limited_greedy" if own["n_group"] > 1 else "greedy"}


def deepseek3(metadata: Metadata, config: Config) -> Config:
    """DeepSeek 3, R1 and those like them."""
    own = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", **deepseek(metadata, config)}
    return {**own, "norm_topk_prob": metadata.get("*.expert_weights_norm", bool, False)}
