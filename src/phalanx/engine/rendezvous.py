"""The ranks of a start connect over the control channel."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from phalanx import __version__
from phalanx.config import EngineConfig, GroupConfig
from phalanx.dist import control_address, fault_injection
from phalanx.dist.channel import LeaderChannel, WorkerChannel
from phalanx.dist.peers import Identity, PeerFailure, WatchdogLimits
from phalanx.dist.watchdog import write_stderr
from phalanx.engine.link import LeaderLink, WorkerLink
from phalanx.tls.host_credentials import Credentials


def rendezvous(
    config: EngineConfig,
    group: GroupConfig,
    credentials: Credentials | None,
    rank: int,
    *,
    on_lost: Callable[[PeerFailure], None],
) -> LeaderLink | WorkerLink:
    """Connect to the other ranks of this start; returns when all are connected.

    Args:
        credentials: of this rank; None where the ranks meet on a Unix socket.
        on_lost: called once, on the watchdog's thread, before the process exits because a rank was lost.

    Raises:
        EngineError: ranks are missing or not of this group, or the control address is taken; names them.
    """
    heartbeat_s = min(0.25, config.heartbeat_timeout_seconds / 4)
    limits = WatchdogLimits(
        hello_s=config.join_seconds, silence_s=config.heartbeat_timeout_seconds, heartbeat_s=heartbeat_s
    )
    me = identity(group, rank, config.inject)
    if me.rank == rank and _is_injected_late(config, rank):
        time.sleep(config.join_seconds * 10)

    def broken(lost: PeerFailure) -> NoReturn:
        write_stderr(f"rank {rank}: {lost}")
        on_lost(lost)
        os._exit(lost.code)

    if rank == 0:
        leader = LeaderChannel(control_address.listen(group.control), group, credentials, me, limits, broken)
        try:
            leader.gather()
        finally:
            control_address.remove_socket(group.control)
        return LeaderLink(leader, group.size, me.host)
    return WorkerLink(WorkerChannel.connect(group, credentials, me, limits, broken), rank, group.size, me.host)


def identity(group: GroupConfig, rank: int, fault: str | None = None) -> Identity:
    """This process's entry for the handshake."""
    injected = None if fault is None else fault_injection.parse(fault)
    other = injected is not None and injected.kind == "version" and injected.rank == rank
    return Identity(
        rank=rank,
        pid=os.getpid(),
        host=group.hosts[rank] if group.hosts else socket.gethostname(),
        version=__version__ + ("-other" if other else ""),
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        python=platform.python_version(),
        device=platform.machine(),
        fingerprint="",
    )


def _is_injected_late(config: EngineConfig, rank: int) -> bool:
    """Whether the injected fault makes this rank miss the rendezvous."""
    injected = None if config.inject is None else fault_injection.parse(config.inject)
    return injected is not None and injected.kind == "late" and injected.rank == rank
