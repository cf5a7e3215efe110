"""Finding one's way in an mlx-lm model: which model file a module is from, and modules by path. Changes nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

PACKAGE = "mlx_lm.models."


def class_key(module: Module) -> tuple[str, str]:
    """The mlx-lm model file of a module's class ("" if it is none of mlx-lm's) and the class's name."""
    cls = type(module)
    return (cls.__module__.removeprefix(PACKAGE) if cls.__module__.startswith(PACKAGE) else "", cls.__name__)


def model_files(model: Module) -> frozenset[str]:
    """Names of the mlx-lm model files whose classes the model is made of."""
    return frozenset(file for module in model.modules() if (file := class_key(module)[0]))


def descend(module: Module, path: str) -> list[Any]:
    """Modules or arrays at a dotted path below a module, `*` standing for all of a list; none where it ends early."""
    found: list[Any] = [module]
    for name in path.split("."):
        below = []
        for node in found:
            if name == "*":
                below += node if isinstance(node, list) else []
            elif isinstance(node, dict) and isinstance(node.get(name), (Module, mx.array, list)):
                below.append(node[name])
        found = below
    return found
