"""An integer that remembers whether anything was made of it.

While a model call is built to be replayed (`model/cpu/graph_cache.py`), its caches hand out their length as one of
these. A model that only passes it on to RoPE does the same at every length. One that computes with it, or compares it,
may not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Traced(int):
    """An integer that remembers whether anything but `plain` was made of it."""

    used = False

    @property
    def plain(self) -> int:
        """The number, without a trace."""
        return int.__index__(self)


def _watched(name: str) -> Callable[..., Any]:
    stock = getattr(int, name)

    def method(self: Traced, *args: Any) -> Any:
        self.used = True
        return stock(self, *args)

    method.__name__ = name
    return method


UNWATCHED = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__", "__dir__",
             "__getattribute__", "__setattr__", "__delattr__", "__sizeof__", "__reduce__", "__reduce_ex__",
             "__getnewargs__", "__getstate__"}  # fmt: skip
"""What objects are made and asked with, which says nothing about the number."""

for _name in dir(int):
    if callable(getattr(int, _name)) and _name not in UNWATCHED:
        setattr(Traced, _name, _watched(_name))
