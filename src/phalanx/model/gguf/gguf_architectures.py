"""The supported architectures as data: llama.cpp's tensors and keys beside those of mlx-lm's model files.

Sources: llama.cpp's conversion/*.py and src/models/*.cpp, gguf-py's constants.py, mlx-lm's models/*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from phalanx.model.gguf import gguf_fields
from phalanx.model.gguf.gguf_fields import Config, head_size, kv_heads, latent_key, latent_value
from phalanx.model.gguf.gguf_header import shown
from phalanx.model.gguf.gguf_metadata import Metadata


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


def _of(key: str) -> Callable[[Metadata], int]:
    return lambda metadata: metadata.count(f"*.{key}")


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
    "latent": _of("attention.kv_lora_rank"),
    "q_latent": _of("attention.q_lora_rank"),
    "rotated": _of("rope.dimension_count"),
    "unrotated": lambda metadata: latent_key(metadata) - metadata.count("*.rope.dimension_count"),
    "value": latent_value,
    "unrotated_keys": lambda metadata: (
        metadata.count("*.attention.head_count") * (latent_key(metadata) - metadata.count("*.rope.dimension_count"))
    ),
    "keys": lambda metadata: metadata.count("*.attention.head_count") * latent_key(metadata),
    "values": lambda metadata: metadata.count("*.attention.head_count") * latent_value(metadata),
    "shared_experts": lambda metadata: (
        metadata.count("*.expert_shared_count") * metadata.count("*.expert_feed_forward_length")
    ),
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
LATENT_ATTENTION = {
    "attn_kv_a_mqa.weight": Slot("self_attn.kv_a_proj_with_mqa", "latent+rotated hidden"),
    "attn_kv_a_norm.weight": Slot("self_attn.kv_a_layernorm", "latent"),
    "attn_output.weight": Slot("self_attn.o_proj", "hidden values"),
}
WHOLE_QUERIES = {"attn_q.weight": Slot("self_attn.q_proj", "keys hidden")}
LATENT_QUERIES = {
    "attn_q_a.weight": Slot("self_attn.q_a_proj", "q_latent hidden"),
    "attn_q_a_norm.weight": Slot("self_attn.q_a_layernorm", "q_latent"),
    "attn_q_b.weight": Slot("self_attn.q_b_proj", "keys q_latent"),
}
KEYS_AND_VALUES = {"attn_kv_b.weight": Slot("self_attn.kv_b_proj", "unrotated_keys+values latent")}
SPLIT_KEYS_AND_VALUES = {
    "attn_k_b.weight": Slot("self_attn.kv_b_proj", "heads latent unrotated", part="keys"),
    "attn_v_b.weight": Slot("self_attn.kv_b_proj", "heads value latent", part="values"),
}
"""Of each head the rows of both, the first transposed, are mlx-lm's `weight`."""
ABSORBED_KEYS_AND_VALUES = {
    "attn_k_b.weight": Slot("self_attn.embed_q", "heads latent unrotated"),
    "attn_v_b.weight": Slot("self_attn.unembed_out", "heads value latent"),
}
SHARED_EXPERTS = {
    "ffn_gate_inp.weight": Slot("mlp.gate", "experts hidden", plain=True),
    "ffn_gate_shexp.weight": Slot("mlp.shared_experts.gate_proj", "shared_experts hidden"),
    "ffn_up_shexp.weight": Slot("mlp.shared_experts.up_proj", "shared_experts hidden"),
    "ffn_down_shexp.weight": Slot("mlp.shared_experts.down_proj", "hidden shared_experts"),
}
LLAMA_BLOCK = {**NORMS, **ATTENTION, **NORM_AFTER, **MLP}

# -- architectures -------------------------------------------------------------------------------------------------

PLAIN_SCALINGS = ("linear", "yarn", "llama3")
LLAMA = Architecture("llama", "LlamaForCausalLM", LLAMA_BLOCK, PLAIN_SCALINGS, paired=True)
MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM",
    {**NORMS, **ATTENTION, **NORM_AFTER, **experts("block_sparse_moe.gate", "block_sparse_moe.switch_mlp", "ff")},
    counts={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    head="shared", paired=True,
)  # fmt: skip
MINISTRAL3 = LLAMA._replace(model_type="ministral3", class_name="Ministral3ForCausalLM", own=gguf_fields.ministral3)
OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", {**ATTENTION, **WHOLE_NORMS, **NORMS_BEHIND, **MLP}, PLAIN_SCALINGS
)  # fmt: skip
OLMO3 = OLMO2._replace(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    own=lambda metadata, config: gguf_fields.kinds_of_layers(metadata, 4),
)

