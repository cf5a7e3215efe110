"""Refuses flags that go beyond the model's config.json, before ranks start: --tp, --pp and --max-model-len.

config.json does not show everything that the ranks check, such as the groups of quantised matrices: what passes here
may still be refused by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from phalanx.config import MAX_RANKS, EngineConfig
from phalanx.dist.topology import check_layers
from phalanx.errors import ConfigError, ModelUnsupported

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
SPLIT_OTHERWISE = frozenset({"baichuan_m1", "exaone", "recurrent_gemma"})
"""Model types that can be split over numbers of ranks which do not divide their heads."""


def check_limits(config: EngineConfig, model: Mapping[str, Any]) -> None:
    """Compare the flags with a model's config.json.

    Raises:
        ModelUnsupported: a stage's ranks do not divide the model's heads; names the flag, and numbers that do.
        ConfigError: there are more stages than layers, or the context is longer than the model's own.
    """
    _check_heads(config, model)
    if (n_layers := _number(model, "num_hidden_layers")) is not None:
        check_layers(config.pipeline_parallel_size, n_layers)
    check_context(config.max_model_len, own_context(model))


def own_context(model: Mapping[str, Any]) -> int | None:
    """The longest sequence in tokens; None if config.json names no limit."""
    return next(filter(None, (_number(part, key) for part in _parts(model) for key in LENGTH_KEYS)), None)


def check_context(wanted: int | None, own: int | None) -> None:
    """Compare --max-model-len with the model's context, in tokens.

    Raises:
        ConfigError: it is longer.
    """
    if wanted is not None and own is not None and wanted > own:
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the model's own context of {own} tokens.",
            remedy="Its positions mean nothing there; use a smaller value.",
        )


def _check_heads(config: EngineConfig, model: Mapping[str, Any]) -> None:
    heads, kv_heads = _number(model, "num_attention_heads"), _number(model, "num_key_value_heads")
    if heads is None or model.get("model_type") in SPLIT_OTHERWISE:
        return
    tp = config.tensor_parallel_size
    given = str(tp) if isinstance(tp, int) else ",".join(map(str, tp))
    kinds = f"{heads} attention heads" + (f" and {kv_heads} key-value heads" if kv_heads not in (None, heads) else "")
    for ranks in config.widths:
        divides = heads % ranks == 0 and (kv_heads is None or kv_heads % ranks == 0 or ranks % kv_heads == 0)
        if not divides:
            common = gcd(heads, kv_heads or heads)
            possible = [str(n) for n in range(1, min(common, MAX_RANKS) + 1) if common % n == 0]
            raise ModelUnsupported(
                f"--tp {given}: {config.model} has {kinds}, which {ranks} does not divide.",
                remedy=f"Use --tp {' or '.join(filter(None, (', '.join(possible[:-1]), possible[-1])))}.",
            )


def _parts(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """config.json and, of a model that also reads images, its part for text."""
    text = model.get("text_config")
    return [model, text] if isinstance(text, Mapping) else [model]


def _number(model: Mapping[str, Any], key: str) -> int | None:
    values = (part.get(key) for part in _parts(model))
    return next((value for value in values if type(value) is int and value > 0), None)
