"""Decides which models can be served, and how, by running them instead of by their names (design: Ragged rows).

`inspect` runs a model on mlx-lm's own caches, evaluates nothing, and reads the shapes of the caches. `check_model`
(`check.py`) compares ragged rows with those caches on a few tokens and has the last word. Short tables hold the facts
that a few tokens cannot show; `tools/conformance.py` runs every model file of mlx-lm and shows that the tables are
complete (`docs/models.md`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from phalanx.errors import EngineError, ModelUnsupported
from phalanx.model.cache.layer_layout import (
    CacheFacts,
    GroupLayout,
    Heads,
    KvLayout,
    Layout,
    StateLayout,
    bytes_per_row,
    bytes_per_token,
    leaves,
    single_caches,
)
from phalanx.model.check import FOREIGN, check_model
from phalanx.model.model_limits import own_context
from phalanx.model.modules import model_files
from phalanx.model.stage import Stage, cannot_be_cut

__all__ = ["CacheFacts", "check_model", "inspect"]

GROUPED_MASK = frozenset({"gemma2"})
"""Model files that split heads into groups before masking. Their mask is `[rows, 1, 1, L, S]`."""

ONE_ROW = {
    "afm7": "its KV-reusing layers take their position from the number of keys",
    "gpt_bigcode": "its position embedding takes one integer offset",
    "llama4": "its chunked attention takes one integer offset",
    "minimax_m3_vl": "its block selection places queries at the end of the keys",
}
"""Model files whose code takes one position for all rows. The runner computes the rows of a forward one by one."""

REFUSED = {
    "longcat_flash_ngram": "its n-gram context has another length in every row",
    "phi3small": "mlx-lm adds its boolean masks to the scores, so its output depends on how a prompt is cut",
}
"""Model files that cannot be served although their caches have counterparts here."""


def inspect(model: Module, config: Mapping[str, Any], stage: Stage | None = None) -> CacheFacts:
    """The layout and limits of a model's caches. Builds graphs and evaluates none.

    Of a stage, all caches are listed. Those of other stages' layers have no keys, values or state, and so take no
    bytes; their windows, and whether any is recurrent, count as in the whole model.

    Args:
        config: the model's config.json.
        stage: the layers that the model consists of; None for all.

    Raises:
        ModelUnsupported: a cache has no counterpart here, or mlx-lm itself cannot run the model, or not these layers
            alone; says which and why.
    """
    files = model_files(model)
    for name in sorted(files & REFUSED.keys()):
        raise ModelUnsupported(f"Models of mlx-lm's `{name}` cannot be served: {REFUSED[name]}.")
    stock = _stock_caches(model, config)
    _dry_run(model, stock, config, stage)
    layouts = tuple(_layout(cache, f"layer {i}") for i, cache in enumerate(stock))
    recurrent = any(isinstance(leaf, StateLayout) for leaf in leaves(layouts))
    one_row = _one_row_reason(model, files) if stage is None else stage.whole.one_row
    return CacheFacts(
        layouts=layouts,
        supports_rollback=not recurrent,
        recurrent=recurrent,
        bytes_per_token=bytes_per_token(layouts),
        bytes_per_row=bytes_per_row(layouts),
        one_row=one_row,
        mask_dims=5 if files & GROUPED_MASK else 4,
        max_len=_max_len(model, config) if stage is None else stage.whole.max_len,
        description=_describe(stock, layouts, one_row),
    )


def _one_row_reason(model: Module, files: frozenset[str]) -> str:
    """Why the rows of a forward are computed one by one; empty if they are computed together."""
    for name in sorted(files & ONE_ROW.keys()):
        return ONE_ROW[name]
    if _dynamic_rope(model):
        return "its `dynamic` RoPE scaling takes one integer offset"
    return ""


def _dynamic_rope(model: Module) -> list[int]:
    """Lengths in tokens up to which `dynamic` RoPE scaling does not change the frequencies.

    Beyond them mlx-lm's frequencies depend on the number of tokens in a forward, so output would depend on how a prompt
    is split. Such models are served up to that length only.
    """
    modules = [m for m in model.modules() if type(m).__name__ == "DynamicNTKScalingRoPE"]
    return [int(m.max_position_embeddings) for m in modules]


def _stock_caches(model: Module, config: Mapping[str, Any]) -> list[Any]:
    try:
        caches = make_prompt_cache(model)
    except FOREIGN as error:
        raise ModelUnsupported(f"mlx-lm cannot make caches for {_name(config)}: {error!r}.") from error
    for i, cache in enumerate(caches):
        _check_class(cache, f"layer {i}", config)
    return list(caches)


def _check_class(cache: Any, where: str, config: Mapping[str, Any]) -> None:
    kind = type(cache)
    if kind is CacheList:
        for part in cache.caches:
            _check_class(part, where, config)
    elif kind not in (KVCache, RotatingKVCache, ConcatenateKVCache, ChunkedKVCache, ArraysCache):
        raise ModelUnsupported(
            f"{_name(config)} cannot be served: {where} keeps its state in {kind.__module__}.{kind.__name__}, "
            "which has no counterpart with rows of different lengths."
        )
    elif kind is RotatingKVCache and cache.keep:
        raise ModelUnsupported(f"{_name(config)} cannot be served: {where} pins its first {cache.keep} tokens.")


def _dry_run(model: Module, caches: list[Any], config: Mapping[str, Any], stage: Stage | None) -> None:
    """Build, but do not evaluate, a prefill of two tokens and a decode step: `caches` then have their shapes.

    Raises:
        ModelUnsupported: mlx-lm fails, or the logits are fewer than the vocabulary that the config claims.
    """
    try:
        model(mx.zeros((1, 2), dtype=mx.int32), cache=list(caches))
        logits = model(mx.zeros((1, 1), dtype=mx.int32), cache=list(caches))
    except (EngineError, *FOREIGN) as error:
        if stage is not None:
            reason = error.message if isinstance(error, EngineError) else repr(error)
            raise cannot_be_cut(stage.name, f"{stage} cannot run without the others: {reason.rstrip('.')}") from error
        raise ModelUnsupported(f"mlx-lm itself cannot run {_name(config)} on two tokens: {error!r}.") from error
    _check_vocabulary(config, logits.shape[-1])


def _check_vocabulary(config: Mapping[str, Any], n_logits: int) -> None:
    """Refuse a config.json that claims ids beyond the model's own: they would be read from behind its embeddings."""
    claimed = (config if "vocab_size" in config else config.get("text_config") or {}).get("vocab_size")
    if isinstance(claimed, int) and claimed > n_logits:
        raise ModelUnsupported(
            f"config.json: vocab_size is {claimed}, but {_name(config)} has {n_logits} logits.",
            remedy="Download the model again, or correct vocab_size.",
        )


