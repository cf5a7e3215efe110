"""Tiny random models on disk: config, weights and a working tokenizer, in mlx-lm's file format.

Matrices are scaled: at default initialisation greedy output is one repeated token, and a cache that never rolls back
would pass every test (design: Proof). As a script:
`cd tests && python -m support.models FAMILY DIRECTORY`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model
from support.families import COMMON, FAMILIES, VOCAB, WEIGHTS, Config, Weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make_model(
    family: str,
    path: Path,
    *,
    quantize: Mapping[str, Any] | None = None,
    seed: int | None = None,
    dtype: mx.Dtype = mx.float32,
    **overrides: Any,
) -> Path:
    """Write a model of a family (a key of `families.FAMILIES`) into the directory `path`.

    Args:
        quantize: arguments of mlx-lm's quantisation, e.g. `{"bits": 4, "group_size": 32}`.
        seed: of the random weights; the family's own where not given.
        dtype: of the weights.
        overrides: entries of config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = make_config(family, **overrides)
    weights = WEIGHTS.get(family, Weights())
    model = build(config, weights if seed is None else weights._replace(seed=seed), dtype)
    if quantize is not None:
        model, config = quantize_model(model, config, **{"group_size": 32, "bits": 4, **quantize})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    tensors = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), tensors, metadata={"format": "mlx"})
    write_tokenizer(path, config.get("vocab_size", VOCAB))
    return path


def make_config(family: str, **overrides: Any) -> Config:
    """The config.json of a family: COMMON and its own entries, without keys that the model file does not know."""
    model_type = family.partition(":")[0]
    entries = {**COMMON, **FAMILIES[family], **overrides, "model_type": model_type}
    if "layer_types" in entries:  # one per layer, or else transformers does not load the tokenizer
        entries["layer_types"] = entries["layer_types"][-entries["num_hidden_layers"] :]
    if isinstance(entries.get("text_config"), dict):
        entries["text_config"] = {**COMMON, **entries["text_config"]}
        known = {"vocab_size": VOCAB, "text_config": entries["text_config"]}
        known.update({k: v for k, v in FAMILIES[family].items() if k != "text_config"})
    else:
        signature = inspect.signature(_model_file(model_type).ModelArgs)
        known = {k: v for k, v in entries.items() if k in signature.parameters}
    return {**known, "model_type": model_type, "eos_token_id": EOS, "bos_token_id": BOS}


def build(config: Config, weights: Weights, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The model of a config with random weights: scaled matrices, and vectors with noise on their initial values."""
    gain = weights.gain
    mx.random.seed(weights.seed)
    module = _model_file(config["model_type"])
    model: nn.Module = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))

    def scaled(name: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if weight.ndim < 2:
            weight = weight + 0.1 * mx.random.normal(weight.shape)
        elif mx.std(weight).item() > 0:
            weight = weight * (gain * (weights.embedding if "embed_tokens" in name else 1.0))
        else:
            weight = weight + gain * 0.577 / weight.shape[-1] ** 0.5 * mx.random.normal(weight.shape)
        return weight.astype(dtype)

    model.update(tree_map_with_path(scaled, model.parameters()))
    mx.eval(model.parameters())
    return model


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level BPE whose merges are pairs of letters: every id of the vocabulary has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    special = ["<pad>", "<s>", "</s>"]
    merges = pairs[: max(0, vocab_size - len(special) - len(alphabet))]
    vocabulary = [*special, *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _model_file(model_type: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{model_type}")


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]))
