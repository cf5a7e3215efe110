"""Reads this host's status: processes, memory, the end of the log, the server's /health. Changes nothing."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from phalanx.cluster import identity, machine
from phalanx.cluster.argument_flags import flag_value
from phalanx.cluster.probe import ask_health
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.supervisor import GATEWAY, SUPERVISOR_SAYS, RunDirectory, Spec, log_file
from phalanx.config import DEFAULT_PORT, GATEWAY_PORT
from phalanx.environment import api_keys_from, api_keys_in, environment
from phalanx.faults import first_fault

TAIL_BYTES = 1 << 16  # of a log, some 600 lines: a start and its error
BOX_END = "╰"  # typer draws a box around what it says of a wrong flag


class ServerHealth(Struct, frozen=True, kw_only=True):
    """The server's /health."""

    ok: bool
    phase: str
    reason: str = ""
    since: str = ""  # since when it has not been ready, ISO 8601
    done: int = 0  # of `total`, in this step of loading
    total: int = 0
    step: str = ""
    restarts: int = 0
    ranks: list[dict[str, Any]] = []
    predicted: dict[str, float] = {}  # tokens_per_second and ttft_seconds of one stream, if the start was planned
    measured: dict[str, float] = {}  # the same of requests that ran alone


class HostStatus(Struct, frozen=True, kw_only=True):
    """The state of a host's part of the cluster. Memory in bytes."""

    host: str
    role: str = ""  # "server", "agent" or "gateway"; "" if nothing was started here
    supervisor: int | None = None  # process id
    child: int | None = None  # process id of the server, agent or gateway
    children: int = 0  # processes below it
    rss: int = 0  # of all of them
    used: int = 0  # wired (macOS) or used memory of the machine
    physical: int = 0
    held_s: float = 0.0  # until something may be started again after a kill
    ended: int | None = None  # exit status, if the supervisor does not start it again
    last_line: str = ""  # of the log; if it ended, its error
    fault: str = ""  # name and cause of the first known fault in the log since the start
    fault_line: str = ""
    remedy: str = ""
    log: str = ""
    health: ServerHealth | None = None  # of a server


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """The state of a gateway on this host."""

    process: HostStatus
    replicas: dict[str, str] = {}  # name -> "ok", or why it gets no requests; empty while the gateway does not answer


class HostReport(Struct, frozen=True, kw_only=True):
    """Everything of a cluster on this host."""

    status: HostStatus
    gateway: GatewayStatus | None = None  # None: no gateway was started here
    layout: ReplicaLayout | None = None  # of several replicas


def report(run_dir: RunDirectory) -> HostReport:
    """The state of this host: its server or agent, and its gateway."""
    specs = [spec for spec in (run_dir.read_spec(), run_dir.gateway.read_spec()) if spec is not None]
    layout = next((spec.layout for spec in specs if spec.layout is not None), None)
    return HostReport(status=status(run_dir), gateway=gateway_status(run_dir.gateway), layout=layout)


def gateway_status(run_dir: RunDirectory) -> GatewayStatus | None:
    """The state of a gateway; None if none was started here."""
    if (spec := run_dir.read_spec()) is None:
        return None
    body = _ask(spec, run_dir.named()[1])
    replicas = {str(name): str(state) for name, state in dict(body.get("replicas") or {}).items()}
    where = "{} port {}".format(*_address(spec))
    down = [f"replica {name} {state}" for name, state in replicas.items() if state != "ok"]
    health = ServerHealth(
        ok=body.get("status") == "ok",
        phase=str(body.get("status", "starting")),
        reason="; ".join(down) if body else f"nothing answers at {where} yet",
    )
    return GatewayStatus(process=replace(status(run_dir), health=health), replicas=replicas)


