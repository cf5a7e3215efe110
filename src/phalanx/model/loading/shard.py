"""Who owns which part of a tensor: a model is split by its recipe, and what that does to every parameter is found out.

The recipe is mlx-lm's own `shard()` where there is one, else ours (`recipes.py`). It runs twice on lazy arrays: once on
the weights, to see which parameters it changes, and once on a copy whose changed parameters are row numbers, to see
which rows are left. So a reader can fetch those rows and nothing else, whatever the recipe did to get them. Anything
that is not a choice of rows along one axis stays what the recipe made it. Does not know files, dtypes or memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from phalanx.config import MOST_RANKS
from phalanx.errors import ModelUnsupported
from phalanx.model.check import FOREIGN
from phalanx.model.loading.recipes import FEWER_KV, RATIOS, RECIPES, REFUSED, Block, Kv
from phalanx.model.loading.weights import Cut
from phalanx.model.modules import class_key, descend, model_files

FIRST_ROW = 1 << 22  # row numbers are float32 from here on: exact, and no arithmetic looks like a choice of rows


class Group(Protocol):
    """What a recipe asks of a group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Paper:
    """A group that only exists on paper: enough to split a model, not to run it."""

    number: int
    ranks: int

    def rank(self) -> int:
        """This rank's number."""
        return self.number

    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks


@dataclass(frozen=True, slots=True)
class Split:
    """What splitting did to the parameters. One named in neither is whole."""

    cuts: dict[str, Cut]
    """Those of which this rank has some rows along one axis."""
    computed: frozenset[str]
    """Those that the recipe computes: only the array itself says."""


def split(model: Module, name: str, group: Group) -> Split:
    """Turn a model of lazy, whole weights into one rank's part of it, in place.

    Raises:
        ModelUnsupported: there is no recipe, or it cannot split this model so many ways; lists the ways it can.
    """
    if group.size() == 1:
        return Split({}, frozenset())
    recipe = _recipe(model, name)
    whole, spare = _copy(model), _copy(model)
    try:
        before = {key: array.shape for key, array in _arrays(model).items()}
        _apply(recipe, model, group)
        after = {key: array.shape for key, array in _arrays(model).items()}
        axes = {key: _axis(before[key], shape) for key, shape in after.items() if key in before}
        cuts = _trace(recipe, spare, {key: axis for key, axis in axes.items() if axis is not None}, group)
    except FOREIGN as error:
        raise _refusal(whole, name, group.size(), error) from error
    parts = {key: cut for key, cut in cuts.items() if cut.runs != ((0, before[key][cut.axis]),)}
    return Split(parts, frozenset(after.keys() - cuts.keys()))


def degrees(model: Module, name: str) -> list[int]:
    """Into how many parts a model of whole weights can be split, up to `MOST_RANKS`."""
    recipe = _recipe(model, name)
    return [1, *(n for n in range(2, MOST_RANKS + 1) if _splits(recipe, _copy(model), n))]


# -- recipes -------------------------------------------------------------------------------------------------------

Recipe = Callable[[Module, Group], None]


def _recipe(model: Module, name: str) -> Recipe:
    files = model_files(model)
    inner = getattr(model, "language_model", None)
    for file in sorted(files & REFUSED.keys()):
        raise ModelUnsupported(f"{name} (mlx-lm's `{file}`) cannot be split over ranks: {REFUSED[file]}.", remedy=_ONE)
    if callable(getattr(model, "shard", None)):
        return lambda model, group: model.shard(group)
    if callable(getattr(inner, "shard", None)):
        return lambda model, group: model.language_model.shard(group)
    if files & RECIPES.keys():
        return _split_blocks
    file = class_key(model)[0] or "its own file"
    raise ModelUnsupported(
        f"{name} cannot be split over ranks: neither mlx-lm nor phalanx has a recipe for `{file}`.", remedy=_ONE
    )


_ONE = "Serve it with --tp 1."


def _split_blocks(model: Module, group: Group) -> None:
    """Our own recipes. A block that sums its output owns all modules below it."""
    owned: set[int] = set()
    found = []
    for _, module in model.named_modules():
        file, cls = class_key(module)
        found += [(module, block) for block in RECIPES.get(file, ()) if block.cls == cls]
    if not found:
        raise ValueError("none of its blocks are those of the recipe")
    for module, block in sorted(found, key=lambda pair: not pair[1].summed):
        if id(module) not in owned:
            _split_block(module, block, group)
            if block.summed:
                owned |= {id(below) for below in module.modules()}


def _split_block(module: Module, block: Block, group: Group) -> None:
    if block.unless and getattr(module, block.unless, None) not in (None, False):
        raise ValueError(f"{block.cls} with {block.unless}")
    parts = {fused.child: _segments(module, fused.child, fused.sizes) for fused in block.fused}
    for name in block.heads:
        setattr(module, name, _share(name, getattr(module, name), group.size()))
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
        for child, parent, key in _places(module, path):
            if block.summed:
                shard_inplace(child, _by_input, group=group)
                if "bias" in child:
                    child.bias = child.bias / group.size()
            else:
                parent[key] = shard_linear(child, "sharded-to-all", group=group)
    if block.summed:
        module.sharding_group = group


