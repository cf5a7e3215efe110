"""Tied models whose files also have a head: which tensors are left out, and whether they differ from the embedding.

A checkpoint of a model that computes logits with its embedding may hold the embedding a second time, as a head. About
half of mlx-lm's families with tied embeddings drop that copy themselves; the others would refuse the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from phalanx.model.loading.weight_files import some
from phalanx.model.loading.weights import SAMPLE, TensorInfo

T = TypeVar("T")

HEAD = re.compile(r"(^|\.)(lm_head|output|output_layer|embed_out|head)(\.|$)")
"""Modules that turn the last hidden state into logits."""
NUMBERED = re.compile(r"\.\d+\.")
"""Part of the name of a layer's tensors; a layer's `output` is not a head."""
PLACES = 16  # of a head that are compared; training moves nearly every row


def is_head(name: str) -> bool:
    """Whether a tensor or parameter belongs to a model's head."""
    return HEAD.search(name) is not None and NUMBERED.search(name) is None


def without_copied_head(model: Module, weights: dict[str, T], config: Mapping[str, Any]) -> dict[str, T]:
    """The weights without a head, if the model has none and its config does not ask for one.

    Args:
        weights: under the names of the model's parameters.
        config: the model's config.json as it is in the file.
    """
    if _has_head(model) or _ties(config) is False:
        return weights
    return {name: array for name, array in weights.items() if not is_head(name)}


def difference(
    model: Module, config: Mapping[str, Any], headers: Mapping[str, TensorInfo], origins: Mapping[str, TensorInfo]
) -> str:
    """A warning if samples show that the head in a tied model's files differs from its embedding; else "".

    Args:
        config: as for `without_copied_head`.
        headers: the files' tensors.
        origins: the file tensors of the model's parameters.
    """
    if (has_head := _has_head(model)) and not _ties(config):
        return ""
    embeddings = [
        origins[f"{name}.weight"]
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and f"{name}.weight" in origins
    ]
    heads = [name for name in headers if is_head(name) and name.endswith(".weight")]
    others = [name for name in heads if not _is_copy(headers[name], embeddings)]
    used = "head" if has_head else "embedding"
    return (
        f"the embedding is also the head (tie_word_embeddings), but the files' {some(others)} differs from it; "
        f"the {used} is used. If answers are bad, check config.json."
        if others
        else ""
    )


def _has_head(model: Module) -> bool:
    """Whether the model has a head of its own; without, its logits come from the embedding."""
    return any(is_head(name) for name, _ in tree_flatten(model.parameters()))


def _ties(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    own = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
    return config.get("tie_word_embeddings") if own is None else own


def _is_copy(head: TensorInfo, embeddings: Collection[TensorInfo]) -> bool:
    same = (one for one in embeddings if (one.dtype, one.shape) == (head.dtype, head.shape))
    return any(_samples(one) == _samples(head) for one in same)


def _samples(info: TensorInfo) -> list[bytes]:
    found = []
    with info.file.open("rb", buffering=0) as file:
        for place in range(PLACES):
            file.seek(info.start + max(0, info.nbytes - SAMPLE) * place // (PLACES - 1))
            found.append(file.read(min(SAMPLE, info.nbytes)))
    return found
