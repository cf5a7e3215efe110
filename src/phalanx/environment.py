"""Every environment variable that phalanx reads, and the directories of this user that follow from them.

Nothing else reads `os.environ`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.errors import ConfigError
from phalanx.private_files import is_open_to_others, why_not_private

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
KERNELS_VARIABLE = "PHALANX_CPU_KERNELS"
API_KEY_VARIABLE = "PHALANX_API_KEY"
ADMIN_KEY_VARIABLE = "PHALANX_ADMIN_KEY"
GATEWAY_ADMIN_KEY_VARIABLE = "PHALANX_GATEWAY_ADMIN_KEY"  # the servers' key opens less, and must not open /admin
LAUNCHD_VARIABLE = "PHALANX_LAUNCHD"
WORKER_KEY_VARIABLE = "PHALANX_WORKER_KEY"
WORKER_ADMIN_KEY_VARIABLE = "PHALANX_WORKER_ADMIN_KEY"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
GUARD_VARIABLES = ("PHALANX_MEMORY_GUARD_GB", "MLX_MEMORY_GUARD_GB")

VARIABLES: Mapping[str, str] = {
    API_KEY_VARIABLE: "Keys that `serve` and `gateway` ask clients for, with blanks between them; `chat`, `launch` and "
    "`demo` send the first.",
    ADMIN_KEY_VARIABLE: "The admin key of `serve`: gateways move streams with it, and it manages models.",
    GATEWAY_ADMIN_KEY_VARIABLE: "The key of `/admin` of `gateway`.",
    WORKER_KEY_VARIABLE: "The key that `gateway` sends to replicas.",
    WORKER_ADMIN_KEY_VARIABLE: "The admin key of a gateway's replicas.",
    GUARD_VARIABLES[0]: "GiB that ranks leave free for the rest of the machine, as --memory-guard-gb.",
    GUARD_VARIABLES[1]: "The same, where the first one is not set.",
    KERNELS_VARIABLE: "0: a rank does not load the native CPU kernels, as --no-cpu-kernels.",
    LAUNCHD_VARIABLE: "1: launchd started this process; an error that a restart cannot mend then ends with 0.",
    "KERN_ISA": "Instruction set of the native CPU kernels (docs/native-kernels.md); without it, the best one.",
    "KERN_THREADS": "Threads of the native CPU kernels in a program other than a rank; ranks have --threads.",
    RUNTIME_VARIABLE: "Directory of sockets and PID files, if it is this user's alone.",
    "TMPDIR": "The same, where no other directory will do. Ranks get a directory of their own as theirs.",
    "XDG_CACHE_HOME": "phalanx's caches and imported GGUF files lie in its folder `phalanx`; without it in `~/.cache`.",
    "HF_HOME": "Models of the hub lie in its folder `hub`; without it in `~/.cache/huggingface`.",
    "HF_HUB_CACHE": "Models of the hub lie here instead.",
    ENDPOINT_VARIABLE: "Address of the hub.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that ranks may use: numbers, or UUIDs or their beginnings.",
    "NO_COLOR": "If it is set, errors and notes have no colours.",
    "TERM": "`dumb`: the same.",
}
"""Variables that a user may set, and what each does, for `docs/reference/environment.md`. huggingface_hub reads others,
such as HF_TOKEN; `rank_variables.py` has those that may be set for ranks."""


def environment() -> Mapping[str, str]:
    """The process environment."""
    return os.environ


OF_LAUNCHERS = (
    "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_WORLD_SIZE", "MLX_JACCL_", "NCCL_HOST_IP", "NCCL_PORT",
    "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PRTE_",
)  # fmt: skip
"""Variables, by their beginnings, in which launchers tell a rank its place."""


def child_environment() -> dict[str, str]:
    """The process environment for ranks and what starts them.

    Without phalanx's own variables, but for those that a rank reads: keys stay here. And without what a launcher told
    this process or its parents: a rank would take it for its own place.
    """
    kept = (KERNELS_VARIABLE, *GUARD_VARIABLES)
    left_out = ("PHALANX_", *OF_LAUNCHERS)
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(left_out)}


def default_environment(variables: Mapping[str, str]) -> None:
    """Set variables that libraries in this process read, where the user has not."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_environment(variables: Mapping[str, str]) -> None:
    """Set variables that libraries in this process read, whatever the user has set."""
    os.environ.update(variables)


def cpu_kernels_wanted() -> bool:
    """Whether this process may load the native kernels; the launcher forbids it with `PHALANX_CPU_KERNELS=0`."""
    return os.environ.get(KERNELS_VARIABLE, "1") != "0"


def under_launchd() -> bool:
    """Whether macOS's launchd started this process by a unit of `deploy/`, which sets `PHALANX_LAUNCHD=1`."""
    return os.environ.get(LAUNCHD_VARIABLE, "0") != "0"


