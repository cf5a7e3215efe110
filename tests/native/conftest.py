"""Tests of the native kernels; they need the package phalanx-cpu, which `make` builds where a compiler is."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import settings

IS_BEST = True
collect_ignore_glob = ["test_*.py"]
if importlib.util.find_spec("phalanx_cpu") is not None:
    from kern import library  # it finds none where the package is not

    best = library.kern_isas().decode().split()[0]
    IS_BEST = os.environ.get("KERN_ISA", best) == best
    collect_ignore_glob = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is the same for all instruction sets runs with the best one: who runs kernels, when, and in whose place."""
    left_out = [] if IS_BEST else [item for item in items if item.get_closest_marker("any_isa")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


settings.register_profile("native", deadline=None)  # kernels start threads, and the machine may be busy
settings.load_profile("native")
