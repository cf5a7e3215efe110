"""The architectures that are taken over, as data: llama.cpp's tensors and keys beside those of mlx-lm's model files.

Sources: llama.cpp's conversion/*.py and src/models/*.cpp, gguf-py's constants.py, mlx-lm's models/*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.model.gguf.gguf_header import shown
from phalanx.model.gguf.gguf_metadata import Metadata

Config = dict[str, Any]


class Slot(NamedTuple):
    """Where mlx-lm has a tensor, and how large it must be."""

    module: str
    axes: str
    """Outermost first: names of `SIZES`, with a + between those that lie one after the other."""
    part: str = ""
    """The parameter; empty: the last word of llama.cpp's name."""
    plain: bool = False
    """Not quantised: mlx-lm computes with it as it is."""
    optional: bool = False
    """A file has it in all layers or in none."""


class Architecture(NamedTuple):
    """A model file of mlx-lm, and how it differs from llama.cpp's model."""

    model_type: str
    class_name: str
    block: Mapping[str, Slot]
    """By llama.cpp's names of the tensors in a layer."""
    scalings: tuple[str, ...] = ()
    """Kinds of rotary scaling that the model file computes."""
    counts: Mapping[str, str] = {}
    """Whole numbers of config.json beside `COUNTS` -> keys of the architecture."""
    constants: Mapping[str, Any] = {}
    own: Callable[[Metadata, Config], Config] = lambda metadata, config: {}
    """Further fields of config.json, from those that are known."""
    first_block: Mapping[str, Slot] = {}
    """The tensors of the first `leading_dense_block_count` layers."""
    head: str = "own"
    """The width of an attention head: a field of config.json (`own`), hidden_size / heads (`shared`), or `latent`."""
    output: str = "either"
    """Whether the model file has an output matrix: `either`, `own`, or `tied` to the embedding."""
    paired: bool = False
    """Whether llama.cpp has the two rows of a rotary pair side by side, mlx-lm half a head apart."""
    partial: bool = False
    """Whether a part of a head may be rotated."""
    shifted: bool = False
    """Whether llama.cpp has added 1 to the weights of norms, which mlx-lm adds when it computes."""


TOP = {
    "token_embd.weight": Slot("model.embed_tokens", "vocabulary hidden"),
    "output_norm.weight": Slot("model.norm", "hidden"),
    "output.weight": Slot("lm_head", "vocabulary hidden"),
}
COUNTS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
}  # fmt: skip


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


def _of(key: str) -> Callable[[Metadata], int]:
    return lambda metadata: metadata.count(f"*.{key}")


def kv_heads(metadata: Metadata) -> int:
    """Number of key and value heads."""
    return metadata.count("*.attention.head_count_kv", metadata.count("*.attention.head_count"))


SIZES: Mapping[str, Callable[[Metadata], int]] = {
    "1": lambda metadata: 1,
    "hidden": _of("embedding_length"),
    "heads": _of("attention.head_count"),
    "head": head_size,
    "q": lambda metadata: metadata.count("*.attention.head_count") * head_size(metadata),
    "kv": lambda metadata: kv_heads(metadata) * head_size(metadata),
    "ff": _of("feed_forward_length"),
    "experts": _of("expert_count"),
    "expert_ff": _of("expert_feed_forward_length"),
    "shared_ff": _of("expert_shared_feed_forward_length"),
}

# -- tensors -------------------------------------------------------------------------------------------------------

NORMS = {"attn_norm.weight": Slot("input_layernorm", "hidden")}
NORM_AFTER = {"ffn_norm.weight": Slot("post_attention_layernorm", "hidden")}
ATTENTION = {
    "attn_q.weight": Slot("self_attn.q_proj", "q hidden"),
    "attn_k.weight": Slot("self_attn.k_proj", "kv hidden"),
    "attn_v.weight": Slot("self_attn.v_proj", "kv hidden"),
    "attn_output.weight": Slot("self_attn.o_proj", "hidden q"),
}
BIASES = {
    "attn_q.bias": Slot("self_attn.q_proj", "q"),
    "attn_k.bias": Slot("self_attn.k_proj", "kv"),
    "attn_v.bias": Slot("self_attn.v_proj", "kv"),
}
HEAD_NORMS = {
    "attn_q_norm.weight": Slot("self_attn.q_norm", "head"),
    "attn_k_norm.weight": Slot("self_attn.k_norm", "head"),
}
WHOLE_NORMS = {
    "attn_q_norm.weight": Slot("self_attn.q_norm", "q"),
    "attn_k_norm.weight": Slot("self_attn.k_norm", "kv"),
}
MLP = {
    "ffn_gate.weight": Slot("mlp.gate_proj", "ff hidden"),
    "ffn_up.weight": Slot("mlp.up_proj", "ff hidden"),
    "ffn_down.weight": Slot("mlp.down_proj", "hidden ff"),
}
FUSED_MLP = {
    "ffn_up.weight": Slot("mlp.gate_up_proj", "ff+ff hidden"),
    "ffn_down.weight": Slot("mlp.down_proj", "hidden ff"),
}


