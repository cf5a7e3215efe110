"""Tensor-parallel recipes as data: which projections are split by outputs, which by inputs, where ranks sum.

A fifth of mlx-lm's model files have a recipe of their own (`shard()`); this module describes the others, by model file
and class. A block's input and output are whole on every rank, so a model may have some blocks that are split and some
that are not (recurrent mixers are not). `shard.py` carries the split out.
"""

from __future__ import annotations

from typing import NamedTuple

Names = tuple[str, ...]
"""Children or attributes of a block: dotted paths, `*` for all entries of a list. Absent ones are ignored."""


class Kv(NamedTuple):
    """Key and value heads. If there are fewer heads than ranks, several ranks keep the same head."""

    heads: str  # attribute: number of key and value heads
    children: Names = ("k_proj", "v_proj")  # modules with rows per key or value head
    ratio: str = ""  # attribute: query heads per key head; "" if the block has none


class Fused(NamedTuple):
    """Several projections in one matrix, each split by outputs."""

    child: str
    sizes: Names = ()  # attributes in the ratio of the parts' sizes; empty: two equal parts


class SplitRule(NamedTuple):
    """How modules of one class are split."""

    cls: str
    column: Names = ()
    """Projections split by outputs."""
    row: Names = ()
    """Projections split by inputs: each rank's result is a partial sum."""
    fused: tuple[Fused, ...] = ()
    per_head: Names = ()
    """Parameters with the heads as first axis, or modules with only such parameters."""
    norms: Names = ()
    """RMSNorms over a split vector: their sum of squares is a reduction of its own."""
    heads: Names = ()
    """Integer attributes that are divided by the number of ranks."""
    kv: Kv | None = None
    summed: bool = False
    """Ranks sum the block's output, once, instead of the output of each projection in `row`."""
    unless: str = ""
    """A block that has this attribute set cannot be split."""


def attention(
    cls: str = "Attention",
    heads: str = "n_heads",
    kv: str = "n_kv_heads",
    out: str = "o_proj",
    *,
    ratio: str = "",
    gate: Names = (),
    per_head: Names = (),
    unless: str = "",
) -> SplitRule:
    """Separate projections of queries, keys and values."""
    return SplitRule(
        cls, column=("q_proj", *gate), row=(out,), heads=(heads,), kv=Kv(kv, ratio=ratio), per_head=per_head,
        unless=unless,
    )  # fmt: skip


def normed_attention(cls: str, heads: str, kv: str) -> SplitRule:
    """Queries and keys normalised over all their heads (OLMo 2)."""
    return SplitRule(
        cls, column=("q_proj",), row=("o_proj",), heads=(heads,), norms=("q_norm", "k_norm"), per_head=("q_norm",),
        kv=Kv(kv, ("k_proj", "v_proj", "k_norm")),
    )  # fmt: skip


def packed_attention(
    cls: str, packed: str, out: str, heads: str, kv: str, *, sizes: Names = (), gate: Names = ()
) -> SplitRule:
    """Queries, keys and values in one matrix, one after the other."""
    counts = (heads, kv) if kv != heads else (heads,)
    return SplitRule(
        cls, column=gate, row=(out,), fused=(Fused(packed, sizes or (heads, kv, kv)),),
        heads=tuple(dict.fromkeys((*counts, *sizes))),
    )  # fmt: skip


def latent_attention(cls: str, *, out: str = "o_proj", gate: Names = ()) -> SplitRule:
    """Multi-head latent attention (MLA): the projections after the compression are per head."""
    return SplitRule(
        cls, column=("q_proj", "q_b_proj", "kv_b_proj", *gate), row=(out,), heads=("num_heads",),
        per_head=("embed_q", "unembed_out"),
    )  # fmt: skip


def mlp(cls: str = "MLP", column: Names = ("gate_proj", "up_proj"), row: str = "down_proj") -> SplitRule:
    """A feed-forward block."""
    return SplitRule(cls, column=column, row=(row,))


def packed_mlp(cls: str = "MLP", packed: str = "gate_up_proj", row: str = "down_proj") -> SplitRule:
    """Gate and up in one matrix."""
    return SplitRule(cls, row=(row,), fused=(Fused(packed),))


def experts(cls: str, switch: str = "switch_mlp", shared: str = "shared_experts") -> SplitRule:
    """A mixture of experts: every expert is split, the router is whole on every rank."""
    both = (switch, shared)
    return SplitRule(
        cls, column=tuple(f"{part}.{name}" for part in both for name in ("gate_proj", "up_proj", "fc1")),
        row=tuple(f"{part}.{name}" for part in both for name in ("down_proj", "fc2")), summed=True,
    )  # fmt: skip


