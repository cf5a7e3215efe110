"""The NVIDIA GPUs that MLX can use on this machine, and which of them each rank gets.

NCCL needs a GPU per rank. MLX computes on the first GPU that a process sees, so ranks on one machine see one each,
through CUDA_VISIBLE_DEVICES. Does not load MLX or CUDA, which would keep memory on a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from phalanx.environment import environment

VARIABLE = "CUDA_VISIBLE_DEVICES"
PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")
LIST = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
LIST_S = 10.0  # a driver may need some to start


@cache
def usable_gpus() -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that MLX can use here; none if MLX is installed for processors."""
    if not any(_installed(package) for package in PACKAGES):
        return ()
    if shutil.which(LIST[0]) is None:
        return ()
    try:
        done = subprocess.run(LIST, capture_output=True, text=True, timeout=LIST_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    listed = [line.strip() for line in done.stdout.splitlines() if line.startswith("GPU-")]
    return allowed(listed, environment().get(VARIABLE))


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def allowed(listed: Sequence[str], given: str | None) -> tuple[str, ...]:
    """The machine's GPUs that the user's CUDA_VISIBLE_DEVICES names, in its order.

    Args:
        listed: UUIDs, in the order of their numbers.
        given: the variable's value: numbers or (beginnings of) UUIDs; None if it is not set. As CUDA reads it, an entry
            that names no GPU ends the list.
    """
    if given is None:
        return tuple(listed)
    found: list[str] = []
    for entry in (entry.strip() for entry in given.split(",")):
        if entry.isdecimal():
            uuid = listed[int(entry)] if int(entry) < len(listed) else None
        else:
            uuid = next((one for one in listed if entry and one.startswith(entry)), None)
        if uuid is None:
            break
        found.append(uuid)
    return tuple(found)


def shortage(ranks: int, gpus: Mapping[str, int]) -> str:
    """Why some rank lacks a GPU of its own; empty if none does.

    Args:
        gpus: host -> number of GPUs that MLX can use there. All ranks are on a single host, or one on each of several.
    """
    if len(gpus) > 1:
        without = [host for host, count in gpus.items() if count == 0]
        return f"no GPU that MLX can use is known on {', '.join(without)}" if without else ""
    (count,) = gpus.values()
    return "" if count >= ranks else f"{ranks} ranks, but {count} GPU{'' if count == 1 else 's'} that MLX can use"


def gpu_variables(rank: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment variables that give a rank of this machine its GPU. Without NCCL, ranks may share one."""
    return {VARIABLE: gpus[rank % len(gpus)]} if len(gpus) > 1 else {}
