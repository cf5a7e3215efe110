"""Finds out how a model passes an array from layer to layer, by running it once.

`trace` builds a call of the whole model on mlx-lm's own caches and evaluates nothing. It records what every layer is
called with and returns, and when parameters outside the layers are read: before the first layer (an embedding), behind
the last (norm and head), or both (tied embeddings). A model can be cut between its layers if each is called once, in
order, with one array that the layer before returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from phalanx.model.check import FOREIGN
from phalanx.model.stage import ActivationArgument, cannot_be_cut

BEFORE, BETWEEN, BEHIND = "before", "between", "behind"
"""Where a parameter outside the layers is read, as seen from the layers."""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """How a model calls its layers."""

    places: tuple[ActivationArgument, ...]
    """By layer: where its call has the hidden states."""
    caches: tuple[frozenset[int], ...]
    """By layer: the caches that it is called with, as positions in the model's cache list."""
    width: int
    """Elements of the hidden states, per token."""
    layer_of: Mapping[str, int]
    """The layer of each parameter that belongs to one."""
    read: Mapping[str, frozenset[str]]
    """For each parameter outside the layers: where it is read (`BEFORE`, ...). Empty: at no time in this call."""


class _Call(NamedTuple):
    """One call of a layer."""

    layer: int
    arguments: dict[int | str, Any]
    output: Any


def trace(model: Module, name: str) -> LayerTrace:
    """Run a model with lazy, whole weights once. Of the model itself only what it keeps of a call changes.

    Args:
        name: of the model, for messages.

    Raises:
        ModelUnsupported: the model cannot be cut between its layers; says why.
    """
    layers = tuple(getattr(model, "layers", ()))
    if len(layers) < 2 or len({id(layer) for layer in layers}) < len(layers):
        raise cannot_be_cut(name, "it has no list of different layers")
    watch = _Watch(model, layers)
    try:
        caches = make_prompt_cache(model)
        with watch.watching():
            model(mx.zeros((1, 2), dtype=mx.int32), cache=list(caches))
    except FOREIGN as error:
        raise cannot_be_cut(name, f"mlx-lm cannot run it on two tokens: {error!r}") from error
    places = _places(name, layers, watch.calls)
    hidden = watch.calls[1].arguments[places[1].argument]
    if hidden.ndim != 3 or not mx.issubdtype(hidden.dtype, mx.floating):
        raise cannot_be_cut(name, f"its layers hand on an array of shape {hidden.shape} for one row of two tokens")
    return LayerTrace(
        places=places,
        caches=tuple(_caches_of(call, caches) for call in watch.calls),
        width=hidden.shape[-1],
        layer_of=watch.layer_of,
        read={key: frozenset(ends) for key, ends in watch.read.items()},
    )


def _places(name: str, layers: tuple[Module, ...], calls: list[_Call]) -> tuple[ActivationArgument, ...]:
    """Where each layer's call has the array from the layer before and for the next, recognised by its identity."""
    order = [call.layer for call in calls]
    if not order:
        raise cannot_be_cut(name, "mlx-lm computes the parts of its layers, and calls none of them as a whole")
    if order != list(range(len(layers))):
        again = next((layer for layer in range(len(layers)) if order.count(layer) != 1), 0)
        raise cannot_be_cut(
            name, f"layer {again} is called {order.count(again)} times for a token, or in another order"
        )
    arguments: list[int | str] = []
    results: list[int | None] = []
    for call, following in pairwise(calls):
        passed = [
            (argument, result)
            for result, returned in _results(call.output)
            for argument, value in following.arguments.items()
            if value is returned and isinstance(value, mx.array)
        ]
        if len(passed) != 1:
            what = type(layers[call.layer]).__name__
            raise cannot_be_cut(
                name,
                f"layer {following.layer} takes {len(passed)} arrays from layer {call.layer} ({what}) instead of one",
            )
        arguments.append(passed[0][0])
        results.append(passed[0][1])
    arguments.insert(0, arguments[0])
    results.append(results[-1])
    outputs = [call.output if isinstance(call.output, tuple | list) else () for call in calls]
    something = [tuple(value is not None for value in output) for output in outputs]
    return tuple(ActivationArgument(*place) for place in zip(arguments, results, something, strict=True))


def _results(output: Any) -> Iterator[tuple[int | None, Any]]:
    if isinstance(output, tuple | list):
        yield from enumerate(output)
    else:
        yield None, output


def _caches_of(call: _Call, caches: list[Any]) -> frozenset[int]:
    return frozenset(i for i, cache in enumerate(caches) if any(cache is value for value in call.arguments.values()))


class _Watch:
    """Records calls of layers, and reads of parameters outside them, while the model runs.

    Modules change their classes meanwhile: a module looks up `__call__` and `__getitem__` there.
    """

    def __init__(self, model: Module, layers: tuple[Module, ...]) -> None:
        self.calls: list[_Call] = []
        self._layers = layers
        inside = {id(module) for layer in layers for module in layer.modules()}
        self._outside = [module for module in model.modules() if id(module) not in inside]
        self._finished = 0
        paths = {id(module): path for path, module in model.named_modules()}
        roots = {f"{paths[id(layer)]}.": number for number, layer in enumerate(layers)}
        parameters = [key for key, _ in tree_flatten(model.parameters())]
        self.layer_of = {key: roots[root] for key in parameters for root in roots if key.startswith(root)}
        self.read: dict[str, set[str]] = {key: set() for key in parameters if key not in self.layer_of}
        self._entries: dict[tuple[int, str], list[str]] = {}  # module, key -> parameters outside the layers
        owners = {paths[id(module)]: module for module in self._outside}
        for parameter in self.read:
            parts = parameter.split(".")
            depth = max(n for n in range(len(parts)) if ".".join(parts[:n]) in owners)
            owner = owners[".".join(parts[:depth])]
            self._entries.setdefault((id(owner), parts[depth]), []).append(parameter)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record while the context lasts."""

        def get(module: Module, key: str, default: Any = None) -> Any:
            self._note(module, key)
            return dict.get(module, key, default)

        def getitem(module: Module, key: str) -> Any:
            self._note(module, key)
            return dict.__getitem__(module, key)

        classes = [(module, type(module)) for module in (*self._layers, *self._outside)]
        try:
            for number, layer in enumerate(self._layers):
                layer.__class__ = _subclass(type(layer), {"__call__": self._recorded_call(type(layer), number)})
            for module in self._outside:
                module.__class__ = _subclass(type(module), {"get": get, "__getitem__": getitem})
            yield
        finally:
            for module, cls in classes:
                module.__class__ = cls

    def _recorded_call(self, cls: type[Module], number: int) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            arguments: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
            started = len(self.calls)
            self.calls.append(_Call(number, arguments, None))
            output = cls.__call__(layer, *args, **kwargs)
            self.calls[started] = _Call(number, arguments, output)
            self._finished += 1
            return output

        return call

    def _note(self, module: Module, key: str) -> None:
        when = BEFORE if not self.calls else BEHIND if self._finished >= len(self._layers) else BETWEEN
        for parameter in self._entries.get((id(module), key), ()):
            self.read[parameter].add(when)


def _subclass(cls: type[Module], methods: dict[str, Any]) -> type[Module]:
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
