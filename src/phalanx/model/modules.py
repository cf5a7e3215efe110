"""Finds modules of an mlx-lm model by path, and the model file of a module's class; copies models. Changes none."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

PACKAGE = "mlx_lm.models."


def class_key(module: Module) -> tuple[str, str]:
    """The mlx-lm model file of a module's class ("" if it is not from mlx-lm), and the class's name."""
    cls = type(module)
    return (cls.__module__.removeprefix(PACKAGE) if cls.__module__.startswith(PACKAGE) else "", cls.__name__)


def model_files(model: Module) -> frozenset[str]:
    """Names of the mlx-lm model files whose classes the model is made of."""
    return frozenset(file for module in model.modules() if (file := class_key(module)[0]))


def copy_structure(model: Module) -> Module:
    """A copy of a model's structure, with the same weights: what is done to it leaves the model as it is."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    # New array objects, since a recipe may write `bias /= n`, which changes the object.
    return copy.deepcopy(model, {id(array): array.reshape(array.shape) for array in arrays})


def descend(module: Module, path: str) -> list[Any]:
    """The modules or arrays at a dotted path below a module; `*` stands for all entries of a list. Empty if none."""
    nodes: list[Any] = [module]
    for name in path.split("."):
        children = []
        for node in nodes:
            if name == "*":
                children += node if isinstance(node, list) else []
            elif isinstance(node, dict) and isinstance(node.get(name), (Module, mx.array, list)):
                children.append(node[name])
        nodes = children
    return nodes
