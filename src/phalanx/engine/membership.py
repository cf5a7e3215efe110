"""A rank joins its group: native kernels, the fabric, and the sums over ranks.

Starts from a control connection (`rendezvous.py`). Does not know models or requests.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

import mlx.core as mx

from phalanx.config import EngineConfig, GroupConfig
from phalanx.dist import fault_injection
from phalanx.dist.corrupt_buffer import CorruptBuffer
from phalanx.dist.fault_injection import Injection
from phalanx.dist.group import Fabric, join
from phalanx.dist.reduce import Reducer
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.errors import ConfigError
from phalanx.kernels import install, preload
from phalanx.kernels.native_checksum import NativeChecksum
from phalanx.model.loading import load

log = logging.getLogger("phalanx.engine")


@dataclass(frozen=True, slots=True)
class Membership:
    """This rank's place in its group."""

    group: GroupConfig | None
    """None for a single rank."""
    link: LeaderLink | WorkerLink | SingleRank
    reducer: Reducer
    kernels: str
    """The kernels in use, as one line for the log."""
    injection: Injection | None
    """The fault to be injected on this rank."""

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine, which share its memory and processors."""
        return 1 if self.group is None else self.group.ranks_here


def join_group(
    config: EngineConfig,
    group: GroupConfig | None,
    link: LeaderLink | WorkerLink | SingleRank,
    fabric: Fabric | None,
    report: load.Progress,
) -> Membership:
    """Install the kernels and join the fabric.

    Args:
        fabric: None where it is not joined yet.

    Raises:
        ConfigError: flags ask for native kernels that are not used here.
        GroupError: a rank of this start is missing, or another process is in its place.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()  # on the CPU it runs a C++ compiler at run time and gains nothing
    kernels = _install_kernels(config, 1 if group is None else group.ranks_here)
    injection = _own_injection(config, link.rank)
    report("joining the group", 0, 1)
    if injection is not None and injection.kind == "slow":
        time.sleep(fault_injection.SLOW_S)
    reducer = _reducer(config, group, fabric, link.rank, injection)
    reducer.names = [f"rank {rank} on {host}" for rank, host in enumerate(link.share(socket.gethostname()))]
    return Membership(group, link, reducer, kernels, injection)


def _install_kernels(config: EngineConfig, ranks_here: int) -> str:
    """Install the native kernels if configured and usable. Returns the kernels in use, as one line for the log."""
    if preload.PROBLEM:
        log.warning("the native kernels cannot be used: %s", preload.PROBLEM)
    installed = None
    if config.cpu_kernels:
        threads = config.threads or install.threads_for(ranks_here)
        installed = install.install(config.cpu_precision, threads, async_dispatch=ranks_here == 1)
    if installed is not None:
        return f"native: {installed}"
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    why = preload.why_not() if on_cpu else f"MLX computes on {mx.default_device()}"
    if config.threads is not None or config.cpu_precision != "auto":
        flag = "--threads" if config.threads is not None else "--cpu-precision"
        raise ConfigError(f"{flag} applies to native CPU kernels, and none are used: {why}.", remedy="Leave it out.")
    return f"MLX's own, on one thread ({why})" if on_cpu else why


def _own_injection(config: EngineConfig, rank: int) -> Injection | None:
    """The injected fault, on the rank that it names."""
    injection = None if config.inject is None else fault_injection.parse(config.inject)
    return injection if injection is not None and injection.rank == rank else None


def _reducer(
    config: EngineConfig,
    group: GroupConfig | None,
    fabric: Fabric | None,
    rank: int,
    injection: Injection | None,
) -> Reducer:
    """Join the fabric, unless that is done, and sum over it."""
    if group is None:
        return Reducer(None)
    if fabric is None:
        where = group.addresses[rank] if group.addresses else ""
        fabric = join(group.backend, rank, group.size, group.nonce, where=where, deadline_s=config.join_seconds)
    corrupt = injection is not None and injection.kind in fault_injection.BUFFER_FAULTS
    fault = CorruptBuffer(injection) if injection is not None and corrupt else None
    checksum = NativeChecksum() if install.active() else None
    return Reducer(fabric, checked=config.check_collectives, fault=fault, checksum=checksum)
