"""Layers that sum over ranks through the `Reducer`: they replace mlx-lm's in a model that was split.

mlx-lm's own layers sum with an unchecked collective. Each layer here registers its site with a `Reducer` and sums
through it. A replaced layer keeps its state and its parameters' names and changes only its class, because its
computation before the sum stays the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx_lm.models.minimax import ShardedRMSNorm

from phalanx.dist.reduce import Reducer
from phalanx.model.loading.recipes import ENDS_IN_SUM, RECIPES
from phalanx.model.modules import class_key, descend
from phalanx.model.summed_layers import SummedLinear, SummedQuantizedLinear, SummedRMSNorm


def _summed_block(cls: type[Module]) -> type[Module]:
    """The class of an mlx-lm block, with its output summed over ranks."""

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        total: mx.array = self.all_sum(cls.__call__(self, *args, **kwargs))
        return total

    return type(f"Summed{cls.__name__}", (cls,), {"__call__": call, "__module__": cls.__module__})


def sum_through_reducer(model: Module, reducer: Reducer) -> tuple[int, list[str]]:
    """Make the layers of a split model sum through `reducer`, if their classes are known. Changes the model.

    Returns:
        The number of sites that sum through the reducer, and the classes of blocks that sum without it.
    """
    before = len(reducer.sites)
    unchecked = []
    norms = _split_norms(model)
    for path, module in reversed(model.named_modules()):  # `named_modules` lists the last layer first
        if path in norms or isinstance(module, ShardedRMSNorm):
            _replace_class(module, SummedRMSNorm, reducer, path, 1)
            module.ranks = reducer.size
        elif isinstance(module, ShardedToAllLinear):
            _replace_class(module, SummedLinear, reducer, path, module["weight"].shape[0])
        elif isinstance(module, QuantizedShardedToAllLinear):
            _replace_class(module, SummedQuantizedLinear, reducer, path, module["weight"].shape[0])
        elif isinstance(module, AllToShardedLinear):
            _replace_class(module, nn.Linear)
        elif isinstance(module, QuantizedAllToShardedLinear):
            _replace_class(module, nn.QuantizedLinear)
        elif getattr(module, "sharding_group", None) is not None:
            if last := _last_projection(module):
                _replace_class(module, _summed_block(type(module)), reducer, path, last["weight"].shape[-2])
                module.sharding_group = None
            else:
                unchecked.append(".".join(class_key(module)))
    return len(reducer.sites) - before, unchecked


def _replace_class(
    module: Module, cls: type[Module], reducer: Reducer | None = None, path: str = "", width: int = 0
) -> None:
    vars(module).pop("group", None)
    module.__class__ = cls
    if reducer is not None:
        module.all_sum = partial(reducer.all_sum, site=reducer.site(path, width))


def _last_projection(module: Module) -> Module | None:
    """The projection that makes a block's partial output; None if the block does not end with the sum over ranks."""
    file, cls = class_key(module)
    paths = [path for block in RECIPES.get(file, ()) if block.cls == cls and block.summed for path in block.row]
    paths += [ENDS_IN_SUM[file, cls]] if (file, cls) in ENDS_IN_SUM else []
    return next((projection for path in paths for projection in descend(module, path)), None)


def _split_norms(model: Module) -> set[str]:
    """Paths of the norms over split vectors, from phalanx's recipes."""
    paths = set()
    for path, module in model.named_modules():
        key = class_key(module)
        for block in RECIPES.get(key[0], ()):
            if block.cls == key[1]:
                paths |= {f"{path}.{name}" for name in block.norms if name in module}
    return paths
