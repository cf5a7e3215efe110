"""Which environment variables hostfiles, flags and the server may set for ranks.

What may be set is listed, by name or by the beginning of a name: numbers and names of devices and algorithms. Every
other variable is refused, since it could choose code, files or programs of the hosts. Users set those on the hosts
themselves (docs/clusters.md, Variables of ranks).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import NamedTuple

from phalanx.errors import ConfigError


class Rule(NamedTuple):
    """What these names have in common, and the names; `*` stands for any rest."""

    reason: str
    names: tuple[str, ...]


REFUSED = (
    Rule("it is phalanx's own, or tells a rank its place in the group", (
        "PHALANX_*", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE", "MLX_JACCL_*", "NCCL_HOST_IP",
        "NCCL_PORT", "OMPI_COMM_WORLD_*", "OMPI_UNIVERSE_*",
    )),
    Rule("it chooses code that a program loads or runs", (
        "LD_*", "DYLD_*", "GLIBC_*", "PYTHON*", "BASH_*", "ENV", "IFS", "SHELL", "OMP_TOOL*", "OPENSSL_*", "SSL_*",
        "MLX_MPI_LIBNAME", "NCCL_NET", "UCX_MODULE*", "CUDA_INJECTION*", "OPAL_*", "RDMAV_DRIVERS", "IBV_DRIVERS",
    )),
    Rule("it says where files lie", ("HOME", "TMPDIR", "TMP", "TEMP", "XDG_*", "HF_HOME", "LOCPATH")),
)  # fmt: skip
"""Names that nothing below allows, with the reason for the error's text."""
PLACES = frozenset(
    "AGENT CMD COMMAND CONF CONFIG DIR DIRECTORY DIRS EXEC FILE FILENAME FILES LIB LIBRARIES LIBRARY LIBS PATH PATHS "
    "PLUGIN PLUGINS PRELOAD PROGRAM SCRIPT TMPDIR TUNER URI".split()
)
"""Words of names, between `_`, that mean a file, a directory or a program. Nothing below allows them either: the
settings of Open MPI alone have hundreds of names."""

ALLOWED = (
    Rule("MLX: how it computes and waits", (
        "MLX_METAL_FAST_SYNCH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_BFS_MAX_WIDTH",
        "MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE", "MLX_USE_CUDA_GRAPHS", "MLX_CUDA_GRAPH_CACHE_SIZE",
        "MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_RESIDENCY_*", "MLX_NCCL_TIMEOUT", "MLX_RING_VERBOSE",
        "MLX_MEMORY_GUARD_GB",
    )),
    Rule("Open MPI: transports, algorithms and networks, by name", (
        "OMPI_MCA_btl", "OMPI_MCA_btl_*", "OMPI_MCA_pml", "OMPI_MCA_pml_ob1_*", "OMPI_MCA_pml_ucx_*", "OMPI_MCA_mtl",
        "OMPI_MCA_coll", "OMPI_MCA_coll_*", "OMPI_MCA_opal_common_ucx_*", "OMPI_MCA_oob_tcp_*", "PRTE_MCA_oob_tcp_*",
        "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_threads_pthreads_yield_strategy",
    )),
    Rule("NCCL: networks, links, algorithms, what it logs", (
        "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_*", "NCCL_SOCKET_*", "NCCL_OOB_NET_*", "NCCL_NET_GDR_*",
        "NCCL_P2P_*", "NCCL_SHM_*", "NCCL_NVLS_*", "NCCL_MNNVL_*", "NCCL_CUMEM_*", "NCCL_ALGO", "NCCL_PROTO",
        "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_*", "NCCL_MAX_*", "NCCL_CROSS_NIC", "NCCL_IGNORE_CPU_AFFINITY",
    )),
    Rule("UCX: transports, devices, thresholds, what it logs", (
        "UCX_TLS", "UCX_NET_DEVICES", "UCX_LOG_LEVEL", "UCX_IB_*", "UCX_RC_*", "UCX_DC_*", "UCX_UD_*", "UCX_TCP_*",
        "UCX_RNDV_*", "UCX_MAX_*", "UCX_ZCOPY_THRESH", "UCX_MEMTYPE_CACHE", "UCX_WARN_UNUSED_ENV_VARS",
    )),
    Rule("CUDA: devices, when code is loaded, size of its cache", (
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "NVIDIA_TF32_OVERRIDE",
    )),
    Rule("threads and memory of processors' libraries", (
        "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "RAYON_NUM_THREADS", "GOMP_CPU_AFFINITY",
        "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "MALLOC_ARENA_MAX",
    )),
    Rule("Hugging Face's libraries: no network, no threads", (
        "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM",
    )),
)  # fmt: skip
"""What may be set. A name belongs here if no value of it can name code, a file or a program."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # halves of surrogates are not text


def why_refused(name: str) -> str:
    """Why a variable may not be set for ranks; empty if it may."""
    if (rule := _rule_of(name, REFUSED)) is not None:
        return rule.reason
    if PLACES.intersection(name.upper().split("_")):
        return "it names a file, a directory or a program"
    return "" if _rule_of(name, ALLOWED) is not None else "it is not one of those that are known to choose no code"


def _rule_of(name: str, rules: tuple[Rule, ...]) -> Rule | None:
    return next((rule for rule in rules if any(fnmatchcase(name, pattern) for pattern in rule.names)), None)


def check_variable(name: str, value: str, where: str, *, except_for: Collection[str] = ()) -> None:
    """Check one variable.

    Args:
        where: the file or flag that sets it, for messages.
        except_for: names that may be set although they are refused.

    Raises:
        ConfigError: names `where` and the variable.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: {name[:80]!r} is not the name of a variable.", remedy="Write NAME=value.")
    if CONTROL.search(value):
        raise ConfigError(
            f"{where}: the value of {name} has a line break or another control character.", remedy="Write one line."
        )
    if name not in except_for and (reason := why_refused(name)):
        raise ConfigError(
            f"{where}: {name[:80]} may not be set for ranks: {reason}.",
            remedy="If a rank needs it, set it on its host: ranks keep their host's variables (docs/clusters.md, "
            "Variables of ranks).",
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