PLAIN = (attention(), mlp())
NUM_HEADS = ("num_attention_heads", "num_key_value_heads")
LATENT = ("num_heads", "num_key_value_heads")

PLAMO = packed_attention(
    "Attention", "qkv_proj", "o_proj", "q_num_heads", "k_num_heads", sizes=("q_proj_dim", "k_proj_dim", "v_proj_dim")
)._replace(heads=("q_num_heads", "k_num_heads", "v_num_heads", "q_proj_dim", "k_proj_dim", "v_proj_dim"))

RECIPES: dict[str, tuple[SplitRule, ...]] = {
    "Klear": (attention("KlearAttention", *NUM_HEADS), mlp("KlearMLP"), experts("KlearSparseMoeBlock", "experts")),
    "afmoe": (attention(gate=("gate_proj",)), mlp(), experts("AfmoeMoE", "experts")),
    "apertus": (attention("ApertusAttention", *NUM_HEADS), mlp("ApertusMLP", ("up_proj",))),
    "baichuan_m1": (mlp(),),  # attention is not split: it convolves keys and values
    "bailing_hybrid": (latent_attention("MultiLatentAttention", out="dense"), mlp(), experts("SparseMoeBlock")),
    "bailing_moe": (
        packed_attention("BailingMoeAttention", "query_key_value", "dense", *NUM_HEADS),
        mlp("BailingMoeMLP"),
        experts("BailingMoeSparseMoeBlock"),
    ),
    "bailing_moe_linear": (
        packed_attention("Attention", "query_key_value", "dense", *NUM_HEADS),
        mlp(),
        experts("SparseMoeBlock"),
    ),
    "bailing_moe_v3": (
        latent_attention("BailingMLA", out="dense", gate=("g_proj",)),
        mlp("BailingMLP"),
        experts("BailingSparseMoE"),
    ),
    "cohere": (attention(per_head=("q_norm",))._replace(kv=Kv("n_kv_heads", ("k_proj", "v_proj", "k_norm"))), mlp()),
    "cohere2": PLAIN,
    "dbrx": (
        packed_attention("Attention", "Wqkv", "out_proj", *LATENT)._replace(heads=(*LATENT, "d_model")),
        SplitRule("SparseMoeBlock", column=("experts.*.v1", "experts.*.w1"), row=("experts.*.w2",), summed=True),
    ),
    "deepseek": (
        attention("DeepseekAttention", "num_attention_heads", "num_kv_heads"),
        mlp("DeepseekMLP"),
        experts("DeepseekMoE"),
    ),
    "deepseek_v3": (latent_attention("DeepseekV3Attention"), mlp("DeepseekV3MLP"), experts("DeepseekV3MoE")),
    "dots1": (attention("Dots1Attention"), mlp("Dots1MLP"), experts("Dots1MoE", "experts")),
    "ernie4_5": PLAIN,
    "ernie4_5_moe": (attention(), mlp("Ernie4_5_MLP"), experts("Ernie4_5_MoeMLP")),
    "exaone": (mlp("MLP", ("c_fc_0", "c_fc_1"), "c_proj"),),  # attention is not split: it expects all heads
    "exaone4": PLAIN,
    "falcon_h1": (attention("FalconH1Attention", "num_heads", "num_kv_heads"), mlp("FalconH1MLP")),
    "gear": PLAIN,
    "gemma": PLAIN,
    "gemma2": (attention(ratio="repeats"), mlp()),
    "gemma3_text": (attention(ratio="repeats"), mlp()),
    "gemma4_text": (attention(), mlp(), experts("Experts", "switch_glu")),
    "glm": (attention("GLMAttention", *NUM_HEADS), packed_mlp("GLMMLP")),
    "glm4": (attention("Glm4Attention"), packed_mlp("Glm4MLP")),
    "gpt2": (packed_attention("Attention", "c_attn", "c_proj", "n_head", "n_head"), mlp("MLP", ("c_fc",), "c_proj")),
    "gpt_neox": (
        SplitRule("Attention", column=("query_key_value",), row=("dense",), heads=("num_attention_heads",)),
        mlp("MLP", ("dense_h_to_4h",), "dense_4h_to_h"),
    ),
    "gptj": (
        SplitRule("GPTJAttention", ("q_proj", "k_proj", "v_proj"), ("out_proj",), heads=("num_attention_heads",)),
        mlp("GPTJMLP", ("fc_in",), "fc_out"),
    ),
    "granite": PLAIN,
    "granitemoe": (attention("GraniteMoeAttention"), experts("GraniteMoeMoE")),
    "granitemoehybrid": (
        attention("GraniteMoeHybridAttention"),
        experts("GraniteMoeHybridMoE"),
        packed_mlp("GraniteMoeHybridSharedMLP", "input_linear", "output_linear"),
        mlp("GraniteMoeHybridMLP"),
    ),
    "helium": (attention("HeliumAttention"), mlp("HeliumMLP")),
    "hunyuan": (attention(), mlp(), experts("MoeBlock", shared="shared_mlp")),
    "hunyuan_v1_dense": PLAIN,
    "internlm2": (
        SplitRule("Attention", column=("wqkv",), row=("wo",), heads=("n_heads", "n_kv_heads")),
        mlp("MLP", ("w1", "w3"), "w2"),
    ),
    "internlm3": (attention(ratio="n_kv_groups"), mlp()),
    "jamba": (attention("JambaAttention", *NUM_HEADS), mlp("JambaMLP"), experts("JambaSparseMoeBlock")),
    "kimi_linear": (latent_attention("KimiMLAAttention"), mlp("KimiMLP"), experts("KimiSparseMoE")),
    "laguna": (attention(gate=("g_proj",)), mlp(), experts("MoE", shared="shared_expert")),
    "lfm2": (attention(out="out_proj"), mlp("MLP", ("w1", "w3"), "w2")),
    "lfm2_moe": (attention(out="out_proj"), mlp(), experts("Lfm2MoeSparseMoeBlock")),
    "lille-130m": (
        packed_attention("Lille130mAttention", "qkv_proj", "out_proj", "n_head", "n_kv_heads"),
        mlp("Lille130mMLP"),
    ),
    "llama": PLAIN,
    "llama4": (attention(), mlp(), experts("MoE", "experts", "shared_expert")),
    "llama4_text": PLAIN,
    "mellum": (attention(), experts("MellumSparseMoeBlock")),
    "mimo": PLAIN,
    "mimo_v2_flash": (attention(per_head=("attention_sink_bias",)), mlp(), experts("MoE")),
    "minicpm": (attention("Attention", *LATENT, ratio="num_key_value_groups"), mlp()),
    "minicpm3": (latent_attention("Attention"), mlp()),
    "mixtral": (attention("MixtralAttention", *LATENT), experts("MixtralSparseMoeBlock")),
    "muse_glimmer": (attention(gate=("gate_proj",)), mlp()),
    "nanbeige": PLAIN,
    "nanochat": (
        SplitRule(
            "Attention",
            column=("c_q",),
            row=("c_proj",),
            heads=("num_heads", "hidden_size"),
            kv=Kv("num_kv_heads", ("c_k", "c_v")),
        ),
        mlp("MLP", ("c_fc",), "c_proj"),
    ),
    "nemotron": (attention(), mlp("MLP", ("up_proj",))),
    "nemotron-nas": PLAIN,
    "nemotron_h": (
        attention("NemotronHAttention", *LATENT),
        mlp("NemotronHMLP", ("up_proj",)),
        SplitRule(
            "NemotronHMoE",
            column=("switch_mlp.fc1", "shared_experts.up_proj"),
            row=("switch_mlp.fc2", "shared_experts.down_proj"),
            summed=True,
            unless="fc2_latent_proj",
        ),
    ),
    "olmo2": (normed_attention("Attention", "n_heads", "n_kv_heads"), mlp()),
    "olmo3": (normed_attention("Olmo3Attention", *NUM_HEADS), mlp("Olmo3MLP")),
    "olmo_hybrid": (normed_attention("Attention", *NUM_HEADS), mlp()),
    "olmoe": (normed_attention("Attention", "n_heads", "n_kv_heads"), experts("OlmoeSparseMoeBlock")),
    "openelm": (
        packed_attention("Attention", "qkv_proj", "out_proj", "n_heads", "n_kv_heads"),
        packed_mlp("MLP", "proj_1", "proj_2"),
    ),
    "phi": (
        attention("PhiAttention", *LATENT, "dense", ratio="repeats"),
        mlp("PhiMLP", ("fc1",), "fc2"),
    ),
    "phi3": (packed_attention("Attention", "qkv_proj", "o_proj", "n_heads", "n_kv_heads"), packed_mlp()),
    "phimoe": (attention(), experts("PhiMoESparseMoeBlock")),
    "phixtral": (
        packed_attention("RoPEAttention", "Wqkv", "out_proj", "num_heads", "num_heads"),
        experts("MOE"),
    ),
    "plamo2": (
        PLAMO._replace(per_head=("q_weight", "k_weight")),
        packed_mlp(),
    ),
    "plamo3": (
        PLAMO,
        packed_mlp(),
    ),
    "qwen": (
        packed_attention("Attention", "c_attn", "c_proj", "num_attention_heads", "num_attention_heads"),
        mlp("MLP", ("w1", "w2"), "c_proj"),
    ),
    "qwen2": PLAIN,
    "qwen2_moe": (attention(), experts("Qwen2MoeSparseMoeBlock", shared="shared_expert")),
    "qwen3": PLAIN,
    "qwen3_moe": (attention(), mlp(), experts("Qwen3MoeSparseMoeBlock")),
    "qwen3_next": (
        attention("Qwen3NextAttention", *NUM_HEADS),
        mlp("Qwen3NextMLP"),
        experts("Qwen3NextSparseMoeBlock", shared="shared_expert"),
    ),
    "recurrent_gemma": (mlp("MLPBlock"),),  # attention is not split: its code has one key head, fixed
    "seed_oss": PLAIN,
    "spark2_5": (
        packed_attention("Attention", "q_k_v_proj", "out_proj", "n_heads", "n_kv_heads", gate=("g_proj",))._replace(
            heads=("n_heads", "n_kv_heads", "q_size", "kv_size")
        ),
        mlp(),
    ),
    "stablelm": (attention("Attention", *LATENT, unless="qk_layernorm"), mlp()),
    "starcoder2": (attention(), mlp("MLP", ("c_fc",), "c_proj")),
    "talkie": (
        SplitRule(
            "Attention",
            column=("attn_query", "attn_key", "attn_value"),
            row=("attn_resid",),
            heads=("n_heads",),
            per_head=("head_gain",),
        ),
        mlp("MLP", ("mlp_gate", "mlp_linear"), "mlp_resid"),
    ),
    "telechat3": (attention("Telechat3Attention", *NUM_HEADS), mlp("Telechat3MLP")),
    "youtu_llm": (latent_attention("YoutuLLMAttention"), mlp("YoutuLLMMLP")),
}
"""By model file. Those for which mlx-lm has no recipe, and those whose blocks such model files use."""

