"""The type of the native operations' module, which `preload.py` loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Function = Callable[..., mx.array]


class Ops(Protocol):
    """The native operations: functions of MLX arrays, by name."""

    def __getattr__(self, name: str) -> Function: ...