def experts(router: str, module: str, width: str = "expert_ff") -> Mapping[str, Slot]:
    """A router, and the matrices of all experts."""
    return {
        "ffn_gate_inp.weight": Slot(router, "experts hidden"),
        "ffn_gate_exps.weight": Slot(f"{module}.gate_proj", f"experts {width} hidden"),
        "ffn_up_exps.weight": Slot(f"{module}.up_proj", f"experts {width} hidden"),
        "ffn_down_exps.weight": Slot(f"{module}.down_proj", f"experts hidden {width}"),
    }


SHARED_EXPERT = {
    "ffn_gate_inp_shexp.weight": Slot("mlp.shared_expert_gate", "1 hidden"),
    "ffn_gate_shexp.weight": Slot("mlp.shared_expert.gate_proj", "shared_ff hidden"),
    "ffn_up_shexp.weight": Slot("mlp.shared_expert.up_proj", "shared_ff hidden"),
    "ffn_down_shexp.weight": Slot("mlp.shared_expert.down_proj", "hidden shared_ff"),
}
GPT_OSS_PARTS = {
    **BIASES,
    "attn_output.bias": Slot("self_attn.o_proj", "hidden"),
    "attn_sinks.weight": Slot("self_attn", "heads", part="sinks"),
    "post_attention_norm.weight": Slot("post_attention_layernorm", "hidden"),
    "ffn_gate_inp.bias": Slot("mlp.router", "experts"),
    "ffn_gate_exps.bias": Slot("mlp.experts.gate_proj", "experts expert_ff"),
    "ffn_up_exps.bias": Slot("mlp.experts.up_proj", "experts expert_ff"),
    "ffn_down_exps.bias": Slot("mlp.experts.down_proj", "experts hidden"),
}
NORMS_AROUND = {
    "attn_norm.weight": Slot("input_layernorm", "hidden"),
    "post_attention_norm.weight": Slot("post_attention_layernorm", "hidden"),
    "ffn_norm.weight": Slot("pre_feedforward_layernorm", "hidden"),
    "post_ffw_norm.weight": Slot("post_feedforward_layernorm", "hidden"),
}  # fmt: skip
NORMS_BEHIND = {
    "post_attention_norm.weight": Slot("post_attention_layernorm", "hidden"),
    "post_ffw_norm.weight": Slot("post_feedforward_layernorm", "hidden"),
}
GLM_NORMS = {
    "post_attention_norm.weight": Slot("post_self_attn_layernorm", "hidden"),
    "post_ffw_norm.weight": Slot("post_mlp_layernorm", "hidden"),
}
LLAMA_BLOCK = {**NORMS, **ATTENTION, **NORM_AFTER, **MLP}

# -- fields of config.json that are computed -----------------------------------------------------------------------


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


def _kinds_of_layers(metadata: Metadata, period: int) -> Config:
    sliding = sliding_layers(metadata, period)
    if len(set(sliding)) == 1:
        raise metadata.refused("its layers have one kind of attention, mlx-lm's model file wants two")
    kinds = ["sliding_attention" if one else "full_attention" for one in sliding]
    return {"sliding_window": metadata.count("*.attention.sliding_window"), "layer_types": kinds}


def _gemma3(metadata: Metadata, config: Config) -> Config:
    own = {"query_pre_attn_scalar": _gemma_scalar(metadata, layers_of_27b=62), "sliding_window_pattern": 1}
    if not metadata.get("*.attention.sliding_window", int, 0):
        return own
    sliding = sliding_layers(metadata, 6)
    periods = (p for p in range(1, len(sliding) + 1) if sliding == [(i + 1) % p != 0 for i in range(len(sliding))])
    if (period := next(periods, None)) is None:
        raise metadata.refused("its full attention is not in every so many layers")
    own |= {"sliding_window": metadata.count("*.attention.sliding_window"), "sliding_window_pattern": period}
    return {**own, "rope_local_base_freq": metadata.get("*.rope.freq_base_swa", float, 10000.0)}


def _gemma2(metadata: Metadata, config: Config) -> Config:
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


