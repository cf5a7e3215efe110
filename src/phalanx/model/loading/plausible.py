"""Judges a config.json by the sizes of the weights before a model is built from it.

mlx-lm builds the modules that config.json asks for, at 0.1 MB a layer, before it looks at the weights: a number alone
could take all memory. The bounds are far above every known model, and each holds for every architecture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import ModelUnsupported
from phalanx.model.loading.weights import TensorInfo

MAX_LAYERS = 1024  # the deepest known models have 126
MAX_SIZE = 1 << 22  # of any dimension; the largest known, a vocabulary, has 262,144
LAYERS = re.compile(r"^(n|num)_(\w+_)?layers?$")
SIZES = re.compile(r"(^|_)(size|dims?|heads?|experts?|rank|embd|width|layers?|vocab|inner|model|ff|groups?)$")
MAIN = {
    "layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers"),
    "hidden": ("hidden_size", "model_dim", "n_embd", "d_model", "dim"),
    "vocabulary": ("vocab_size", "num_vocab"),
}
"""Fields that every config has, under one of these names; whole numbers from 1."""
INDEXES = {"altup_active_idx": "altup_num_inputs"}
"""Field -> the field that says of how many it is one; gemma3n is the only model file of mlx-lm with such a field."""
WEIGHTS_PER_BYTE = 4  # of the strongest quantisation, 2 bits


def check_sizes(file: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Check the sizes in a config.json, and that the weights on disk can be those of such a model.

    Raises:
        ModelUnsupported: names the field and its value.
    """
    for name, value in _fields(config):
        largest = MAX_LAYERS if LAYERS.search(name) else MAX_SIZE
        if type(value) is int and SIZES.search(name) and not -1 <= value <= largest:
            raise _wrong(file, name, value, f"at most {largest}")
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping):
            _check_against_weights(file, part, tensors)
            _check_indexes(file, part)


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number with the name of its field, also in lists and objects."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _fields(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _fields(item, name)
    else:
        yield name, value


def _check_against_weights(file: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    sizes = {}
    for kind, names in MAIN.items():
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            continue
        value = config[name]
        if type(value) is not int or value < 1:
            raise _wrong(file, name, value, "a whole number from 1")
        sizes[kind] = (name, value)
    if "layers" in sizes and sizes["layers"][1] > len(tensors):
        raise _wrong(file, *sizes["layers"], f"at most {len(tensors)}, the number of tensors in the weights")
    on_disk = sum(info.nbytes for info in tensors.values())
    for kind in ("vocabulary", "layers"):  # rows of `hidden` weights each: an embedding, at least one in every layer
        if kind in sizes and "hidden" in sizes:
            (rows_name, rows), (hidden_name, hidden) = sizes[kind], sizes["hidden"]
            if rows * hidden > on_disk * WEIGHTS_PER_BYTE:
                raise ModelUnsupported(
                    f"{file}: {rows_name} {rows} and {hidden_name} {hidden} need at least "
                    f"{rows * hidden // WEIGHTS_PER_BYTE} bytes of weights, but there are {on_disk}.",
                    remedy=_REMEDY,
                )


def _check_indexes(file: Path, config: Mapping[str, Any]) -> None:
    """Check numbers with which a model picks a part of an array: MLX reads beyond its end, and the process dies."""
    for name, among in INDEXES.items():
        value, size = config.get(name), config.get(among)
        if type(value) is int and type(size) is int and not 0 <= value < size:
            raise _wrong(file, name, value, f"from 0 and below {among}, which is {size}")


def _wrong(file: Path, name: str, value: Any, wanted: str) -> ModelUnsupported:
    return ModelUnsupported(f"{file}: {name} is {str(value)[:40]}; it must be {wanted}.", remedy=_REMEDY)


_REMEDY = "config.json and the weights do not belong together, or one is damaged: download the model again."