def status(run_dir: RunDirectory) -> HostStatus:
    """The state of what one supervisor keeps running here."""
    spec = run_dir.read_spec()
    base = HostStatus(
        host=socket.gethostname(),
        used=machine.wired_bytes(),
        physical=machine.physical_bytes(),
        held_s=run_dir.held_s(),
    )
    if spec is None:
        return base
    supervisor, child = run_dir.named()
    processes = identity.family([child] if child is not None else [])
    lines = [line for line in tail(log_file(spec)) if SUPERVISOR_SAYS not in line]
    fault = first_fault(since_loaded(lines))
    outcome = run_dir.read_outcome()
    return replace(
        base,
        role=spec.role,
        supervisor=None if supervisor is None else supervisor.pid,
        child=None if child is None else child.pid,
        children=max(0, len(processes) - 1),
        rss=sum(_rss(process) for process in processes),
        ended=None if outcome is None else outcome.status,
        last_line=final_error(lines) if outcome is not None else lines[-1] if lines else "",
        fault="" if fault is None else f"{fault[1].name}: {fault[1].cause}",
        fault_line="" if fault is None else fault[0],
        remedy="" if fault is None else fault[1].remedy,
        log=str(log_file(spec)),
        health=health(spec, child) if spec.role == "server" else None,
    )


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def tail(log: Path) -> list[str]:
    """The lines in the last `TAIL_BYTES` of a log, without empty ones."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()]


LOADED = re.compile(r"rank \d+: loaded in ")


def since_loaded(lines: Sequence[str]) -> Sequence[str]:
    """The lines since a rank has last loaded its model: a fault before was mended."""
    loaded = [index for index, line in enumerate(lines) if LOADED.match(line)]
    return lines[loaded[-1] :] if loaded else lines


ERRORS = ("error: ", "phalanx could not start: ")  # begin a process's own; further lines of them are indented


def final_error(lines: list[str]) -> str:
    """Why a phalanx process ended, from its log: its last error with the lines that belong to it, or what a box around
    an error of its flags says; else its last line."""
    starts = [index for index, line in enumerate(lines) if line.startswith(ERRORS)]
    if starts:
        first, *others = lines[starts[-1] :]
        own = takewhile(lambda line: line.startswith("  "), others)
        return " ".join([first.removeprefix("error: "), *(" ".join(line.split()) for line in own)])
    if lines and lines[-1].startswith(BOX_END):
        return " ".join(line.strip("│ ") for line in lines if line.startswith("│"))
    return lines[-1] if lines else "it said nothing"


def health(spec: Spec, server: psutil.Process | None) -> ServerHealth:
    """The server's /health on this host."""
    host, port = _address(spec)
    body = _ask(spec, server)
    if not body:
        return ServerHealth(ok=False, phase="starting", reason=f"nothing answers at {host} port {port} yet")
    progress = body.get("progress") or {}
    return ServerHealth(
        ok=body.get("status") == "ok",
        phase=str(body.get("status", "")),
        reason=str(body.get("reason", "")),
        since=str(body.get("since", "")),
        done=int(progress.get("done", 0)),
        total=int(progress.get("total", 0)),
        step=str(progress.get("phase", "")),
        restarts=int(body.get("restarts", 0)),
        ranks=list(body.get("ranks", [])),
        predicted=_speed(body.get("predicted")),
        measured=_speed(body.get("measured")),
    )


def _speed(found: object) -> dict[str, float]:
    """Numbers by name; a server of another version may say something else."""
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): float(value) for name, value in pairs if isinstance(value, int | float)}


def _address(spec: Spec) -> tuple[str, int]:
    return serve_address(spec.command, GATEWAY_PORT if spec.role == GATEWAY else DEFAULT_PORT)


def _ask(spec: Spec, process: psutil.Process | None) -> dict[str, Any]:
    """The /health of a server or gateway, asked with its API key, which nothing else that listens there gets."""
    host, port = _address(spec)
    if process is None or not identity.listens(process, port):
        return {}
    certificate = flag_value(spec.command, "--ssl-certfile")
    return ask_health(
        host, port, key=api_key(spec), certificate=None if certificate is None else Path.home() / certificate
    )


def api_key(spec: Spec) -> str | None:
    """A key of the server: of its file, else of its environment; None if it needs none."""
    if file := flag_value(spec.command, "--api-key-file"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return next(iter(api_keys_in((Path.home() / file).read_text())), None)
    return next(iter(api_keys_from({**environment(), **spec.variables})), None)


def serve_address(command: Sequence[str], default: int = DEFAULT_PORT) -> tuple[str, int]:
    """The address at which a `phalanx serve` or `gateway` command answers on its host, by its flags.

    Args:
        default: port, where there is no flag.
    """
    host, port = flag_value(command, "--host") or "127.0.0.1", flag_value(command, "--port") or default
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)
