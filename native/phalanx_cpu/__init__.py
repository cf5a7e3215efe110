"""Native CPU kernels as MLX operations. Import this before `mlx.core`: its BLAS is then used by MLX as well.

Raises ImportError, with the command that mends it, when the installed MLX is not the one these were built for.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.metadata import version
from pathlib import Path

MLX_VERSION = "0.32.4"
"""The MLX that `_ext` is built for (pyproject.toml pins the same)."""

LIBRARY = Path(__file__).with_name("libkern.so")

if (_found := version("mlx")) != MLX_VERSION:
    raise ImportError(
        f"phalanx-cpu is built for mlx {MLX_VERSION}, but mlx {_found} is installed. "
        f"Install that one (`pip install 'mlx[cpu]=={MLX_VERSION}'`), or build phalanx-cpu again for yours."
    )

BLAS_IN_USE = "mlx.core" not in sys.modules
"""Whether MLX takes its matrix products from here: symbols are bound when MLX is loaded."""

# Too late, it must not show at all: which of MLX's products came from here would be a matter of chance.
ctypes.CDLL(os.fspath(LIBRARY), mode=ctypes.RTLD_GLOBAL if BLAS_IN_USE else ctypes.RTLD_LOCAL)

import mlx.core  # noqa: E402, F401  (the extension needs its types)

from phalanx_cpu import _ext as ops  # noqa: E402

__all__ = ["BLAS_IN_USE", "LIBRARY", "MLX_VERSION", "ops"]
