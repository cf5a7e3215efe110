"""What a GGUF file's metadata and tensors mean in mlx-lm's words: names, config.json, the order of rotary rows.

llama.cpp's names of tensors and keys: gguf-py's constants.py. Architectures are data at the top of this file.
"""

from __future__ import annotations

import array
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import ModelUnsupported, WeightsError
from phalanx.model.gguf.gguf_blocks import BITS, GROUP, Array
from phalanx.model.gguf.gguf_header import DAMAGED, GgufHeader, GgufTensor, shown

OTHER_FORMAT = "Download the model in mlx-lm's or Transformers' format."
PLAIN = ("F32", "F16", "BF16")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""llama.cpp's names of modules -> mlx-lm's."""
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FREQUENCIES = "rope_freqs.weight"
LOW, HIGH = 1.0, 4.0  # of Llama 3: `low_freq_factor` and `high_freq_factor`
LLAMA3_CONTEXT = 8192  # tokens of Llama 3, which 3.1 to 3.3 extend


class Architecture(NamedTuple):
    """What sets an architecture apart."""

    class_name: str
    modules: Mapping[str, str] = BLOCK
    biased: tuple[str, ...] = ()
    paired: bool = False
    """Whether the rows of a rotary pair are side by side: llama.cpp reorders them so for this architecture."""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", paired=True),
    "qwen2": Architecture("Qwen2ForCausalLM", biased=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("Qwen3ForCausalLM", {**BLOCK, **QK_NORMS}),
}
REFUSED = ("expert_count", "attention.sliding_window", "attention.scale", "embedding_scale", "logit_scale")
"""Keys that change what the model computes in ways that are not taken over yet."""


class Metadata:
    """The values of a file, by keys with or without the architecture before them."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values
        self.architecture = self.get("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise self.refused(f"architecture {shown(self.architecture)}, taken are {', '.join(ARCHITECTURES)}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value; `*.` at the start of a key stands for the architecture.

        Raises:
            WeightsError: it is of another type, or missing where there is no default.
        """
        found: Any = self.raw(key)
        found = default if found is None else found
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, float) and not math.isfinite(found)):
            what = "is missing" if found is None else f"is {shown(str(found)[:64])}, not of type {kind.__name__}"
            raise self.damaged(f"{self._whole(key)} {what}")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1.

        Raises:
            WeightsError: of `get`, or it is less.
            ModelUnsupported: each layer has its own.
        """
        if isinstance(self.raw(key), array.array):
            raise self.refused(f"{self._whole(key)} is another in each layer")
        found: int = self.get(key, int, default)
        if found < 1:
            raise self.damaged(f"{self._whole(key)} is {found}, not a number from 1")
        return found

    def strings(self, key: str) -> list[str]:
        """A list of texts."""
        found: list[str] = self.get(key, list)
        if not all(type(text) is str for text in found):
            raise self.damaged(f"{key} is not a list of texts")
        return found

    def numbers(self, key: str, length: int) -> Sequence[int]:
        """An array of so many numbers."""
        found: Sequence[int] = self.get(key, array.array)
        if len(found) != length:
            raise self.damaged(f"{key} has {len(found)} elements, {length} are wanted")
        return found

    def raw(self, key: str) -> Any:
        """A value of any type; None if the file has no such key."""
        return self._values.get(self._whole(key))

    def _whole(self, key: str) -> str:
        return f"{self.architecture}{key[1:]}" if key.startswith("*.") else key

    def damaged(self, fault: str) -> WeightsError:
        """The error that says what is wrong with the file."""
        return WeightsError(f"{self.file} is damaged: {fault}.", remedy=DAMAGED)

    def refused(self, what: str) -> ModelUnsupported:
        """The error that says what cannot be taken over."""
        return ModelUnsupported(f"{self.file} cannot be imported: {what}.", remedy=OTHER_FORMAT)


class Named(NamedTuple):
    """A tensor with the name of its module and parameter in mlx-lm."""

    tensor: GgufTensor
    module: str
    part: str
    pairs_of: int = 0  # rows of a head whose rotary pairs are to be taken apart; 0: the rows stay


def name_tensors(metadata: Metadata, header: GgufHeader) -> list[Named]:
    """The tensors of a model in the order of the file, all of them and no others.

    Raises:
        ModelUnsupported: there is one that its architecture does not have here, or of a type that is not taken over.
        WeightsError: one is missing, or has a wrong shape.
    """
    for key in REFUSED:
        if metadata.raw(f"*.{key}"):
            raise metadata.refused(f"it has {metadata.architecture}.{key}")
    wanted = _wanted(metadata, len(header.tensors))
    named = []
    for tensor in header.tensors:
        if tensor.name == FREQUENCIES:
            continue
        if tensor.name not in wanted:
            raise metadata.refused(f"tensor {shown(tensor.name)} is not known of {metadata.architecture}")
        found = Named(tensor, *wanted.pop(tensor.name))
        _check_tensor(metadata, found)
        named.append(found)
    wanted.pop("output.weight", None)  # the head is the embedding
    if wanted:
        raise metadata.damaged(f"it lacks tensor {min(wanted)}")
    return named


def _wanted(metadata: Metadata, n_tensors: int) -> dict[str, tuple[str, str, int]]:
    """By a tensor's name, the other fields of `Named`."""
    kind = ARCHITECTURES[metadata.architecture]
    layers = metadata.count("*.block_count")
    if layers > n_tensors:
        raise metadata.damaged(f"it says to have {layers} layers, but has {n_tensors} tensors")
    found = {f"{ours}.weight": (theirs, "weight", 0) for ours, theirs in TOP.items()}
    pairs_of = head_size(metadata) if kind.paired else 0
    for layer in range(layers):
        for ours, theirs in kind.modules.items():
            rows = pairs_of if ours in ("attn_q", "attn_k") else 0
            for part in ("weight", "bias") if ours in kind.biased else ("weight",):
                found[f"blk.{layer}.{ours}.{part}"] = (f"model.layers.{layer}.{theirs}", part, rows)
    return found


def _check_tensor(metadata: Metadata, named: Named) -> None:
    tensor = named.tensor
    is_vector = named.part == "bias" or named.module.endswith("norm")
    if len(tensor.shape) != (1 if is_vector else 2):
        raise metadata.damaged(f"tensor {tensor.name} has the shape {tensor.shape}")
    if tensor.type.name not in (PLAIN if is_vector else (*PLAIN, *BITS)):
        raise ModelUnsupported(
            f"{metadata.file} cannot be imported: tensor {tensor.name} is of type {tensor.type.name}.",
            remedy=f"Take a file of another quantisation, such as Q4_K_M or Q8_0 (types {', '.join(BITS)}).",
        )
    if named.pairs_of and (tensor.shape[0] % named.pairs_of or named.pairs_of % 2):
        raise metadata.damaged(f"tensor {tensor.name} has {tensor.shape[0]} rows for heads of {named.pairs_of}")


def head_size(metadata: Metadata) -> int:
    """Width of an attention head.

    Raises:
        ModelUnsupported: keys and values differ, or only a part of the head is rotated.
    """
    size = metadata.count("*.attention.key_length", _default_head(metadata))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(f"*.{key}", size) != size:
            raise metadata.refused(f"its {key} is not {size}, the width of its keys")
    return size


def _default_head(metadata: Metadata) -> int:
    return metadata.count("*.embedding_length") // metadata.count("*.attention.head_count")


def config_of(metadata: Metadata, named: Sequence[Named], factors: Array | None, ends: Sequence[int]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        factors: the tensor of rotary factors, if there is one.
        ends: the ids that end an answer.
    """
    heads = metadata.count("*.attention.head_count")
    config = {
        "model_type": metadata.architecture,
        "architectures": [ARCHITECTURES[metadata.architecture].class_name],
        "hidden_size": metadata.count("*.embedding_length"),
        "num_hidden_layers": metadata.count("*.block_count"),
        "intermediate_size": metadata.count("*.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("*.attention.head_count_kv", heads),
        "rms_norm_eps": metadata.get("*.attention.layer_norm_rms_epsilon", float),
        "vocab_size": next(one.tensor.shape[0] for one in named if one.module == TOP["token_embd"]),
        "max_position_embeddings": metadata.count("*.context_length"),
        "rope_theta": metadata.get("*.rope.freq_base", float, 10000.0),
        "tie_word_embeddings": not any(one.module == "lm_head" for one in named),
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
    }
    if metadata.raw("tokenizer.ggml.bos_token_id") is not None:
        config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id", int)
    size = head_size(metadata)
    if metadata.architecture == "qwen2" and size != _default_head(metadata):
        raise metadata.refused("mlx-lm's qwen2 has no width of heads of its own")
    if metadata.raw("*.attention.key_length") is not None or metadata.architecture == "qwen3":
        config["head_dim"] = size
    if scaling := rope_scaling(metadata, factors, config["rope_theta"]):
        config["rope_scaling"] = scaling
    if quantization := _quantization(named):
        config["quantization"] = quantization
    return config


def _quantization(named: Sequence[Named]) -> dict[str, Any]:
    """The bits of most modules, and then of each that has others."""
    bits = {one.module: BITS[one.tensor.type.name] for one in named if one.tensor.type.name in BITS}
    if not bits:
        return {}
    most = Counter(bits.values()).most_common(1)[0][0]
    others = {name: {"group_size": GROUP, "bits": own} for name, own in sorted(bits.items()) if own != most}
    return {"group_size": GROUP, "bits": most, **others}


def rope_scaling(metadata: Metadata, factors: Array | None, theta: float) -> dict[str, Any] | None:
    """The entry `rope_scaling` of config.json; None without any.

    Raises:
        ModelUnsupported: the scaling is another than mlx-lm's; names it.
    """
    kind = metadata.get("*.rope.scaling.type", str, "none")
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise metadata.refused(f"it has {FREQUENCIES} beside rope.scaling.type {shown(kind)}")
        factor, pairs = float(factors.max()), head_size(metadata) // 2
        known = len(factors) == pairs and 1 <= factor < math.inf
        if not known or not np.allclose(factors, llama3_factors(factor, theta, pairs), rtol=1e-4):
            raise metadata.refused(f"the factors in {FREQUENCIES} are not those of Llama 3")
        found = {"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH}
        return {**found, "original_max_position_embeddings": LLAMA3_CONTEXT}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.refused(f"rope.scaling.type {shown(kind)}")
    scaling = {"rope_type": kind, "factor": metadata.get("*.rope.scaling.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.count("*.rope.scaling.original_context_length")
    return scaling


def llama3_factors(factor: float, theta: float, pairs: int) -> Array:
    """By what Llama 3.1 divides the frequency of each rotary pair (llama.cpp's convert_hf_to_gguf.py)."""
    lengths = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    smooth = np.clip((LLAMA3_CONTEXT / lengths - LOW) / (HIGH - LOW), 0, 1)
    factors: Array = 1 / ((1 - smooth) / factor + smooth)
    return factors
