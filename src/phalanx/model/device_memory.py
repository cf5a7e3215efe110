"""The memory of the device that MLX computes on: its size, the available part, and keeping it wired (macOS).

On Metal the limit is not the machine's memory but the part of it that macOS lets the GPU use, and the available part
depends on this process alone: the system makes room by dropping files from its cache and paging other programs out. An
NVIDIA GPU has memory of its own. On the CPU the host's memory counts. `memory.py` decides by these numbers.
`python -m phalanx.model.device_memory` prints them as JSON, for programs that do not import MLX.
"""

from __future__ import annotations

import logging

import mlx.core as mx
import msgspec

from phalanx import memory
from phalanx.errors import ConfigError
from phalanx.memory import GB, MachineMemory

log = logging.getLogger("phalanx.load")

SHARED_WITH_HOST = ("GB10", "Thor", "Orin")
"""In the names of NVIDIA GPUs that share the host's memory. CUDA counts the page cache as used there."""


def read_memory(sharing: int = 1) -> MachineMemory:
    """The memory that this process may use for weights and caches, and the available part of it.

    Args:
        sharing: ranks that share this memory and hold as much of it as this one. (Metal: MLX knows its own only.)

    Raises:
        ConfigError: MLX does not say how much memory the device has.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return memory.read_machine()
    info = mx.device_info()
    if mx.metal.is_available():
        total, physical = _bytes(info, "max_recommended_working_set_size"), _bytes(info, "memory_size")
        available = total - mx.get_active_memory() * sharing
        return MachineMemory(total, max(0, available), "metal", outside=max(0, physical - total))
    if any(name in str(info.get("device_name")) for name in SHARED_WITH_HOST):
        return memory.read_machine()
    free = _bytes(info, "free_memory") + mx.get_cache_memory()  # MLX reuses it, or gives it back
    return MachineMemory(_bytes(info, "total_memory"), free, "cuda", device=str(info.get("uuid", "")))


def _bytes(info: dict[str, str | int], name: str) -> int:
    found = info.get(name)
    if not isinstance(found, int) or found <= 0:
        raise ConfigError(
            f"MLX does not say how much memory the device has: {name} is {found!r} ({info.get('device_name')}).",
            remedy="Install the version of mlx that phalanx asks for.",
        )
    return found


def wire(wanted: bool, sharing: int = 1) -> None:
    """On Metal, let MLX keep weights and caches wired. Call it before weights are read. Changes MLX's state.

    Without it macOS may page weights out that were not read for a while, and then each step waits for the disk. It
    concerns what MLX has allocated, not the whole limit.

    Args:
        wanted: `EngineConfig.wired_limit`.
        sharing: ranks that share the GPU's limit.
    """
    machine = read_memory()
    if machine.kind != "metal":
        return
    if not wanted:
        log.warning("weights are not wired (--no-wired-limit): macOS may page them out, which makes steps slow")
        return
    limit = machine.total // sharing
    try:
        mx.set_wired_limit(limit)
    except (RuntimeError, ValueError) as error:
        log.warning("weights are not wired, so macOS may page them out: %s", error)
        return
    log.info(
        "up to %.2f GiB of weights and caches stay in memory (wired); --no-wired-limit lets macOS page", limit / GB
    )


if __name__ == "__main__":
    print(msgspec.json.encode(read_memory()).decode())
