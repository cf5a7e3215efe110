"""Tests of the native kernels; they need the package phalanx-cpu, which `make` builds where a compiler is."""

from __future__ import annotations

import importlib.util

from hypothesis import settings

collect_ignore_glob = [] if importlib.util.find_spec("phalanx_cpu") else ["test_*.py"]

settings.register_profile("native", deadline=None)  # kernels start threads, and the machine may be busy
settings.load_profile("native")
