"""Finds out whether phalanx has its engine; the error of commands that need it. Imports nothing of the engine."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

from phalanx import __version__
from phalanx.errors import ConfigError

ENGINE = frozenset({"gguf", "huggingface_hub", "jinja2", "llguidance", "mlx", "mlx_lm", "numpy", "tokenizers"})
"""Modules of the extra `engine`, without which phalanx is installed where nothing is computed."""


def missing_module() -> str:
    """A module of the engine that is not installed; "" if all are."""
    return next((name for name in sorted(ENGINE) if importlib.util.find_spec(name) is None), "")


def refuse(missing: str) -> NoReturn:
    """End a command that needs a missing module of the engine.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"This command needs phalanx's engine, and this installation has no {missing}.",
        remedy=f"Install phalanx {__version__} again, as it was installed here, but with an extra: phalanx[cpu,mpi] on "
        "Linux (with an NVIDIA GPU phalanx[cuda13,mpi] or phalanx[cuda12,mpi]), phalanx[engine] on a Mac.",
    )


def require_engine() -> None:
    """For a command that starts other processes: they would say it, each on its own.

    Raises:
        ConfigError: the engine is not installed.
    """
    if missing := missing_module():
        refuse(missing)
