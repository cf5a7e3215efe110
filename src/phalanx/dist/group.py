"""Joins a group of ranks: once, before a deadline, and verified (design: Fail-stop, then resume).

MLX's `init` can block for ever while it holds the interpreter's lock, can return several groups of one rank, and can
connect to a rank of another job. So a system timer ends the process if joining takes too long, and the ranks first
compare size, rank and a nonce of this start over the new group.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
import msgspec
from msgspec import Struct

from phalanx.config import NONCE_BITS, Backend, GroupConfig
from phalanx.dist.ports import free_ports
from phalanx.errors import GroupError
from phalanx.tls.host_credentials import Credentials

log = logging.getLogger("phalanx.group")

Communicator = mx.distributed.Group
"""The group of ranks that run collectives together."""

_MLX_NAME = {"jaccl-ring": "jaccl"}  # for MLX a variant of jaccl, which MLX_JACCL_RING selects
ENTRY_BYTES = 2048  # of a rank's `_Entry`; its certificate has about 700


def join(backend: Backend, rank: int, size: int, nonce: int, *, where: str, deadline_s: float) -> Communicator:
    """Join the group of this start and verify it.

    Args:
        nonce: below 2**48; the same on all ranks of this start, different for every start.
        where: the address at which other ranks reach this one, for messages.
        deadline_s: SIGALRM ends the process if joining and verifying take longer.

    Raises:
        GroupError: the backend cannot start, or its group is not the intended one.
    """
    started = time.monotonic()
    log.info("joining %d ranks over %s%s, %g s at most", size, backend, where and f" at {where}", deadline_s)
    with _alarm(deadline_s):
        try:
            group = mx.distributed.init(strict=True, backend=_MLX_NAME.get(backend, backend))
        except (RuntimeError, ValueError) as error:
            raise GroupError(
                f"Rank {rank} could not start the {backend} backend{where and f' at {where}'}: {error}",
                remedy="Check that every rank started, and that nothing else uses the port.",
            ) from error
        _verify(group, backend, rank, size, nonce)
    log.info("joined in %.2f s", time.monotonic() - started)
    return group


class _Entry(Struct, frozen=True, kw_only=True):
    """One rank's part of the exchange over the communicator."""

    certificate: str
    """PEM."""
    control: str
    """Of rank 0: `host:port` on which it accepts control connections."""
    nonce: int
    """Of rank 0: the nonce of this start."""


def exchange_credentials(group: Communicator, backend: Backend, host: str) -> tuple[GroupConfig, Credentials]:
    """Exchange certificates, and rank 0's control address, over the communicator.

    For ranks that `mpirun` or `mlx.launch` started; phalanx's own launcher gives every rank all of this. The
    certificates are new, so that only members of the communicator can open control connections.

    Args:
        host: the address at which the other ranks reach rank 0.

    Returns:
        The group's configuration, with a free port of `host` for control connections, and this rank's credentials.

    Raises:
        GroupError: a rank's entry cannot be read; names the rank.
    """
    rank, size = group.rank(), group.size()
    mine = importlib.import_module("phalanx.tls.certificates").make_certificate(f"rank {rank}")
    control = f"{host}:{free_ports(1, host)[0]}" if rank == 0 else ""
    entry = _Entry(certificate=mine.certificate, control=control, nonce=secrets.randbits(NONCE_BITS))
    entries = _exchange(group, entry)
    same_host = host in ("127.0.0.1", "::1", "localhost")
    config = GroupConfig(
        size=size,
        backend=backend,
        nonce=entries[0].nonce,
        control=entries[0].control,
        ranks_here=size if same_host else 1,
    )
    certificates = tuple(one.certificate for one in entries)
    return config, Credentials(key=mine.key, place=rank, certificates=certificates)


def _exchange(group: Communicator, mine: _Entry) -> list[_Entry]:
    """Every rank's entry: the sum of a [size, ENTRY_BYTES] array in which each rank has filled its row."""
    text = msgspec.json.encode(mine)
    if len(text) > ENTRY_BYTES:
        raise GroupError(f"Rank 0's control address is too long: {mine.control[:80]}...", remedy="Give a shorter one.")
    with mx.stream(mx.Device(mx.cpu)):
        row = mx.array(list(text.ljust(ENTRY_BYTES)), dtype=mx.int32)
        here = mx.arange(group.size())[:, None] == group.rank()
        values = cast("list[list[int]]", mx.distributed.all_sum(mx.where(here, row, 0), group=group).tolist())
    entries = []
    for rank, numbers in enumerate(values):
        try:
            entries.append(msgspec.json.decode(bytes(numbers), type=_Entry))
        except (ValueError, msgspec.DecodeError) as error:
            raise GroupError(
                f"The entry that rank {rank} sent over the communicator cannot be read: {error}.",
                remedy="All ranks need the same version of phalanx.",
            ) from error
    return entries


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """End the process by SIGALRM, wherever it blocks, unless the `with` block ends within `seconds`."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _verify(group: Communicator, backend: Backend, rank: int, size: int, nonce: int) -> None:
    if (group.rank(), group.size()) != (rank, size):
        raise GroupError(
            f"{backend} came up with rank {group.rank()} of {group.size()}; this process is rank {rank} of {size}.",
            remedy="The hosts' order or the device matrix is not the same on all machines.",
        )
    cpu = mx.Device(mx.cpu)
    with mx.stream(cpu):
        mine = mx.array([1 if i == rank else 0 for i in range(size)] + _split_nonce(nonce), dtype=mx.int32)
        least = mx.distributed.all_min(mine[size:], group=group)
        most = mx.distributed.all_max(mine[size:], group=group)
        present = mx.distributed.all_sum(mine[:size], group=group)
        mx.eval(least)
        mx.eval(most)
        mx.eval(present)
    if least.tolist() != _split_nonce(nonce) or most.tolist() != _split_nonce(nonce):
        raise GroupError(
            f"Rank {rank} is connected to a rank of another job, or of an earlier start ({backend}).",
            remedy="Another group uses the same ports; phalanx starts again on fresh ones.",
        )
    if present.tolist() != [1] * size:
        raise GroupError(f"{backend} counts ranks {present.tolist()} instead of one of each; the group is not whole.")


def _split_nonce(nonce: int) -> list[int]:
    """A nonce of 48 bits as three numbers of 16, which every backend sums exactly."""
    return [(nonce >> shift) & 0xFFFF for shift in (0, 16, 32)]
