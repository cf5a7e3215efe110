"""Translates a GGUF file's metadata and tensors to mlx-lm: the tensors' names and sizes, and config.json.

`gguf_architectures.py` has what differs by architecture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import ModelUnsupported
from phalanx.model.gguf.gguf_architectures import (
    COUNTS,
    SIZES,
    TOP,
    Architecture,
    Slot,
    architecture_of,
)
from phalanx.model.gguf.gguf_blocks import BITS, GROUP, Array, mode_of
from phalanx.model.gguf.gguf_fields import default_head, head_size, kv_heads
from phalanx.model.gguf.gguf_header import BLOCK_TYPES, GgufHeader, GgufTensor, shown
from phalanx.model.gguf.gguf_metadata import Metadata

PLAIN = ("F32", "F16", "BF16")
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
"""Tensors by whose values the rotary frequencies are divided: they become a part of config.json."""
FLOAT32 = BLOCK_TYPES[0]
LOW, HIGH = 1.0, 4.0  # of Llama 3: `low_freq_factor` and `high_freq_factor`
LLAMA3_CONTEXT = 8192  # tokens of Llama 3, which 3.1 to 3.3 extend


class Named(NamedTuple):
    """A tensor with the name of its module and parameter in mlx-lm, and its shape there."""

    tensor: GgufTensor
    module: str
    part: str
    pairs_of: int = 0  # rows of a head whose rotary pairs are to be taken apart; 0: the rows stay
    shifted: bool = False  # whether 1 is to be subtracted
    heads: tuple[GgufTensor, ...] = ()  # keys and values whose rows are joined, head by head; `tensor` is the result


def name_tensors(metadata: Metadata, header: GgufHeader) -> list[Named]:
    """The tensors of a model in the order of the file, all of them and no others.

    Raises:
        ModelUnsupported: there is one that its architecture does not have here, or of a type that is not taken over.
        WeightsError: one is missing, or has a wrong shape.
    """
    if (kind := metadata.get("general.type", str, "model")) != "model":
        raise metadata.refused(f"general.type is {shown(kind)}, not a model")
    architecture = architecture_of(metadata)
    slots = _slots(metadata, architecture, header)
    sizes = _sizes(metadata, header, slots)
    named = []
    for tensor in header.tensors:
        if tensor.name in FACTORS:
            continue
        if tensor.name not in slots:
            raise metadata.refused(f"tensor {shown(tensor.name)} is not known of {metadata.architecture}")
        named.append(_named(metadata, architecture, tensor, slots.pop(tensor.name), sizes))
    if architecture.output == "either":
        slots.pop("output.weight", None)  # the head is the embedding
    if slots:
        raise metadata.damaged(f"it lacks tensor {min(slots)}")
    return _joined(named)


def _slots(metadata: Metadata, architecture: Architecture, header: GgufHeader) -> dict[str, Slot]:
    """By the names of all tensors that the file should have, their places with mlx-lm's whole names of modules."""
    layers = metadata.count("*.block_count")
    if layers > len(header.tensors):
        raise metadata.damaged(f"it says to have {layers} layers, but has {len(header.tensors)} tensors")
    found = {name: slot for name, slot in TOP.items() if (name, architecture.output) != ("output.weight", "tied")}
    present = {tensor.name.partition(".")[2].partition(".")[2] for tensor in header.tensors}
    first = metadata.get("*.leading_dense_block_count", int, 0) if architecture.first_block else 0
    for layer in range(layers):
        for name, slot in (architecture.first_block if layer < first else architecture.block).items():
            if not slot.optional or name in present:
                found[f"blk.{layer}.{name}"] = slot._replace(module=f"model.layers.{layer}.{slot.module}")
    return found


def _sizes(metadata: Metadata, header: GgufHeader, slots: Mapping[str, Slot]) -> dict[str, int]:
    """The lengths of all axes, by their names."""
    names = {name for slot in slots.values() for axis in slot.axes.split() for name in axis.split("+")}
    sizes = {name: SIZES[name](metadata) for name in names if name != "vocabulary"}
    sizes["vocabulary"] = next((one.shape[0] for one in header.tensors if one.name == "token_embd.weight"), 0)
    return sizes


