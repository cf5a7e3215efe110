"""Tests of the native kernels; they need the package phalanx-cpu, which `make` builds where a compiler is."""

from __future__ import annotations

import importlib.util
import os

from hypothesis import settings

THREADS_AND_REPLAY = ["test_ahead_ops.py", "test_pool.py", "test_replay.py"]
"""The same for all instruction sets: who runs kernels, and when. Run with the best one, which is the first."""


def ignored() -> list[str]:
    if importlib.util.find_spec("phalanx_cpu") is None:
        return ["test_*.py"]
    from kern import library  # noqa: PLC0415  (it finds none where the package is not)

    best = library.kern_isas().decode().split()[0]
    return [] if os.environ.get("KERN_ISA", best) == best else THREADS_AND_REPLAY


collect_ignore_glob = ignored()

settings.register_profile("native", deadline=None)  # kernels start threads, and the machine may be busy
settings.load_profile("native")
