"""Private directories for the files of a rank's libraries.

MLX keeps compiled code under predictable names in the temporary directory and loads what it finds there, so no other
user may write there. A rank that a server or an agent started has such a temporary directory already.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib.metadata import version

import mlx.core as mx

from phalanx.dist.collective_backend import file_variables
from phalanx.environment import default_environment, own_cache, runtime_dir, set_environment, temporary_directory
from phalanx.errors import ConfigError
from phalanx.private_files import why_not_private
from phalanx.supervision.owned_directory import new_directory

log = logging.getLogger("phalanx.engine")

COMPILED_VARIABLE = "MLX_PTX_CACHE_DIR"


@contextlib.contextmanager
def own_directories() -> Iterator[None]:
    """Give this process a private temporary directory, removed at the end. With CUDA, MLX also gets a private directory
    for compiled kernels, which stays: they take minutes. Call it before MLX computes.

    Raises:
        ConfigError: no directory for a temporary one can be found.
    """
    own = new_directory(runtime_dir()) if why_not_private(temporary_directory()) else None
    if own is not None:
        set_environment({"TMPDIR": str(own.path)})
    default_environment(file_variables(temporary_directory()))
    if mx.cuda.is_available():
        _keep_compiled()
    try:
        yield
    finally:
        if own is not None:
            own.remove()


def _keep_compiled() -> None:
    """Have MLX keep compiled kernels, by version and kind of GPU (MLX separates neither), unless the user has set a
    directory. Without one, MLX compiles into the temporary directory at every start.
    """
    try:
        folder = own_cache() / f"mlx-{version('mlx')}-{mx.device_info().get('architecture')}"
    except ConfigError as error:
        log.warning("MLX compiles its kernels at every start: %s", error)
    else:
        default_environment({COMPILED_VARIABLE: str(folder)})
