"""Which environment variables hostfiles, flags and the server may set for ranks.

A variable that chooses code (libraries, modules, programs) or that phalanx sets itself is refused: a hostfile may set a
library's flags, and may not run programs by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from phalanx.errors import ConfigError

REFUSED = (
    # the dynamic linker's, the C library's, and the interpreters' own
    "LD_*", "DYLD_*", "GLIBC_TUNABLES", "GCONV_PATH", "LOCPATH", "PYTHON*", "BASH_ENV", "BASH_FUNC*", "ENV", "IFS",
    # where programs and files of the user are looked for
    "PATH", "HOME", "SHELL", "XDG_RUNTIME_DIR",
    # phalanx's own: secrets, guards, what a rank is
    "PHALANX_*",
    # libraries that MLX, Open MPI and what it uses, NCCL, CUDA, OpenMP and OpenSSL load; programs that Open MPI runs
    "MLX_MPI_LIBNAME", "OPAL_*", "OMPI_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX", "PRTE_*DIR", "PMIX_*DIR",
    "*_MCA_*path*", "*_MCA_*agent*", "*_MCA_*param_file*", "UCX_MODULE*", "FI_PROVIDER_PATH", "HWLOC_PLUGINS*",
    "IBV_DRIVERS", "RDMAV_DRIVERS", "OMP_TOOL*", "NCCL_*PLUGIN*", "NCCL_NET", "NCCL_CONF_FILE", "CUDA_INJECTION*",
    "OPENSSL_*", "SSL_*",
)  # fmt: skip
"""Patterns of names that may not be set."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # halves of surrogates are no text


def check_variable(name: str, value: str, where: str, *, except_for: Collection[str] = ()) -> None:
    """Check one variable.

    Args:
        where: the file or flag that sets it, for messages.
        except_for: names that may be set although a pattern refuses them.

    Raises:
        ConfigError: names `where` and the variable.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name[:80]!r} is not the name of a variable.", remedy="Write NAME=value.")
    if CONTROL.search(value):
        raise ConfigError(
            f"{where}: the value of {name} has a line break or another control character.", remedy="Write one line."
        )
    pattern = next((pattern for pattern in REFUSED if fnmatchcase(name, pattern)), None)
    if pattern is not None and name not in except_for:
        raise ConfigError(
            f"{where}: {name} may not be set for ranks ({pattern}).",
            remedy="It chooses which code runs, or is phalanx's own. Set it on the host itself, where it is needed.",
        )


def read_variable(entry: str, where: str) -> tuple[str, str]:
    """The name and value of `NAME=value`.

    Raises:
        ConfigError: as `check_variable`; or there is no `=`.
    """
    name, equals, value = entry.partition("=")
    if not equals:
        raise ConfigError(f"{where}: {entry[:80]!r} has no value.", remedy="Write NAME=value.")
    check_variable(name, value, where)
    return name, value
