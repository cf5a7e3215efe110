"""Directories for the files of a rank's libraries, in which no other user can have put any.

MLX keeps compiled code under predictable names in the temporary directory, and loads what it finds there. A rank that a
server or an agent started has a temporary directory of its group's own already.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib.metadata import version

import mlx.core as mx

from phalanx.dist.collective_backend import own_files
from phalanx.environment import default_environment, own_cache, runtime_dir, set_environment, temporary_directory
from phalanx.errors import ConfigError
from phalanx.private_files import why_not_private
from phalanx.supervision.owned_directory import new_directory

log = logging.getLogger("phalanx.engine")

COMPILED_VARIABLE = "MLX_PTX_CACHE_DIR"


@contextlib.contextmanager
def own_directories() -> Iterator[None]:
    """While it lasts, this process's temporary directory is its user's alone; where MLX uses CUDA, so is the directory
    of compiled kernels, which stays: they take minutes. Call it before MLX computes.

    Raises:
        ConfigError: there is no directory in which a temporary one can be made.
    """
    own = new_directory(runtime_dir()) if why_not_private(temporary_directory()) else None
    if own is not None:
        set_environment({"TMPDIR": str(own.path)})
    default_environment(own_files(temporary_directory()))
    if mx.cuda.is_available():
        _keep_compiled()
    try:
        yield
    finally:
        if own is not None:
            own.remove()


def _keep_compiled() -> None:
    """Have MLX keep compiled kernels of this version of it and this kind of GPU, unless the user says where.

    MLX itself distinguishes neither. Without a directory it compiles at every start, into the temporary one.
    """
    try:
        folder = own_cache() / f"mlx-{version('mlx')}-{mx.device_info().get('architecture')}"
    except ConfigError as error:
        log.warning("MLX compiles its kernels at every start: %s", error)
    else:
        default_environment({COMPILED_VARIABLE: str(folder)})