QWEN_EXPERTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
GEMMA3 = Architecture(
    "gemma3_text", "Gemma3ForCausalLM", {**NORMS_AROUND, **ATTENTION, **HEAD_NORMS, **MLP}, ("linear",),
    own=gguf_fields.gemma3, shifted=True,
)  # fmt: skip
GPT_OSS = Architecture(
    "gpt_oss", "GptOssForCausalLM",
    {**NORMS, **ATTENTION, **GPT_OSS_PARTS, **experts("mlp.router", "mlp.experts")}, ("linear", "yarn"),
    counts={
        "intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    },
    own=lambda metadata, config: gguf_fields.kinds_of_layers(metadata, 2), output="own",
)  # fmt: skip

SOFTMAX, SIGMOID = 1, 2  # of `expert_gating_func`


def _deepseek(metadata: Metadata) -> Architecture:
    """DeepSeek 2 with softmax, 3 with sigmoid. Files from before multi-head latent attention have keys and values in
    one matrix, as mlx-lm's model file for DeepSeek 2 has them."""
    queries = LATENT_QUERIES if gguf_fields.has_latent_queries(metadata) else WHOLE_QUERIES
    base = {**NORMS, **queries, **LATENT_ATTENTION, **NORM_AFTER}
    routed = {**experts("mlp.gate", "mlp.switch_mlp"), **SHARED_EXPERTS}
    gating = metadata.get("*.expert_gating_func", int, 0)
    if gating == SIGMOID:
        base |= ABSORBED_KEYS_AND_VALUES
        routed["exp_probs_b.bias"] = Slot("mlp.gate", "experts", part="e_score_correction_bias")
        return DEEPSEEK3._replace(block={**base, **routed}, first_block={**base, **MLP})
    if gating not in (0, SOFTMAX):
        raise metadata.refused(f"its expert_gating_func is {gating}, neither softmax nor sigmoid")
    split = metadata.raw("*.attention.key_length_mla") is not None
    base |= SPLIT_KEYS_AND_VALUES if split else KEYS_AND_VALUES
    return DEEPSEEK2._replace(block={**base, **routed}, first_block={**base, **MLP})


DEEPSEEK2 = Architecture(
    "deepseek_v2", "DeepseekV2ForCausalLM", {}, ("yarn",),
    counts={
        "kv_lora_rank": "attention.kv_lora_rank", "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count", "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    own=gguf_fields.deepseek2, head="latent", output="own",
)  # fmt: skip
DEEPSEEK3 = DEEPSEEK2._replace(model_type="deepseek_v3", class_name="DeepseekV3ForCausalLM", own=gguf_fields.deepseek3)

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
        "gemma2", "Gemma2ForCausalLM", {**NORMS_AROUND, **ATTENTION, **MLP},
        own=gguf_fields.gemma2, output="tied", shifted=True,
    ),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM",
        {
            **NORMS, "attn_qkv.weight": Slot("self_attn.qkv_proj", "q+kv+kv hidden"),
            "attn_output.weight": ATTENTION["attn_output.weight"], **NORM_AFTER, **FUSED_MLP,
        },
        ("longrope",), own=gguf_fields.phi3, head="shared", partial=True,
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
    "deepseek2": DEEPSEEK2,
}  # fmt: skip
"""By llama.cpp's names."""
VARIANTS: Mapping[str, Callable[[Metadata], Architecture]] = {
    "llama": lambda metadata: MIXTRAL if metadata.raw("*.expert_count") else LLAMA,
    "mistral3": lambda metadata: MINISTRAL3 if metadata.raw("*.attention.temperature_scale") else LLAMA,
    "olmo2": lambda metadata: OLMO3 if metadata.raw("*.attention.sliding_window") else OLMO2,
    "deepseek2": _deepseek,
}
"""By llama.cpp's names: those that are two architectures to mlx-lm."""


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a file.

    Raises:
        ModelUnsupported: it is not one of these.
    """
    name = metadata.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise metadata.refused(f"architecture {shown(name)}, taken are {known}")
    return VARIANTS[name](metadata) if name in VARIANTS else ARCHITECTURES[name]
