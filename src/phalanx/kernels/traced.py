"""An integer that records whether its value was used.

While a model call is captured (`model/graph_cache.py`), the caches give their length as such an integer. If the
model only passes it on to RoPE, the captured graph is valid for every length; if the model computes with it or compares
it, the graph may not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Traced(int):
    """An integer that sets `used` when its value is used other than through `plain`."""

    used = False

    @property
    def plain(self) -> int:
        """The value, without setting `used`."""
        return int.__index__(self)


def _recording(name: str) -> Callable[..., Any]:
    stock = getattr(int, name)

    def method(self: Traced, *args: Any) -> Any:
        self.used = True
        return stock(self, *args)

    method.__name__ = name
    return method


NOT_RECORDED = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__", "__dir__",
             "__getattribute__", "__setattr__", "__delattr__", "__sizeof__", "__reduce__", "__reduce_ex__",
             "__getnewargs__", "__getstate__"}  # fmt: skip
"""Methods that do not use the value."""

for _name in dir(int):
    if callable(getattr(int, _name)) and _name not in NOT_RECORDED:
        setattr(Traced, _name, _recording(_name))
