"""Splits a model over ranks by its recipe, and finds out which rows of each parameter this rank keeps.

The recipe is mlx-lm's own `shard()` if there is one, else phalanx's (`recipes.py`). It runs twice on lazy arrays: first
on the weights, which shows which parameters it changes; then on a copy whose parameters are row numbers, which shows
the rows that remain. So the loader can read exactly those rows, whatever the recipe did to select them. A parameter
that is not a choice of rows along one axis stays as the recipe computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from phalanx.config import MAX_RANKS
from phalanx.errors import ModelUnsupported
from phalanx.model.check import FOREIGN
from phalanx.model.loading.recipes import FEWER_KV, RATIOS, RECIPES, REFUSED, Kv, SplitRule
from phalanx.model.loading.weights import Cut
from phalanx.model.modules import class_key, copy_structure, descend, model_files

FIRST_ROW = 1 << 22  # row numbers start here: exact in float32, and no arithmetic on them looks like a choice of rows


class Group(Protocol):
    """The part of a group that a recipe uses."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StubGroup:
    """A rank's number and the size of a group without connections: enough to split a model, not to run it."""

    number: int
    ranks: int

    def rank(self) -> int:
        """This rank's number."""
        return self.number

    def size(self) -> int:
        """The number of ranks."""
        return self.ranks


@dataclass(frozen=True, slots=True)
class Split:
    """The effect of a split on the parameters, by name. A parameter in neither field is whole."""

    cuts: dict[str, Cut]
    """Parameters with only some rows on this rank, along one axis."""
    computed: frozenset[str]
    """Parameters that the recipe computes."""


def split(model: Module, name: str, group: Group) -> Split:
    """Turn a model with lazy, whole weights into one rank's part of it, in place.

    Raises:
        ModelUnsupported: there is no recipe, or it cannot split this model over so many ranks; lists what it can.
    """
    if group.size() == 1:
        return Split({}, frozenset())
    recipe = _recipe(model, name)
    whole, tracer = copy_structure(model), copy_structure(model)
    try:
        before = {key: array.shape for key, array in _arrays(model).items()}
        _apply(recipe, model, group)
        after = {key: array.shape for key, array in _arrays(model).items()}
        axes = {key: _axis(before[key], shape) for key, shape in after.items() if key in before}
        cuts = _trace(recipe, tracer, {key: axis for key, axis in axes.items() if axis is not None}, group)
    except FOREIGN as error:
        raise _refusal(whole, name, group.size(), error) from error
    parts = {key: cut for key, cut in cuts.items() if cut.runs != ((0, before[key][cut.axis]),)}
    return Split(parts, frozenset(after.keys() - cuts.keys()))


def degrees(model: Module, name: str) -> list[int]:
    """The numbers of ranks over which a model with whole weights can be split, up to `MAX_RANKS`."""
    recipe = _recipe(model, name)
    return [1, *(n for n in range(2, MAX_RANKS + 1) if _splits(recipe, copy_structure(model), n))]


# -- recipes -------------------------------------------------------------------------------------------------------

Recipe = Callable[[Module, Group], None]


def _recipe(model: Module, name: str) -> Recipe:
    files = model_files(model)
    inner = getattr(model, "language_model", None)
    for file in sorted(files & REFUSED.keys()):
        raise ModelUnsupported(
            f"{name} (mlx-lm's `{file}`) cannot be split over ranks: {REFUSED[file]}.", remedy=_REMEDY
        )
    if callable(getattr(model, "shard", None)):
        return lambda model, group: model.shard(group)
    if callable(getattr(inner, "shard", None)):
        return lambda model, group: model.language_model.shard(group)
    if files & RECIPES.keys():
        return _split_blocks
    file = class_key(model)[0] or "its own file"
    raise ModelUnsupported(
        f"{name} cannot be split over ranks: neither mlx-lm nor phalanx has a recipe for `{file}`.", remedy=_REMEDY
    )


_REMEDY = "Serve it with --tp 1."


def _split_blocks(model: Module, group: Group) -> None:
    """Apply phalanx's recipes. A block that sums its output also covers all modules below it."""
    owned: set[int] = set()
    matches = []
    for _, module in model.named_modules():
        file, cls = class_key(module)
        matches += [(module, block) for block in RECIPES.get(file, ()) if block.cls == cls]
    if not matches:
        raise ValueError("none of its blocks are those of the recipe")
    for module, block in sorted(matches, key=lambda pair: not pair[1].summed):
        if id(module) not in owned:
            _split_block(module, block, group)
            if block.summed:
                owned |= {id(below) for below in module.modules()}


