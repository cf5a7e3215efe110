"""Loads the native kernels before MLX, which then takes its matrix products from them: import this first.

A dynamic library's symbols are bound when it is loaded, so this cannot be made good later. Without the package
phalanx-cpu nothing happens, and MLX computes with its own.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from phalanx.config import cpu_kernels_wanted

FOUND = sys.platform == "linux" and importlib.util.find_spec("phalanx_cpu") is not None
"""Whether the package is installed."""

PROBLEM = ""
"""Why it cannot be used although it is installed and wanted."""

OPS: Any = None
"""The operations, as functions of MLX arrays; None where they cannot be used."""


def why_not() -> str:
    """Why MLX's own kernels compute, for a message."""
    if not FOUND:
        return "phalanx-cpu is not installed"
    return PROBLEM or "they were turned off: --no-cpu-kernels or PHALANX_CPU_KERNELS=0"


if FOUND and cpu_kernels_wanted():
    try:
        import phalanx_cpu
    except (ImportError, OSError) as error:  # built for another MLX, or for another machine
        PROBLEM = str(error)
    else:
        if phalanx_cpu.BLAS_IN_USE:
            OPS = phalanx_cpu.ops
        else:
            PROBLEM = "MLX was loaded before them"
