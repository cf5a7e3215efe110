"""A random-weight llama of about 100 M parameters on disk, for measuring speed without a download.

4-bit weights in groups of 64 with float32 scales: on CPUs stock MLX is 10-30x slower with 16-bit scales, and the
benchmark would measure nothing else. The rows of the output layer that belong to single bytes and to the end-of-
sequence token are zero, so that greedy decoding never picks them: answers are as long as asked for and every token is
text.
"""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import quantize_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
VERSION = 1  # of the written files; a directory of another version is written again


def random_model(directory: Path) -> Path:
    """Write the model into `directory`, unless it exists. Returns its path."""
    path = directory / f"random-llama-100m-v{VERSION}"
    if (path / "complete").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path)
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(CONFIG))
    scale = nn.init.normal(0.0, 0.06)
    model.apply(lambda array: scale(array) if array.ndim == 2 else array)
    silent = mx.array(sorted(ids))
    model.lm_head.weight[silent] = 0.0
    model, config = quantize_model(model, dict(CONFIG), group_size=64, bits=4)
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
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
