"""A pipeline stage: consecutive layers of a model. It receives hidden states and returns hidden states or logits.

The model's own code runs. Layers of other stages keep their places, so that indices keep their meaning, but compute
nothing: the one before the stage's first layer returns the hidden states from the stage before, the one behind its last
layer stores those that this stage returns, and all others return NaN. So anything else that reaches the stage makes its
result NaN instead of a wrong token. Own layers and the model itself are unchanged. `loading/stage_cut.py` makes stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.errors import EngineError, ModelUnsupported
from phalanx.model.cache.layer_layout import CacheFacts


def cannot_be_cut(name: str, reason: str) -> ModelUnsupported:
    """The error for a model whose stages would not compute the same as the whole model."""
    return ModelUnsupported(f"{name} cannot be cut into stages: {reason}.", remedy="Serve it with --pp 1.")


@dataclass(frozen=True, slots=True)
class ActivationArgument:
    """Where a layer's call takes and returns the hidden states."""

    argument: int | str
    """Number of the positional argument, or name of the keyword argument."""
    result: int | None
    """Number of it among the results; None if it is the only one."""
    results: tuple[bool, ...] = ()
    """For each of several results: whether it is something (not None)."""


@dataclass(slots=True)
class _Passing:
    """The hidden states of one call of the model."""

    hidden: mx.array | None
    entered: int = 0  # layers that were given `hidden`
    output: mx.array | None = None


class Stage:
    """Layers `[first, last)` of a model that has `count`.

    Args:
        name: of the model, for messages.
        width: elements of a token's hidden states.
        whole: facts of the whole model, before it was cut or split.
    """

    def __init__(self, name: str, first: int, last: int, count: int, width: int, whole: CacheFacts) -> None:
        self.name = name
        self.first = first
        self.last = last
        self.count = count
        self.width = width
        self.whole = whole
        self._passing: _Passing | None = None

    def __str__(self) -> str:
        own = f"layers {self.first}-{self.last - 1}" if self.last - self.first > 1 else f"layer {self.first}"
        return f"{own} of 0-{self.count - 1}"

    @property
    def has_hidden_input(self) -> bool:
        """Whether a stage comes before this one."""
        return self.first > 0

    @property
    def has_hidden_output(self) -> bool:
        """Whether a stage comes after this one. It then has no logits."""
        return self.last < self.count

    def call(self, model: Module, tokens: mx.array, caches: list[Any], hidden: mx.array | None) -> mx.array:
        """One call of the model; lazy.

        Args:
            tokens: [rows, L]. Only the first stage looks at their values.
            hidden: [rows, L, width], from the stage before; None for the first stage.

        Returns:
            [rows, L, width] for the next stage; from the last stage logits [rows, L, V].

        Raises:
            EngineError: the model did not use `hidden` exactly once.
        """
        passing = self._passing = _Passing(hidden)
        try:
            logits: mx.array = model(tokens, cache=caches)
        finally:
            self._passing = None
        result = passing.output if self.has_hidden_output else logits
        if result is None or passing.entered != int(self.has_hidden_input):
            raise EngineError(f"The model ran {self} with {passing.entered} inputs of hidden states.")
        return result

    def hand_on(self, layer: int, incoming: mx.array) -> mx.array:
        """The result of a layer of another stage. Changes state right before and right behind this stage."""
        passing = self._passing
        if passing is not None and layer == self.first - 1 and passing.hidden is not None:
            passing.entered += 1
            return passing.hidden
        if passing is not None and layer == self.last:
            passing.output = incoming
        return mx.full(incoming.shape, float("nan"), incoming.dtype)


def check_hidden(stage: Stage | None, hidden: mx.array | None, fed: tuple[int, int]) -> None:
    """Check that a forward of `fed` = (rows, tokens per row) has the hidden states that it needs, or none.

    Raises:
        EngineError: says which shape it has, and which it must have.
    """
    wanted = (*fed, stage.width) if stage is not None and stage.has_hidden_input else None
    given = None if hidden is None else tuple(hidden.shape)
    if given != wanted:
        raise EngineError(
            f"{stage or 'The whole model'}: hidden states of shape {given} were given; {wanted} is needed."
        )
    if hidden is not None and not mx.issubdtype(hidden.dtype, mx.floating):
        raise EngineError(f"{stage}: hidden states of {hidden.dtype} were given; a floating dtype is needed.")


def call_model(
    model: Module, stage: Stage | None, tokens: mx.array, caches: list[Any], hidden: mx.array | None
) -> mx.array:
    """One call of a model that is whole (`stage` is None, and nothing of this module runs) or a stage; lazy."""
    if stage is not None:
        return stage.call(model, tokens, caches, hidden)
    logits: mx.array = model(tokens, cache=caches)
    return logits


class Absent:
    """In place of the further results of a layer of another stage: every use of it is an error."""

    def _refuse(self, *_: object) -> NoReturn:
        raise EngineError("A layer needs what a layer of another stage returns beside the array that it hands on.")

    __bool__ = __iter__ = __len__ = __eq__ = __getitem__ = __call__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


ABSENT = Absent()


def hollow(layer: Module, stage: Stage, number: int, place: ActivationArgument) -> None:
    """Turn a layer into one of another stage, in place: it keeps its plain attributes and no arrays.

    Models read such attributes to choose a mask or a cache ("is this layer's attention local?"), also of its children.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        incoming = args[place.argument] if isinstance(place.argument, int) else kwargs[place.argument]
        hidden = stage.hand_on(number, incoming)
        if place.result is None:
            return hidden
        others = [ABSENT if something else None for something in place.results]
        return (*others[: place.result], hidden, *others[place.result + 1 :])

    cls = type(layer)
    contents = _hollowed(dict(layer), {id(layer): layer})
    plain = _plain(vars(layer))
    layer.clear()
    dict.update(layer, contents)
    vars(layer).clear()
    vars(layer).update(plain)
    # Its module is this one, so that nothing takes it for a class of mlx-lm.
    layer.__class__ = type(f"Foreign{cls.__name__}", (cls,), {"__call__": call, "__module__": __name__})


class Hollow(Module):  # type: ignore[misc]
    """Stands for a module inside a layer of another stage."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Not to be called."""
        raise EngineError("A part of a layer of another stage was called.")


def _hollowed(value: Any, seen: dict[int, Any]) -> Any:
    """A copy without arrays; of modules only plain attributes are left."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, Module):
        copy = seen[id(value)] = Hollow()
        copy.__dict__.update(_plain(vars(value)))
        dict.update(copy, _hollowed(dict(value), seen))
        return copy
    if isinstance(value, dict):
        return {key: _hollowed(item, seen) for key, item in value.items() if not isinstance(item, mx.array)}
    if isinstance(value, list | tuple):
        items = [_hollowed(item, seen) for item in value if not isinstance(item, mx.array)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those that are numbers, words or None, and MLX's own."""
    plain = bool | int | float | str | None
    return {key: value for key, value in attributes.items() if isinstance(value, plain) or key in MLX_OWN}


MLX_OWN = ("_no_grad", "_training")
"""Attributes of every module."""