def _split_block(module: Module, block: SplitRule, group: Group) -> None:
    if block.unless and getattr(module, block.unless, None) not in (None, False):
        raise ValueError(f"{block.cls} with {block.unless}")
    parts = {fused.child: _segments(module, fused.child, fused.sizes) for fused in block.fused}
    for name in block.heads:
        setattr(module, name, _divide(name, getattr(module, name), group.size()))
    if block.kv is not None:
        _repeat_kv(module, block.kv, group.size())
        setattr(module, block.kv.heads, getattr(module, block.kv.heads) // group.size())
        if block.kv.ratio:
            setattr(module, block.kv.ratio, getattr(module, block.heads[0]) // getattr(module, block.kv.heads))
    for path in (*block.column, *(block.kv.children if block.kv else ())):
        for child in descend(module, path):
            shard_inplace(child, _by_output(1), group=group)
    for path, segments in parts.items():
        for child in descend(module, path):
            shard_inplace(child, _by_output(segments), group=group)
    for path in block.per_head:
        _split_heads(module, path, group)
    for path in block.row:
        for child, parent, key in _children(module, path):
            if block.summed:
                shard_inplace(child, _by_input, group=group)
                if "bias" in child:
                    child.bias = child.bias / group.size()
            else:
                parent[key] = shard_linear(child, "sharded-to-all", group=group)
    if block.summed:
        module.sharding_group = group


def _segments(module: Module, child: str, sizes: tuple[str, ...]) -> list[int]:
    """The rows at which the second and later parts of a fused matrix start."""
    [matrix] = descend(module, child)
    rows = matrix["weight"].shape[0]
    shares = [getattr(module, size) for size in sizes] or [1, 1]
    if rows % sum(shares):
        raise ValueError(f"{child} has {rows} rows for parts of {shares}")
    return [rows // sum(shares) * sum(shares[:i]) for i in range(1, len(shares))]


def _by_output(segments: int | list[int]) -> Callable[[str, mx.array], tuple[int, int | list[int]] | None]:
    def axis(path: str, weight: mx.array) -> tuple[int, int | list[int]] | None:
        if path.endswith("global_scale"):  # one number per expert
            return None
        return (-1 if path.endswith("bias") else max(weight.ndim - 2, 0)), segments

    return axis


def _by_input(path: str, weight: mx.array) -> int | None:
    return None if path.endswith(("bias", "global_scale")) else -1


def _split_heads(module: Module, path: str, group: Group) -> None:
    for child, parent, key in _children(module, path):
        if isinstance(child, mx.array):
            parent[key] = mx.split(child, group.size(), axis=0)[group.rank()]
        else:
            shard_inplace(child, lambda path, weight: 0, group=group)


def _children(module: Module, path: str) -> list[tuple[Any, Any, str]]:
    """The children at a path, each with its parent and its name there."""
    parent, _, key = path.rpartition(".")
    holders = descend(module, parent) if parent else [module]
    return [(child, holder, key) for holder in holders for child in descend(holder, key)]


def _divide(name: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"{name} is {count}, which {ranks} does not divide")
    return count // ranks


def _repeat_kv(module: Module, kv: Kv, ranks: int) -> None:
    """If there are fewer key and value heads than ranks, repeat the heads so that each rank gets one."""
    heads = getattr(module, kv.heads)
    if heads >= ranks:
        _divide(kv.heads, heads, ranks)
        return
    if ranks % heads:
        raise ValueError(f"{kv.heads} is {heads}, neither a multiple nor a divisor of {ranks}")

    def repeat(rows: mx.array) -> mx.array:
        grouped = rows.reshape(heads, rows.shape[0] // heads, *rows.shape[1:])
        return mx.repeat(grouped, ranks // heads, axis=0).reshape(-1, *rows.shape[1:])

    for path in kv.children:
        for child in descend(module, path):
            child.update(tree_map(repeat, child.parameters()))
    setattr(module, kv.heads, ranks)


# -- applying and checking -----------------------------------------------------------------------------------------


def _apply(recipe: Recipe, model: Module, group: Group) -> None:
    """Run the recipe, and check the results that shapes alone do not show.

    Raises:
        ValueError: an integer attribute was not divided exactly, or a quantised matrix does not fit its scales.
    """
    before = {path: _integers(module) for path, module in model.named_modules()}
    whole = {path: module["global_scale"] for path, module in model.named_modules() if "global_scale" in module}
    if recipe is not _split_blocks:
        for module in model.modules():
            if (kv := FEWER_KV.get(class_key(module))) is not None:
                _repeat_kv(module, kv, group.size())
    recipe(model, group)
    for path, module in model.named_modules():
        for name, value in _integers(module).items():
            _check_integer(f"{path}.{name}", before.get(path, {}).get(name), value, group.size())
        _check_quantised(path, module)
        if path in whole and module["global_scale"] is not whole[path]:
            raise ValueError(f"{path} has one scale per expert, which mlx-lm's recipe splits")


def _integers(module: Module) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int and name not in RATIOS}


def _check_integer(name: str, before: int | None, after: int, ranks: int) -> None:
    if before in (None, after, after * ranks):
        return
    replicated = after == 1 and ranks % max(before, 1) == 0 and before < ranks
    if not replicated:
        raise ValueError(f"{name} is {before}, which cannot be divided by {ranks}")


def _check_quantised(path: str, module: Module) -> None:
    bits, group_size = getattr(module, "bits", None), getattr(module, "group_size", None)
    weight, scales = module.get("weight"), module.get("scales")
    if bits and group_size and weight is not None and scales is not None:
        if weight.shape[-1] * 32 != scales.shape[-1] * group_size * bits or weight.shape[:-1] != scales.shape[:-1]:
            raise ValueError(f"the parts of {path} do not align with its quantisation groups of {group_size}")


def _splits(recipe: Recipe, model: Module, ranks: int) -> bool:
    try:
        _apply(recipe, model, StubGroup(0, ranks))
    except FOREIGN:
        return False
    return True


def _refusal(model: Module, name: str, ranks: int, error: Exception) -> ModelUnsupported:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if reason.startswith("[quantize]"):  # from the constructor of the quantised layer for a part
        reason = f"a part of a matrix would end inside a quantisation group ({reason.removeprefix('[quantize] ')})"
    possible = [str(n) for n in degrees(model, name)]
    return ModelUnsupported(
        f"{name} cannot be split over {ranks} ranks: {reason.rstrip('.')}.",
        remedy=f"Serve it with --tp {' or '.join(filter(None, (', '.join(possible[:-1]), possible[-1])))}.",
    )


# -- tracing -------------------------------------------------------------------------------------------------------


def _arrays(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _axis(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """The only axis along which a shape changed; the last one if none did; None if several did."""
    if len(before) != len(after) or not before or max(before) >= FIRST_ROW or not min(before):
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return None if len(axes) > 1 else (axes or [len(before) - 1])[0]


def _trace(recipe: Recipe, tracer: Module, axes: dict[str, int], group: Group) -> dict[str, Cut]:
    """Run the recipe on row numbers instead of weights. Each tensor has size 1 along all axes except its own.

    Returns:
        The remaining rows of each tensor from which the recipe only chose rows.
    """
    modules, arrays = dict(tracer.named_modules()), _arrays(tracer)
    numbers = {}
    for name, axis in axes.items():
        path, _, leaf = name.rpartition(".")
        shape = [1] * arrays[name].ndim
        if leaf == "weight" and "scales" in modules[path]:
            shape[-1] = modules[path].group_size * modules[path].bits // 32  # one group, as constructors require
        shape[axis] = arrays[name].shape[axis]
        rows = mx.arange(FIRST_ROW, FIRST_ROW + shape[axis], dtype=mx.float32)
        rows = rows.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        numbers[name] = mx.broadcast_to(rows, shape)
    shapes = {name: array.shape for name, array in numbers.items()}
    tracer.update(tree_unflatten(list(numbers.items())))
    _apply(recipe, tracer, group)
    arrays = _arrays(tracer)
    remaining = {name: _rows(arrays[name], shapes[name], axis) for name, axis in axes.items()}
    mx.eval([rows for rows in remaining.values() if rows is not None])
    runs_of = {name: _runs(rows, shapes[name][axes[name]]) for name, rows in remaining.items() if rows is not None}
    return {name: Cut(axes[name], runs) for name, runs in runs_of.items() if runs is not None}


def _rows(remaining: mx.array, shape: tuple[int, ...], axis: int) -> mx.array | None:
    """The remaining row numbers as [rows, width]; None if the recipe changed more of `shape` than the axis."""
    unsplit = (*remaining.shape[:axis], shape[axis], *remaining.shape[axis + 1 :])
    if remaining.dtype != mx.float32 or unsplit != shape:
        return None
    return mx.moveaxis(remaining, axis, 0).reshape(remaining.shape[axis], -1)


def _runs(remaining: mx.array, size: int) -> tuple[tuple[int, int], ...] | None:
    """The remaining ones of `size` rows, as runs; None if the recipe computed instead of choosing rows."""
    rows = np.array(remaining)
    exact = rows[:, 0]
    numbers = exact.astype(np.int64) - FIRST_ROW
    if not (np.all(rows == rows[:, :1]) and np.all(exact == numbers + FIRST_ROW)):
        return None
    if numbers.min() < 0 or numbers.max() >= size:
        return None
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()]
    stops = [*starts[1:], len(numbers)]
    return tuple((int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))
