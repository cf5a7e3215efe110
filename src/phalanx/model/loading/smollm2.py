"""Makes the model that comes in a package, SmolLM2-135M-Instruct, a directory as mlx-lm has them.

The weights stay bit for bit: GGUF's Q4_1 and Q8_0 are MLX's affine 4 and 8 bits in groups of 32.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from phalanx.catalog.local_models import packaged_directory
from phalanx.catalog.packaged import PACKAGE, fetch_gguf
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError

GROUP = 32  # weights that share a scale, in Q4_1 and in Q8_0
CONTROL = 3  # GGUF's type of tokens such as <|im_end|>

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


def fetch(directory: Path | None = None, report: Report = quiet) -> Path:
    """The model's directory, which is made if it does not exist.

    Args:
        directory: None: below the user's cache.

    Raises:
        ModelError: the package could not be downloaded or written; says why.
    """
    directory = directory or packaged_directory()
    if (directory / "config.json").exists():
        return directory
    report(PullProgress(f"pulling the package {PACKAGE}, 93 MB"))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # as `own_cache` wants it
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as name:
            made = Path(name) / "model"
            convert(fetch_gguf(Path(name)), made)
            if not (directory / "config.json").exists():  # else another process was quicker
                made.rename(directory)  # whole or not at all
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError where it cannot write
        if (directory / "config.json").exists():
            return directory  # another process was quicker still
        raise ModelError(
            f"smollm2 could not be written to {directory}: {' '.join(str(error).split())}",
            remedy="Make room there, and the directory writable, or set XDG_CACHE_HOME to another one.",
        ) from error
    return directory


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file (a llama, Q4_1 and Q8_0) as an mlx-lm directory."""
    tensors, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", mx.load(str(gguf), return_metadata=True))
    settings: dict[str, Any] = {
        key: value.item() if isinstance(value, mx.array) and value.size == 1 else value
        for key, value in metadata.items()
    }
    heads, kv_heads = settings["llama.attention.head_count"], settings["llama.attention.head_count_kv"]
    directory.mkdir()
    with mx.stream(mx.cpu):  # a server's process needs no context of a GPU
        weights = dict(renamed(tensors, heads, kv_heads))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config_of(settings, weights), indent=1))
    write_tokenizer(settings, directory)


def renamed(tensors: Mapping[str, mx.array], heads: int, kv_heads: int) -> Iterator[tuple[str, mx.array]]:
    """The tensors by mlx-lm's names, with the rows of queries and keys in mlx-lm's order."""
    for name, tensor in tensors.items():
        *place, part = name.split(".")
        if place[0] != "blk":
            yield f"{TOP[place[0]]}.{part}", tensor
            continue
        _, layer, module = place
        rows = {"attn_q": heads, "attn_k": kv_heads}.get(module)
        yield f"model.layers.{layer}.{BLOCK[module]}.{part}", tensor if rows is None else halves(tensor, rows)


def halves(tensor: mx.array, heads: int) -> mx.array:
    """Rows of each head from llama.cpp's order to mlx-lm's: the first keeps the two rows of a rotary pair side by side,
    the second has the first rows of all pairs, then the second ones."""
    rows = tensor.shape[0] // heads
    return tensor.reshape(heads, rows // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def config_of(settings: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """The content of config.json."""
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4}
    for name in sorted(name.removesuffix(".scales") for name in weights if name.endswith(".scales")):
        values = weights[f"{name}.scales"].shape[1] * GROUP  # in a row
        bits = weights[f"{name}.weight"].shape[1] * 32 // values
        if bits != quantization["bits"]:
            quantization[name] = {"group_size": GROUP, "bits": bits}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": settings["llama.embedding_length"],
        "num_hidden_layers": settings["llama.block_count"],
        "intermediate_size": settings["llama.feed_forward_length"],
        "num_attention_heads": settings["llama.attention.head_count"],
        "num_key_value_heads": settings["llama.attention.head_count_kv"],
        "rms_norm_eps": settings["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": settings["llama.vocab_size"],
        "max_position_embeddings": settings["llama.context_length"],
        "rope_theta": settings["llama.rope.freq_base"],
        "tie_word_embeddings": not any(name.startswith("lm_head") for name in weights),
        "eos_token_id": settings["tokenizer.ggml.eos_token_id"],
        "bos_token_id": settings["tokenizer.ggml.bos_token_id"],
        "quantization": quantization,
    }


def write_tokenizer(settings: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: a byte-level BPE that cuts numbers into digits."""
    names = settings["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in settings["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = settings["tokenizer.ggml.token_type"].tolist()
    special = [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": names[settings["tokenizer.ggml.eos_token_id"]],
        "bos_token": names[settings["tokenizer.ggml.bos_token_id"]],
        "model_max_length": settings["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": settings["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
