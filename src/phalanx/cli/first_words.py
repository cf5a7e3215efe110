"""`phalanx` without a command: what this machine is, which models it has, and the commands that come next."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx import __version__
from phalanx.catalog.local_models import LocalModel, local_models
from phalanx.catalog.short_names import DEMO, PACKAGED
from phalanx.cli.engine_extra import missing_module
from phalanx.cli.list import size_of
from phalanx.cluster.machine import rank_memory, tool
from phalanx.config import DEFAULT_PORT
from phalanx.environment import memory_guard_override_gb
from phalanx.errors import ExitCode
from phalanx.memory import GB, MachineMemory, guard_bytes
from phalanx.text.printable import printable

BYTES_PER_WEIGHT = 0.5625  # at 4 bits: 64 weights share a scale and a bias of 16 bits each
SHARE_OF_WEIGHTS = 0.85  # of the memory that a model may have; the rest is for the requests' caches
MAX_NAMED = 3  # models, so that they stay on one line
WIDTH = 36  # of the commands that come next
MEMORY_IS = {"host": "memory", "metal": "memory for its GPU", "cuda": "memory on the GPU"}


def command() -> int:
    """Print the page: at most ten lines."""
    memory, models = rank_memory(), [model for model in local_models() if not model.lacks]
    print(printable(f"phalanx {__version__} on {platform.node()}: {_processor()}, {os.cpu_count()} cores"))
    print(f"{memory.total / GB:.0f} GiB of {MEMORY_IS[memory.kind]}: {_abilities(memory)}")
    print(printable(f"Models here: {_named(models)}"))
    print("Next:")
    columns = shutil.get_terminal_size().columns
    for line, what in _next(models):
        print(f"  {line:<{WIDTH}}# {what}" if len(what) + WIDTH + 4 <= columns else f"  {line}")
    print("`phalanx --help` lists all commands.")
    return ExitCode.OK


def _processor() -> str:
    """Its name, as the system has it."""
    if name := tool("sysctl", "-n", "machdep.cpu.brand_string").strip():
        return name
    for file, mark in ((Path("/proc/cpuinfo"), "model name\t: "), (Path("/proc/device-tree/model"), "")):
        try:
            lines = file.read_text(errors="replace").strip("\0\n").splitlines()
        except OSError:
            continue
        if name := next((line.removeprefix(mark) for line in lines if line.startswith(mark)), ""):
            return name
    return platform.machine()


def _computes() -> bool:
    """Whether phalanx is installed with its engine."""
    return not missing_module()


def _abilities(memory: MachineMemory) -> str:
    if not _computes():
        extra = "engine" if sys.platform == "darwin" else "cpu,mpi"
        return f"for the gateway and for hosts; the engine comes with 'phalanx[{extra}]=={__version__}'"
    room = memory.total - guard_bytes(memory, memory_guard_override_gb())
    return f"models of up to about {max_model(room):.2g} billion parameters at 4 bits"


def max_model(room: int) -> float:
    """The parameters, in billions, of a model of 4 bits that `room` bytes hold beside the caches of its requests."""
    return max(0, room) * SHARE_OF_WEIGHTS / BYTES_PER_WEIGHT / 1e9


def _named(models: Sequence[LocalModel]) -> str:
    largest = sorted(models, key=lambda model: model.bytes, reverse=True)
    names = [f"{model.name} ({size_of(model.bytes)})" for model in largest[:MAX_NAMED]]
    more = len(models) - len(names)
    return ", ".join(names) + (f", and {more} more (`phalanx list`)" if more else "")


def _next(models: Sequence[LocalModel]) -> list[tuple[str, str]]:
    """The commands that come next, and what each does."""
    real = [model for model in models if model.name != DEMO and model.fits]
    served = max(real, key=lambda model: model.bytes).name if real else PACKAGED
    cluster = ("phalanx hostfile HOST1,HOST2", "a cluster: one model on several machines")
    if not _computes():
        return [("phalanx gateway --worker-urls URL", "one address for servers elsewhere"), cluster]
    return [
        (f"phalanx serve {served}", f"a server of OpenAI's API, port {DEFAULT_PORT}"),
        (f"phalanx chat http://127.0.0.1:{DEFAULT_PORT}", "talk to it, from another terminal"),
        cluster,
    ]
