"""A rank with a control connection (`rendezvous.py`) joins its group: kernels, communicator, stage connections."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from phalanx.config import NONCE_BITS, EngineConfig, GroupConfig
from phalanx.dist import fault_injection
from phalanx.dist.corrupt_buffer import CorruptBuffer
from phalanx.dist.fault_injection import Injection
from phalanx.dist.group import Communicator, join
from phalanx.dist.reduce import Reducer
from phalanx.dist.stage_link import StageConnections, connect_stages
from phalanx.dist.topology import Topology
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.errors import ConfigError
from phalanx.kernels import install, preload
from phalanx.kernels.native_checksum import NativeChecksum
from phalanx.model.loading import load
from phalanx.tls.host_credentials import Credentials

log = logging.getLogger("phalanx.engine")

RING_JOIN_S = 15.0
"""Seconds to join a ring, whose ranks have met already (`rendezvous.py`). If another program is connected to a port of
the ring, the ranks wait for each other until this time is over."""


@dataclass(frozen=True, slots=True)
class Membership:
    """This rank's place in its group."""

    group: GroupConfig | None
    """None for a single rank."""
    topology: Topology
    link: LeaderLink | WorkerLink | SingleRank
    reducer: Reducer
    kernels: str
    """The kernels in use, as one line for the log."""
    injection: Injection | None
    """The fault to inject on this rank."""
    ends: StageConnections
    """Its connections to the stages before and after its own."""

    @property
    def stage(self) -> int:
        """The number of this rank's stage; 0 has the embedding."""
        return self.topology.place(self.link.rank).stage

    @property
    def ranks_here(self) -> int:
        """Ranks on this machine, which share its processors."""
        return 1 if self.group is None else self.group.ranks_here


def join_group(
    config: EngineConfig,
    group: GroupConfig | None,
    credentials: Credentials | None,
    link: LeaderLink | WorkerLink | SingleRank,
    communicator: Communicator | None,
    report: load.Progress,
) -> Membership:
    """Install the kernels, join the communicator, and connect to the stages beside this rank's own.

    Args:
        credentials: of this rank, for a group over several machines; else None.
        communicator: None if this rank has not joined it yet.

    Raises:
        ConfigError: flags ask for native kernels that are not used here.
        GroupError: a rank of this start is missing, or another process has taken its place.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()  # on the CPU it runs a C++ compiler at run time and gains nothing
    kernels = _install_kernels(config, 1 if group is None else group.ranks_here)
    injection = _own_injection(config, link.rank)
    report("joining the group", 0, 1)
    if injection is not None and injection.kind == "slow":
        time.sleep(fault_injection.SLOW_S)
    topology = Topology((1,) if group is None else group.widths or (group.size,))
    reducer = _reducer(config, group, topology, communicator, link.rank, injection)
    hosts = link.share(link.host)
    here = topology.ranks(topology.place(link.rank).stage)
    reducer.names = [f"rank {rank} on {hosts[rank]}" for rank in here]
    ends = _connect(config, group, credentials, topology, link, hosts, injection)
    return Membership(group, topology, link, reducer, kernels, injection, ends)


def _connect(
    config: EngineConfig,
    group: GroupConfig | None,
    credentials: Credentials | None,
    topology: Topology,
    link: LeaderLink | WorkerLink | SingleRank,
    hosts: list[str],
    injection: Injection | None,
) -> StageConnections:
    """The connections to other stages; none in a group of one stage."""
    if group is None or topology.n_stages == 1:
        return StageConnections(None, ())
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    fault = injection is not None and injection.kind in fault_injection.LINK_FAULTS
    tamper = partial(fault_injection.tampered, injection) if injection is not None and fault else None
    return connect_stages(
        group, topology, link.rank, names, credentials, link.share, deadline_s=config.join_seconds, tamper=tamper
    )  # fmt: skip


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
    injection = None if config.inject is None else fault_injection.parse(config.inject)
    return injection if injection is not None and injection.rank == rank else None


def _reducer(
    config: EngineConfig,
    group: GroupConfig | None,
    topology: Topology,
    communicator: Communicator | None,
    rank: int,
    injection: Injection | None,
) -> Reducer:
    """The all-reduces of this rank's stage; joins its communicator unless that is done."""
    place = topology.place(rank)
    width = topology.widths[place.stage]
    if group is None or group.backend is None or width == 1:
        return Reducer(None)
    if communicator is None:
        where = group.addresses[rank] if group.addresses else ""
        deadline_s = min(config.join_seconds, RING_JOIN_S) if group.backend == "ring" else config.join_seconds
        nonce = (group.nonce + place.stage) % (1 << NONCE_BITS)  # a rank cannot join another stage
        communicator = join(group.backend, place.tp_rank, width, nonce, where=where, deadline_s=deadline_s)
    corrupt = injection is not None and injection.kind in fault_injection.BUFFER_FAULTS
    fault = CorruptBuffer(injection) if injection is not None and corrupt else None
    checksum = NativeChecksum() if install.active() else None
    return Reducer(communicator, checked=config.check_collectives, fault=fault, checksum=checksum)
