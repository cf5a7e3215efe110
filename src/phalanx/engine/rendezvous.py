"""The ranks of a start connect over the control channel. Does not know the fabric."""

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
from phalanx.dist import fault_injection
from phalanx.dist.channel import LeaderChannel, WorkerChannel
from phalanx.dist.peers import Identity, PeerFailure, WatchdogLimits
from phalanx.dist.watchdog import write_stderr
from phalanx.engine.link import LeaderLink, WorkerLink
from phalanx.errors import GroupError


def rendezvous(
    config: EngineConfig, group: GroupConfig, secret: bytes, rank: int, *, on_lost: Callable[[PeerFailure], None]
) -> LeaderLink | WorkerLink:
    """Connect to the other ranks of this start; returns when all are connected.

    Args:
        secret: proves that a rank belongs to this group.
        on_lost: called once, from the watchdog's thread, before the process exits because the group is broken.

    Raises:
        EngineError: ranks are missing, or are not of this group; names them. Or the port is taken; names it.
    """
    host, _, port = group.control.rpartition(":")
    heartbeat_s = min(0.25, config.silence_seconds / 4)
    limits = WatchdogLimits(hello_s=config.join_seconds, silence_s=config.silence_seconds, heartbeat_s=heartbeat_s)
    me = identity(rank, config.inject)
    if me.rank == rank and _is_injected_late(config, rank):
        time.sleep(config.join_seconds * 10)

    def broken(lost: PeerFailure) -> NoReturn:
        write_stderr(f"rank {rank}: {lost}")
        on_lost(lost)
        os._exit(lost.code)

    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, int(port)), family=family, backlog=64)
        except OSError as error:
            raise GroupError(
                f"rank 0 cannot listen on {group.control} for the other ranks: {error.strerror}.",
                remedy="The next start takes other ports.",
            ) from error
        leader = LeaderChannel(listener, group.size, secret, me, limits, broken)
        leader.gather()
        return LeaderLink(leader, group.size)
    return WorkerLink(
        WorkerChannel.connect((host, int(port)), group.size, secret, me, limits, broken), rank, group.size
    )


def identity(rank: int, fault: str | None = None) -> Identity:
    """How this process introduces itself to the other ranks."""
    injected = None if fault is None else fault_injection.parse(fault)
    other = injected is not None and injected.kind == "version" and injected.rank == rank
    return Identity(
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
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
