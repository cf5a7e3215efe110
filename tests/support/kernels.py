"""Functions compiled as on a GPU, and the kernels of a graph that is not computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx


@contextmanager
def compiled() -> Iterator[None]:
    """As on a GPU: functions are compiled. Elsewhere the tests switch that off, as the engine does on a CPU."""
    mx.enable_compile()
    try:
        yield
    finally:
        mx.disable_compile()


def kernels(build: Callable[[], mx.array], path: Path) -> Counter[str]:
    """The operations of a graph that is not computed. A concatenation counts once for each of its inputs."""
    mx.export_to_dot(str(path), build())
    graph = path.read_text()
    names = dict(re.findall(r'(\d+) \[label ="(\w+)", shape=rectangle\]', graph))
    count: Counter[str] = Counter()
    for node, name in names.items():
        count[name] += len(re.findall(rf'" -> {node}\b', graph)) if name == "Concatenate" else 1
    views = ("Slice", "Reshape", "Broadcast", "ExpandDims", "Squeeze", "Split")
    return Counter({name: n for name, n in count.items() if name not in views})