def memory_guard_override_gb() -> float | None:
    """`PHALANX_MEMORY_GUARD_GB`, else `MLX_MEMORY_GUARD_GB`; None when neither is set.

    Raises:
        ConfigError: the variable is not a non-negative number.
    """
    for name in GUARD_VARIABLES:
        text = os.environ.get(name)
        if text is None or text == "":
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value >= 0.0 or value == float("inf"):
            raise ConfigError(f"{name}={text!r} is not a number of GiB.", remedy=f"Set {name}=5, or unset it.")
        return value
    return None


def api_keys_from(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in `PHALANX_API_KEY` (as `vllm serve` reads VLLM_API_KEY), with blanks between them."""
    return tuple(variables.get(API_KEY_VARIABLE, "").split())


def api_keys_from_environment() -> tuple[str, ...]:
    """The keys in this process's environment, for a server.

    Raises:
        ConfigError: of `key_from_environment`.
    """
    key_from_environment(API_KEY_VARIABLE)
    return api_keys_from(os.environ)


def key_from_environment(name: str) -> str | None:
    """A variable that holds a key; None if it is not set.

    Raises:
        ConfigError: it is set, but blank. What fills it in has failed, and no key would be asked for.
    """
    key = os.environ.get(name)
    if key is not None and not key.strip():
        raise ConfigError(f"{name} is set, but there is no key in it.", remedy="Put a key into it, or unset it.")
    return key


def api_keys_in(text: str) -> list[str]:
    """The keys in a file of keys: one a line; empty lines and lines that begin with # do not count."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def api_key_from_environment() -> str | None:
    """The first of these keys, for a client; None without any."""
    return next(iter(api_keys_from(os.environ)), None)


LAST_RESORT = "/tmp"
SOCKET_PATH = 103
"""Longest path of a Unix socket, in bytes: macOS has room for 104 with the zero at the end, Linux for 108."""
SOCKET_NAME = 44
"""Bytes of it that phalanx's own directory and names take, at most: `/phalanx-abcdefgh/engine-12345.sock` and some."""


def runtime_dir() -> Path:
    """Directory of this user's sockets and PID files.

    The first usable one of `$XDG_RUNTIME_DIR`, on macOS `~/Library/Application Support/phalanx`, `$TMPDIR` and /tmp: it
    exists, this user may write there and others may not rename what he makes there, and its path is short enough for
    sockets. (Of /tmp the second is taken for granted: in a container it may have no sticky bit, and one user.)

    Raises:
        ConfigError: there is none; says what is wrong with each.
    """
    problems = []
    for folder in (os.environ.get(RUNTIME_VARIABLE), _in_library(), os.environ.get("TMPDIR"), LAST_RESORT):
        if folder and not (problem := _unusable(folder)):
            return Path(folder)
        if folder:
            problems.append(f"{folder} {problem}")
    raise ConfigError(
        f"There is no directory for sockets: {', '.join(problems)}.",
        remedy=f"Set {RUNTIME_VARIABLE} or TMPDIR to a directory of yours with a short path.",
    )


def _in_library() -> str | None:
    """On macOS, made if it is missing. Both temporary directories there lose files that lie unread for three days."""
    if platform.system() != "Darwin":
        return None
    folder = Path.home() / "Library" / "Application Support" / "phalanx"
    with contextlib.suppress(OSError):  # the next directory will do
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder)


def _unusable(folder: str) -> str:
    """Why sockets cannot be made in a directory; empty if they can."""
    if not Path(folder).is_dir():
        return "is not a directory"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "may not be written to"
    if folder != LAST_RESORT and is_open_to_others(Path(folder)):
        return "is another user's, or others may rename what lies there"
    if len(os.fsencode(folder)) > SOCKET_PATH - SOCKET_NAME:
        return f"is longer than {SOCKET_PATH - SOCKET_NAME} bytes"
    return ""


def temporary_directory() -> Path:
    """Where C++'s libraries look for it: `$TMPDIR`, else /tmp."""
    return Path(os.environ.get("TMPDIR") or LAST_RESORT)


def own_cache() -> Path:
    """`cache_dir`, made if it is missing, in which no other user can have put files.

    Raises:
        ConfigError: it cannot be made, or is not this user's alone.
    """
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:  # there is no home directory, perhaps
        raise ConfigError(
            f"There is no directory for caches: {error}.", remedy="Set XDG_CACHE_HOME to a directory of yours."
        ) from error
    if problem := why_not_private(folder):
        raise ConfigError(f"{folder} is not used: {problem}.", remedy="Delete it, or `chmod 700` it if it is yours.")
    return folder


def hub_cache() -> Path:
    """Directory of huggingface_hub's models: `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else below the home directory."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def cache_dir() -> Path:
    """phalanx's directory in this user's caches: `$XDG_CACHE_HOME/phalanx`, else `~/.cache/phalanx`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"


def check_hub_endpoint() -> None:
    """Refuse a hub's address that is not a URL: the error of the hub's client would not name it.

    Raises:
        ConfigError: names the variable and its value.
    """
    endpoint = os.environ.get(ENDPOINT_VARIABLE)
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        right = False
    if not right:
        raise ConfigError(
            f"{ENDPOINT_VARIABLE} is {endpoint!r}, which is not a URL.",
            remedy="Set it to the hub's address, such as https://huggingface.co, or unset it.",
        )
