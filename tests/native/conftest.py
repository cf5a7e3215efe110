"""Tests of the native kernels; they need the package phalanx-cpu, which `make` builds where a compiler is.

With the best instruction set of this machine all of them run. With the others, as `KERN_ISA` says, what is the same for
all instruction sets is left out (`any_isa`), and of each test's parameters a set runs in which every two values meet;
`make soak` runs the whole with each.
"""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import settings
from support.examples import SOAK

IS_BEST = True
collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("phalanx_cpu") is not None:
    from kern import library  # it finds none where the package is not

    best = library.kern_isas().decode().split()[0]
    IS_BEST = os.environ.get("KERN_ISA", best) == best
    collect_ignore_glob = []


def values(item: pytest.Function) -> set[tuple[tuple[str, str], ...]]:
    """Every two parameters of a test with their values; with one parameter, that one; with none, nothing in particular.

    `()` stands for the test itself, so that one that has no parameters is not left out.
    """
    parameters = sorted((name, str(value)) for name, value in getattr(item, "callspec", _NONE).params.items())
    return {(), *combinations(parameters, min(2, len(parameters)))}


class _NONE:
    params: dict[str, object] = {}


def covering(items: Iterable[pytest.Function]) -> set[pytest.Function]:
    """Of the items of one test: some in which all occurs that occurs in any, the one that adds most first."""
    left = {item: values(item) for item in items}
    missing = set().union(*left.values())
    chosen = set()
    while missing:
        item = max(left, key=lambda item: len(left[item] & missing))
        chosen.add(item)
        missing -= left.pop(item)
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if IS_BEST or SOAK:
        return
    by_test = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("any_isa"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    chosen = {item for found in by_test.values() for item in covering(found)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


settings.register_profile("native", deadline=None)  # kernels start threads, and the machine may be busy
settings.load_profile("native")