def _segments(module: Module, child: str, sizes: tuple[str, ...]) -> list[int]:
    """Rows at which the parts of a fused matrix meet."""
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
    for child, parent, key in _places(module, path):
        if isinstance(child, mx.array):
            parent[key] = mx.split(child, group.size(), axis=0)[group.rank()]
        else:
            shard_inplace(child, lambda path, weight: 0, group=group)


def _places(module: Module, path: str) -> list[tuple[Any, Any, str]]:
    """Children at a path, with what holds them and under which name."""
    parent, _, key = path.rpartition(".")
    holders = descend(module, parent) if parent else [module]
    return [(child, holder, key) for holder in holders for child in descend(holder, key)]


def _share(name: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(f"{name} is {count}, which {ranks} does not divide")
    return count // ranks


def _repeat_kv(module: Module, kv: Kv, ranks: int) -> None:
    """Where ranks outnumber key and value heads, let there be one for each rank."""
    heads = getattr(module, kv.heads)
    if heads >= ranks:
        _share(kv.heads, heads, ranks)
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
    """Split, and check what shapes alone would not show.

    Raises:
        ValueError: an integer is not what it was divided by the ranks, or a matrix does not fit its scales.
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
        _apply(recipe, model, Paper(0, ranks))
    except FOREIGN:
        return False
    return True


def _refusal(model: Module, name: str, ranks: int, error: Exception) -> ModelUnsupported:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if reason.startswith("[quantize]"):  # the constructor of a quantised layer's part
        reason = f"a part of a matrix would end inside a quantisation group ({reason.removeprefix('[quantize] ')})"
    possible = [str(n) for n in degrees(model, name)]
    return ModelUnsupported(
        f"{name} cannot be split over {ranks} ranks: {reason.rstrip('.')}.",
        remedy=f"Serve it with --tp {' or '.join(filter(None, (', '.join(possible[:-1]), possible[-1])))}.",
    )


# -- tracing -------------------------------------------------------------------------------------------------------


def _copy(model: Module) -> Module:
    """A copy of a model's structure, on the same weights."""
    arrays = _arrays(model).values()
    # Other array objects, since a recipe may write `bias /= n`, which changes the object.
    return copy.deepcopy(model, {id(array): array.reshape(array.shape) for array in arrays})


def _arrays(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _axis(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """The one axis along which a shape changed; where none did, the last."""
    if len(before) != len(after) or not before or max(before) >= FIRST_ROW or not min(before):
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return None if len(axes) > 1 else (axes or [len(before) - 1])[0]


def _trace(recipe: Recipe, spare: Module, axes: dict[str, int], group: Group) -> dict[str, Cut]:
    """Run the recipe on row numbers instead of weights, each tensor one row wide but for its axis.

    Returns:
        The rows that are left of a tensor, for those of which the recipe took rows and did nothing else.
    """
    modules, arrays = dict(spare.named_modules()), _arrays(spare)
    numbers = {}
    for name, axis in axes.items():
        path, _, leaf = name.rpartition(".")
        shape = [1] * arrays[name].ndim
        if leaf == "weight" and "scales" in modules[path]:
            shape[-1] = modules[path].group_size * modules[path].bits // 32  # one group, as constructors want
        shape[axis] = arrays[name].shape[axis]
        rows = mx.arange(FIRST_ROW, FIRST_ROW + shape[axis], dtype=mx.float32)
        rows = rows.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        numbers[name] = mx.broadcast_to(rows, shape)
    given = {name: array.shape for name, array in numbers.items()}
    spare.update(tree_unflatten(list(numbers.items())))
    _apply(recipe, spare, group)
    arrays = _arrays(spare)
    left = {name: _rows(arrays[name], given[name], axis) for name, axis in axes.items()}
    mx.eval([rows for rows in left.values() if rows is not None])
    found = {name: _runs(rows, given[name][axes[name]]) for name, rows in left.items() if rows is not None}
    return {name: Cut(axes[name], runs) for name, runs in found.items() if runs is not None}


def _rows(left: mx.array, given: tuple[int, ...], axis: int) -> mx.array | None:
    """What is left as `[rows, width]`; None where more than the axis has changed."""
    if left.dtype != mx.float32 or [*left.shape[:axis], given[axis], *left.shape[axis + 1 :]] != list(given):
        return None
    return mx.moveaxis(left, axis, 0).reshape(left.shape[axis], -1)


def _runs(left: mx.array, given: int) -> tuple[tuple[int, int], ...] | None:
    """The rows that are left of `given`, as runs; None if this is not a choice of rows."""
    rows = np.array(left)
    exact = rows[:, 0]
    numbers = exact.astype(np.int64) - FIRST_ROW
    if not (np.all(rows == rows[:, :1]) and np.all(exact == numbers + FIRST_ROW)):
        return None
    if numbers.min() < 0 or numbers.max() >= given:
        return None
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist()]
    stops = [*starts[1:], len(numbers)]
    return tuple((int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in zip(starts, stops, strict=True))
