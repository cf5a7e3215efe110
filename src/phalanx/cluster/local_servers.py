"""The servers and gateways that this user runs on this machine, found among the system's processes: no file lists them.

A server's ranks have their settings on their command lines; its address is that of its sockets.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil
from msgspec import Struct

from phalanx.cluster import identity
from phalanx.cluster.argument_flags import split_flag
from phalanx.config import EngineConfig
from phalanx.speculation_config import DraftModelSpeculation

Kind = Literal["serve", "gateway"]


class LocalServer(Struct, frozen=True, kw_only=True):
    """A running `phalanx serve` or `phalanx gateway`."""

    pid: int
    kind: Kind = "serve"
    models: list[str]  # as its ranks name them: what it serves, then a draft model; empty before there are ranks
    served_as: list[str] = []  # --served-model-name
    addresses: list[str]  # host:port
    ranks: int  # of the group, those on other hosts among them
    bytes: int  # resident memory of all its processes here
    supervised: bool  # `phalanx up` started it

    @property
    def names(self) -> set[str]:
        """Names by which a user may ask for it. A model in a directory is served under the directory's name."""
        called = {self.kind} if self.kind == "gateway" else {*self.models, *self.served_as}
        called |= {Path(model).name for model in self.models}
        ports = {address.rpartition(":")[2] for address in self.addresses}
        return {str(self.pid), *called, *self.addresses, *ports}


def local_servers() -> list[LocalServer]:
    """All of them, in the order of their process ids."""
    return sorted(_servers(), key=lambda server: server.pid)


def end(server: LocalServer, timeout_s: float) -> bool:
    """Let a server drain and end. Returns whether it has, within this time."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(server.pid)
        if kind_of(process.cmdline()) == server.kind:
            identity.send([process], signal.SIGTERM)
            return not identity.wait_gone([process], timeout_s)
    return True


def kind_of(command: list[str]) -> Kind | None:
    """Whether a command line is that of a server or of a gateway."""
    kinds: dict[str, Kind] = {"serve": "serve", "gateway": "gateway"}
    return kinds.get(_verb(command))


def _servers() -> Iterator[LocalServer]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and (kind := kind_of(process.cmdline())) is not None:
                yield _describe(process, kind)


def _describe(process: psutil.Process, kind: Kind) -> LocalServer:
    family = identity.family([process])
    configs = [config for member in family if (config := _config_of(member)) is not None]
    models: list[str] = []
    if configs:
        draft = configs[0].speculative_config
        models = [configs[0].model, *([draft.model] if isinstance(draft, DraftModelSpeculation) else [])]
    listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    resident = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            resident += member.memory_info().rss
    return LocalServer(
        pid=process.pid,
        kind=kind,
        models=models,
        served_as=list(split_flag(process.cmdline(), "--served-model-name")[1]),
        addresses=sorted(f"[{at.ip}]:{at.port}" if ":" in at.ip else f"{at.ip}:{at.port}" for at in listening),
        ranks=configs[0].n_ranks if configs else 0,
        bytes=resident,
        supervised=any(_verb(parent) == "host" for parent in _commands(process.parents())),
    )


def _config_of(process: psutil.Process) -> EngineConfig | None:
    """A rank's settings; None for other processes."""
    for command in _commands([process]):
        if _verb(command) == "rank" and "--config" in command[:-1]:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(command[command.index("--config") + 1], type=EngineConfig)
    return None


def _commands(processes: Sequence[psutil.Process]) -> Iterator[list[str]]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            yield process.cmdline()


def _verb(command: list[str]) -> str:
    """The command of a phalanx process that Python runs; "" for others, such as an mpirun that starts ranks."""
    if not command or not Path(command[0]).name.lower().startswith(("python", "phalanx")):
        return ""
    return next(iter(identity.words_of(command)), "")