def _named(
    metadata: Metadata, architecture: Architecture, tensor: GgufTensor, slot: Slot, sizes: Mapping[str, int]
) -> Named:
    part = slot.part or tensor.name.rpartition(".")[2]
    shape = tuple(sum(sizes[name] for name in axis.split("+")) for axis in slot.axes.split())
    if tensor.shape not in (shape, shape[1:] if shape[0] == 1 else shape):
        raise metadata.damaged(f"tensor {tensor.name} has the shape {tensor.shape}, by its metadata it has {shape}")
    shifted = architecture.shifted and slot.module.endswith("norm")
    plain = slot.plain or len(shape) == 1 or part not in ("weight", "keys", "values")
    if tensor.type.name not in (PLAIN[:1] if shifted else PLAIN if plain else (*PLAIN, *BITS)):
        raise ModelUnsupported(
            f"{metadata.file} cannot be imported: tensor {tensor.name} is of type {tensor.type.name}.",
            remedy=f"Take a file of another quantisation, such as Q4_K_M or Q8_0 (types {', '.join(BITS)}).",
        )
    pairs_of = head_size(metadata) if architecture.paired and slot.module.endswith((".q_proj", ".k_proj")) else 0
    if pairs_of % 2:
        raise metadata.damaged(f"its heads are {pairs_of} wide, which is odd")
    return Named(tensor._replace(shape=shape), slot.module, part, pairs_of, shifted)


def _joined(named: Sequence[Named]) -> list[Named]:
    """Keys and values that mlx-lm has in one matrix: in float32, as the rows of keys run across blocks of the file."""
    values = {one.module: one.tensor for one in named if one.part == "values"}
    found = []
    for one in named:
        if one.part == "keys":
            heads, latent, rows = one.tensor.shape
            shape = (heads * (rows + values[one.module].shape[1]), latent)
            joined = GgufTensor(one.tensor.name, FLOAT32, shape, one.tensor.start, 4 * math.prod(shape))
            found.append(Named(joined, one.module, "weight", heads=(one.tensor, values[one.module])))
        elif one.part != "values":
            found.append(one)
    return found