def _layout(cache: Any, where: str) -> Layout:
    if isinstance(cache, CacheList):
        return GroupLayout(tuple(_layout(part, where) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        return StateLayout(tuple(None if a is None else (tuple(a.shape[1:]), a.dtype) for a in cache.cache))
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return KvLayout(_heads(cache.keys), _heads(cache.values), window)


def _heads(buffer: mx.array | None) -> Heads | None:
    return None if buffer is None else Heads(buffer.shape[1], buffer.shape[3], buffer.dtype)


def _max_len(model: Module, config: Mapping[str, Any]) -> int | None:
    """The longest sequence in tokens; None if the config names no limit."""
    limits = _dynamic_rope(model)
    return min(limits) if limits else own_context(config)


def _describe(stock: list[Any], layouts: tuple[Layout, ...], one_row: str) -> str:
    kinds = Counter(_kind(leaf, cache) for leaf, cache in zip(leaves(layouts), single_caches(stock), strict=True))
    text = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    return f"{text}; rows one by one: {one_row}" if one_row else text


def _kind(leaf: KvLayout | StateLayout, cache: Any) -> str:
    name = type(cache).__name__
    if isinstance(leaf, StateLayout):
        return f"{name} -> state rows (no rollback)"
    if leaf.window is not None:
        return f"{name} -> ragged rows, window {leaf.window}"
    return f"{name} -> ragged rows"


def _name(config: Mapping[str, Any]) -> str:
    return f"model type `{config.get('model_type', '?')}`"
