"""Cuts a stage out of a model: which layers and which parameters outside them this rank keeps.

A parameter outside the layers is kept where it is read: an embedding by the first stage, the head by the last, a tied
embedding by both. Elsewhere it is NaN, without memory or reading, so that a model which brings an embedding to a later
layer past the hidden fails the check at start. `layer_trace.py` finds how a model calls its layers; `model/stage.py`
has the stand-ins for the other stages' layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten

from phalanx.errors import ConfigError
from phalanx.model.loading.layer_trace import BEFORE, BEHIND, BETWEEN, LayerTrace, trace
from phalanx.model.loading.parameters import ModelParameter
from phalanx.model.modules import copy_structure
from phalanx.model.registry import inspect
from phalanx.model.stage import Stage, cannot_be_cut, hollow

NAN_SCALE = 255
"""The scale of quantised weights that makes them NaN where scales have 8 bits (in E4M3 and in E8M0)."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Bytes of a model's parts before any split over ranks; decides how many layers each stage gets."""

    weights: tuple[int, ...]
    """Bytes of each layer's weights, as stored."""
    elements: tuple[int, ...]
    """Elements of each layer's weights, with which the arithmetic of a chunk grows. Experts count in full: most of them
    are used by some token of a chunk."""
    before: int
    """Bytes that only the first stage reads besides its layers (an embedding)."""
    behind: int
    """Bytes that only the last stage reads (norm, head; a tied embedding counts here and in `before`)."""
    everywhere: int
    """Bytes of other weights, which every stage reads."""


Choice = Callable[[LayerCosts], tuple[int, int]]
"""Chooses the layers `[first, last)` of this rank's stage; must be the same on all its ranks."""


def costs(model: Module, found: LayerTrace) -> LayerCosts:
    """The costs of a model with whole weights."""
    weights, elements = [0] * len(found.places), [0] * len(found.places)
    bits = {name: module.bits for name, module in model.named_modules() if "scales" in module}
    ends = {BEFORE: 0, BEHIND: 0, BETWEEN: 0}
    for name, array in tree_flatten(model.parameters()):
        if name in found.layer_of:
            layer, (owner, _, own) = found.layer_of[name], name.rpartition(".")
            weights[layer] += array.nbytes
            if owner not in bits:
                elements[layer] += array.size
            elif own == "weight":
                elements[layer] += array.nbytes * 8 // bits[owner]
            continue
        read = found.read[name]
        for end in read if read and BETWEEN not in read else (BETWEEN,):
            ends[end] += array.nbytes
    return LayerCosts(
        weights=tuple(weights),
        elements=tuple(elements),
        before=ends[BEFORE],
        behind=ends[BEHIND],
        everywhere=ends[BETWEEN],
    )


@dataclass(frozen=True, slots=True)
class Cutting:
    """A stage that is chosen, in a model that is still whole: ranks split it first."""

    model: Module
    name: str
    trace: LayerTrace
    stage: Stage

    def cut(self) -> Stage:
        """Turn the model into the stage, in place: its other layers lose their weights."""
        for number, layer in enumerate(self.model.layers):
            if not self.stage.first <= number < self.stage.last:
                hollow(layer, self.stage, number, self.trace.places[number])
        return self.stage

    def absent(self) -> frozenset[str]:
        """Names of the parameters outside the layers that this stage does not need."""
        mine = {
            end
            for end, other in ((BEFORE, self.stage.has_hidden_input), (BEHIND, self.stage.has_hidden_output))
            if not other
        }
        return frozenset(
            name for name, read in self.trace.read.items() if read and BETWEEN not in read and mine.isdisjoint(read)
        )


def choose(model: Module, config: Mapping[str, Any], name: str, choice: Choice) -> Cutting | None:
    """Choose this rank's layers of a model with lazy, whole weights, before it is split. None if it has all of them.

    Args:
        config: the model's config.json.
        name: of the model, for messages.

    Raises:
        ConfigError: the model does not have the layers of the choice.
        ModelUnsupported: the model cannot be served or cut, or a layer uses the cache of a layer of another stage.
    """
    probe = copy_structure(model)  # models keep arrays of a call, which must not be those of weights before a split
    found, whole = trace(probe, name), inspect(probe, config)
    (first, last), count = choice(costs(model, found)), len(found.places)
    if not 0 <= first < last <= count:
        raise ConfigError(
            f"A stage was to have layers {first} to {last - 1}, but {name} has layers 0 to {count - 1}.",
            remedy="Check --pp-split: it gives every stage at least one layer, and all layers of the model.",
        )
    if (first, last) == (0, count):
        return None
    _check_caches(found, first, last, name)
    return Cutting(model, name, found, Stage(name, first, last, count, found.width, whole))


def _check_caches(found: LayerTrace, first: int, last: int, name: str) -> None:
    """No layer uses the cache of a layer of another stage."""
    own = range(first, last)
    for number, caches in enumerate(found.caches):
        for other, others in enumerate(found.caches[:number]):
            if (number in own) != (other in own) and caches & others:
                raise cannot_be_cut(
                    name, f"layer {number} uses the cache of layer {other}, which would be in another stage"
                )


def fill_absent(model: Module, plan: Iterable[ModelParameter], names: Collection[str]) -> list[ModelParameter]:
    """Replace parameters by NaN in the dtype in which they would be kept. Returns the rest of the plan."""
    rest = []
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    for entry in plan:
        if entry.name not in names:
            rest.append(entry)
            continue
        value: float = float("nan") if mx.issubdtype(entry.dtype, mx.floating) else 0
        if entry.dtype == mx.uint8 and entry.name.endswith(".scales"):
            value = NAN_SCALE
        nothing = mx.broadcast_to(mx.array(value, dtype=entry.dtype), shapes[entry.name])
        model.update(tree_unflatten([(entry.name, nothing)]))
    return rest