def _phi3(metadata: Metadata, config: Config) -> Config:
    metadata.raw("*.attention.sliding_window")  # neither llama.cpp nor mlx-lm computes it
    length = metadata.count("*.rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"original_max_position_embeddings": length}


def _ministral3(metadata: Metadata, config: Config) -> Config:
    scaling = config.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise metadata.refused("it has attention.temperature_scale without rope.scaling.type 'yarn'")
    return {"rope_parameters": {
        **scaling, "rope_theta": config["rope_theta"], "mscale": 1.0,
        "mscale_all_dim": metadata.get("*.rope.scaling.yarn_log_multiplier", float, 0.0),
        "llama_4_scaling_beta": metadata.get("*.attention.temperature_scale", float),
    }}  # fmt: skip


# -- architectures -------------------------------------------------------------------------------------------------

PLAIN_SCALINGS = ("linear", "yarn", "llama3")
LLAMA = Architecture("llama", "LlamaForCausalLM", LLAMA_BLOCK, PLAIN_SCALINGS, paired=True)
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM",
    {**NORMS, **ATTENTION, **NORM_AFTER, **experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp", "ff")},
    counts={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    head="shared", paired=True,
)  # fmt: skip
MINISTRAL3 = LLAMA._replace(model_type="ministral3", class_name="Ministral3ForCausalLM", own=_ministral3)
OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", {**ATTENTION, **WHOLE_NORMS, **NORMS_BEHIND, **MLP}, PLAIN_SCALINGS
)  # fmt: skip
OLMO3 = OLMO2._replace(
    model_type="olmo3", class_name="Olmo3ForCausalLM", own=lambda metadata, config: _kinds_of_layers(metadata, 4)
)

QWEN_EXPERTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
GEMMA3 = Architecture(
    "gemma3_text", "Gemma3ForCausalLM", {**NORMS_AROUND, **ATTENTION, **HEAD_NORMS, **MLP}, ("linear",),
    own=_gemma3, shifted=True,
)  # fmt: skip
GPT_OSS = Architecture(
    "gpt_oss", "GptOssForCausalLM",
    {**NORMS, **ATTENTION, **GPT_OSS_PARTS, **experts("mlp.router", "mlp.experts")}, ("linear", "yarn"),
    counts={
        "intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    own=lambda metadata, config: _kinds_of_layers(metadata, 2), output="own",
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "mistral3": LLAMA,
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", {**LLAMA_BLOCK, **BIASES}, PLAIN_SCALINGS, head="shared"
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", {**LLAMA_BLOCK, **HEAD_NORMS}, PLAIN_SCALINGS),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        {**NORMS, **ATTENTION, **HEAD_NORMS, **NORM_AFTER, **experts("mlp.gate", "mlp.switch_mlp")},
        counts=QWEN_EXPERTS, constants={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {**NORMS, **ATTENTION, **BIASES, **NORM_AFTER, **experts("mlp.gate", "mlp.switch_mlp"), **SHARED_EXPERT},
        counts={**QWEN_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        constants={"norm_topk_prob": False}, head="shared", output="own",
    ),
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", {**NORMS_AROUND, **ATTENTION, **MLP}, own=_gemma2, output="tied", shifted=True
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM",
        {
            **NORMS, "attn_qkv.weight": Slot("self_attn.qkv_proj", "q+kv+kv hidden"),
            "attn_output.weight": ATTENTION["attn_output.weight"], **NORM_AFTER, **FUSED_MLP,
        },
        ("longrope",), own=_phi3, head="shared", partial=True,
    ),
    "olmo2": OLMO2,
    "smollm3": LLAMA._replace(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", constants={"no_rope_layer_interval": 4}
    ),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM",
        {
            **NORMS, **ATTENTION, **{name: slot._replace(optional=True) for name, slot in BIASES.items()},
            **NORM_AFTER, **GLM_NORMS, **FUSED_MLP,
        },
        output="own", partial=True,
    ),
}  # fmt: skip
"""By llama.cpp's names."""
VARIANTS = {
    "llama": ("expert_count", MIXTRAL),
    "mistral3": ("attention.temperature_scale", MINISTRAL3),
    "olmo2": ("attention.sliding_window", OLMO3),
}
"""By llama.cpp's names: a key, and what the architecture is where that is neither missing nor 0."""


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a file.

    Raises:
        ModelUnsupported: it is not one of these.
    """
    name = metadata.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise metadata.refused(f"architecture {shown(name)}, taken are {known}")
    if name in VARIANTS and metadata.raw(f"*.{VARIANTS[name][0]}"):
        return VARIANTS[name][1]
    return ARCHITECTURES[name]