REFUSED = {
    "muse_spark": "mlx-lm's recipe reads the weights while it splits them",
}
"""Model files whose mlx-lm recipe cannot be used, and why."""

ENDS_IN_SUM: dict[tuple[str, str], str] = {
    ("deepseek_v2", "DeepseekV2MoE"): "switch_mlp.down_proj",
    ("deepseek_v3", "DeepseekV3MoE"): "switch_mlp.down_proj",
    ("deepseek_v32", "DeepseekV32MoE"): "switch_mlp.down_proj",
    ("exaone_moe", "MoE"): "switch_mlp.down_proj",
    ("glm4_moe", "MoE"): "switch_mlp.down_proj",
    ("glm4_moe_lite", "Glm4MoeLiteMoE"): "switch_mlp.down_proj",
    ("gpt_oss", "MLPBlock"): "experts.down_proj",
    ("minimax", "MiniMaxSparseMoeBlock"): "switch_mlp.down_proj",
    ("minimax_m3_vl", "SparseMoeBlock"): "switch_mlp.down_proj",
    ("mistral4", "Mistral4MoE"): "switch_mlp.down_proj",
    ("qwen3_5", "GatedDeltaNet"): "out_proj",
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock"): "switch_mlp.down_proj",
    ("qwen3_next", "Qwen3NextSparseMoeBlock"): "switch_mlp.down_proj",
    ("step3p5", "Step3p5MoE"): "switch_mlp.down_proj",
}
"""Blocks with an mlx-lm recipe that end with the sum over ranks, and the projection whose output they sum."""

FEWER_KV: dict[tuple[str, str], Kv] = {
    ("exaone_moe", "Attention"): Kv("n_kv_heads"),
    ("glm4_moe", "Attention"): Kv("n_kv_heads"),
    ("gpt_oss", "AttentionBlock"): Kv("num_key_value_heads"),
    ("iquestloopcoder", "Attention"): Kv("n_kv_heads"),
    ("llama", "Attention"): Kv("n_kv_heads"),
    ("minimax", "MiniMaxAttention"): Kv("num_key_value_heads", ("k_proj", "v_proj", "k_norm")),
    ("ministral3", "Attention"): Kv("n_kv_heads"),
    ("qwen2", "Attention"): Kv("n_kv_heads"),
    ("qwen3", "Attention"): Kv("n_kv_heads"),
    ("qwen3_moe", "Attention"): Kv("n_kv_heads"),
    ("step3p5", "Step3p5Attention"): Kv("num_kv_heads"),
}
"""Attention with an mlx-lm recipe that also works for more ranks than heads, if each key and value head is repeated."""

RATIOS = frozenset({"repeats", "num_key_value_groups", "n_kv_groups"})
"""Integer attributes that a split does not divide: query heads per key head."""