def config_of(
    metadata: Metadata, named: Sequence[Named], factors: Mapping[str, Array | None], ends: Sequence[int]
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        factors: the tensors of rotary factors, by their names; None: they were not read, and are not in the result.
        ends: the ids that end an answer.

    Raises:
        ModelUnsupported: the metadata have something that mlx-lm does not compute, or that is not known; names it.
    """
    architecture = architecture_of(metadata)
    counts = {**COUNTS, **architecture.counts}
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        **{field: metadata.count(f"*.{key}") for field, key in counts.items()},
        **architecture.constants,
        "num_key_value_heads": kv_heads(metadata),
        "rms_norm_eps": metadata.get("*.attention.layer_norm_rms_epsilon", float),
        "vocab_size": next(one.tensor.shape[0] for one in named if one.module == "model.embed_tokens"),
        "rope_theta": metadata.get("*.rope.freq_base", float, 10000.0),
        "tie_word_embeddings": not any(one.module == "lm_head" for one in named),
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
    }
    if (tokens := len(metadata.strings("tokenizer.ggml.tokens"))) > config["vocab_size"]:
        raise metadata.damaged(f"it has {tokens} tokens, but embeddings of {config['vocab_size']}")
    if config["rope_theta"] <= 0:
        raise metadata.damaged(f"its rope.freq_base is {config['rope_theta']}")
    if "num_experts_per_tok" in config and config["num_experts_per_tok"] > metadata.count("*.expert_count"):
        raise metadata.damaged("its expert_used_count is above its expert_count")
    if metadata.raw("tokenizer.ggml.bos_token_id") is not None:
        config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id", int)
    if any(slot.optional for slot in architecture.block.values()):
        config["attention_bias"] = any(one.module.endswith("q_proj") and one.part == "bias" for one in named)
    config |= _head_fields(metadata, architecture)
    if scaling := rope_scaling(metadata, architecture, factors, config["rope_theta"]):
        config["rope_scaling"] = scaling
    config |= architecture.own(metadata, config)
    if quantization := _quantization(named):
        config["quantization"] = quantization
    metadata.refuse_the_rest()
    return config


def _head_fields(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    if architecture.head == "latent":
        return {}
    size = head_size(metadata)
    if architecture.head == "shared" and size != default_head(metadata):
        raise metadata.refused(f"mlx-lm's {architecture.model_type} has no width of heads of its own")
    found: dict[str, Any] = {"head_dim": size} if architecture.head == "own" else {}
    rotated = metadata.count("*.rope.dimension_count", size)
    if architecture.partial:
        if rotated % 2 or rotated > size:
            raise metadata.damaged(f"its rope.dimension_count is {rotated}, of heads {size} wide")
        return {**found, "partial_rotary_factor": rotated / size}
    if rotated != size:
        raise metadata.refused(f"its rope.dimension_count is not {size}, the width of its keys")
    return found


def _quantization(named: Sequence[Named]) -> dict[str, Any]:
    """The format of most modules, and then of each that has another."""
    kinds = {one.module: one.tensor.type.name for one in named if one.tensor.type.name in BITS}
    formats = {module: (BITS[kind], mode_of(kind)) for module, kind in kinds.items()}
    if not formats:
        return {}
    most = Counter(formats.values()).most_common(1)[0][0]
    others = {module: _format(*own) for module, own in sorted(formats.items()) if own != most}
    return {**_format(*most), **others}


def _format(bits: int, mode: str) -> dict[str, Any]:
    return {"group_size": GROUP, "bits": bits, "mode": mode}


# -- rotary scaling ------------------------------------------------------------------------------------------------


def rope_scaling(
    metadata: Metadata, architecture: Architecture, factors: Mapping[str, Array | None], theta: float
) -> dict[str, Any] | None:
    """The entry `rope_scaling` of config.json; None without any.

    Raises:
        ModelUnsupported: the scaling is another than that of mlx-lm's model file; names it.
    """
    factor = metadata.get("*.rope.scaling.factor", float, 0.0)
    kind = metadata.get("*.rope.scaling.type", str, "linear" if factor else "none")
    if FREQUENCIES in factors:
        if kind not in ("none", "llama3"):
            raise metadata.refused(f"it has {FREQUENCIES} beside rope.scaling.type {shown(kind)}")
        kind = "llama3"
    if LONG in factors or SHORT in factors:
        kind = "longrope"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind not in architecture.scalings:
        raise metadata.refused(f"rope.scaling.type {shown(kind)}, which mlx-lm's {architecture.model_type} has not")
    known = {name: found for name, found in factors.items() if found is not None}
    if kind == "llama3":
        return _of_llama3(metadata, known, theta) if len(known) == len(factors) else None
    if kind == "longrope":
        metadata.raw("*.rope.scaling.attn_factor")
        return _of_long(metadata, known) if len(known) == len(factors) else None
    scaling = {"rope_type": kind, "factor": metadata.get("*.rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.count("*.rope.scaling.original_context_length")
        for field in ("beta_fast", "beta_slow"):
            if metadata.raw(f"*.rope.scaling.yarn_{field}") is not None:
                scaling[field] = metadata.get(f"*.rope.scaling.yarn_{field}", float)
    return scaling


def _of_llama3(metadata: Metadata, factors: Mapping[str, Array], theta: float) -> dict[str, Any]:
    pairs = head_size(metadata) // 2
    found = factors.get(FREQUENCIES, np.zeros(0, np.float32))
    factor = float(found.max(initial=0.0))
    known = len(found) == pairs and 1 <= factor < math.inf
    if not known or not np.allclose(found, llama3_factors(factor, theta, pairs), rtol=1e-4):
        raise metadata.refused(f"the factors in {FREQUENCIES} are not those of Llama 3")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
    return {**scaling, "original_max_position_embeddings": LLAMA3_CONTEXT}


def llama3_factors(factor: float, theta: float, pairs: int) -> Array:
    """By what Llama 3.1 divides the frequency of each rotary pair (llama.cpp's convert_hf_to_gguf.py)."""
    lengths = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    smooth = np.clip((LLAMA3_CONTEXT / lengths - LOW) / (HIGH - LOW), 0, 1)
    factors: Array = 1 / ((1 - smooth) / factor + smooth)
    return factors


def _of_long(metadata: Metadata, factors: Mapping[str, Array]) -> dict[str, Any]:
    """Phi 3's, whose queries and keys grow with the logarithm of the context's extension."""
    pairs = metadata.count("*.rope.dimension_count", head_size(metadata)) // 2
    if any(len(factors.get(name, ())) != pairs for name in (LONG, SHORT)):
        raise metadata.damaged(f"{LONG} and {SHORT} are not {pairs} numbers each")
    if not all(np.isfinite(factors[name]).all() for name in (LONG, SHORT)):
        raise metadata.damaged(f"{LONG} or {SHORT} has a value that is not finite")
    length = metadata.count("*.context_length")
    first = metadata.count("*.rope.scaling.original_context_length", length)
    wanted = math.sqrt(1 + math.log(length / first) / math.log(first)) if length > first > 1 else 1.0
    if not math.isclose(metadata.get("*.rope.scaling.attn_factor", float, 1.0), wanted, rel_tol=1e-4):
        raise metadata.refused(f"its rope.scaling.attn_factor is not {wanted:.4f}, as mlx-lm computes it")
    lists = {"long_factor": factors[LONG].tolist(), "short_factor": factors[SHORT].tolist()}
    return {"rope_type": "longrope", "type": "longrope", **lists}
