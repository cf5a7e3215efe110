"""Translates forms of config.json that mlx-lm's model files do not read into those that they do.

transformers 5 writes the rotary embedding's settings into `rope_parameters`, at one level or by the kind of attention.
Most model files of mlx-lm read `rope_theta` and `rope_scaling`; without them they take the default of their family in
silence, and the model answers nonsense. So they do with `tie_word_embeddings`, which a config may leave out: the
weights then say whether there is a head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MOVED = ("rope_theta", "partial_rotary_factor")
"""Fields that transformers 5 has moved into `rope_parameters`."""


HEAD = re.compile(r"(^|\.)(lm_head|output|output_layer|embed_out|head)\.weight$")
"""Tensors that turn the last hidden state into logits."""


def translate(config: Mapping[str, Any], tensors: Iterable[str]) -> dict[str, Any]:
    """Fields to add to a config.json, or to replace in it, before mlx-lm builds the model.

    Args:
        tensors: names of the tensors in the weights.
    """
    added = _rope_fields(config)
    text = config.get("text_config")
    if "tie_word_embeddings" not in config and not text:
        added["tie_word_embeddings"] = not any(HEAD.search(name) for name in tensors)
    if isinstance(text, Mapping) and (nested := _rope_fields(text)):
        added["text_config"] = {**text, **nested}
    elif "text_config" in config and text is None:
        added["text_config"] = {}
    return added


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `rope_parameters` under their former names, where the config does not have them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return {}
    local: Any = None
    if isinstance(rope.get("full_attention"), Mapping):  # two embeddings, as Gemma 3's
        local = rope.get("sliding_attention")
        rope = rope["full_attention"]
    found = {name: rope[name] for name in MOVED if name in rope}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        found["rope_scaling"] = dict(rope)
    if isinstance(local, Mapping) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    return {name: value for name, value in found.items() if config.get(name) is None}
