"""Loads the native kernels before MLX, so that MLX takes its matrix products from them. Must be imported before MLX.

The symbols of a dynamic library are bound when it is loaded, so the kernels cannot be loaded later. Without the package
phalanx-cpu this module does nothing. `install.py` replaces MLX's functions.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from phalanx.environment import cpu_kernels_wanted

FOUND = sys.platform == "linux" and importlib.util.find_spec("phalanx_cpu") is not None
"""Whether the package is installed."""

PROBLEM = ""
"""Why the kernels cannot be used although they are installed and enabled; "" if they can."""

NOT_INSTALLED = (
    "phalanx-cpu is not installed, without which models run several times slower; it has wheels for Linux x86-64 with "
    "CPython 3.11 to 3.14, and `make venv` builds it elsewhere on Linux, with a C++ compiler"
)

OPS: Any = None
"""The native operations, an `Ops`; None if they cannot be used."""


def why_not() -> str:
    """Why the native kernels are not used, for a message."""
    if not FOUND:
        return NOT_INSTALLED
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
