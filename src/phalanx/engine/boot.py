"""The life of a start, from `phalanx serve` to a leader in its loop. This file holds the last part, on each rank.

    phalanx serve MODEL      cli/serve.py:command         the server process reads its flags
      serve                  server/start.py              it starts the ranks; beside them it loads HTTP and tokenizer
      start_ranks            supervision/rank_launcher.py one process per rank: `phalanx rank MODEL ...`
        phalanx rank         cli/rank.py:command          the rank reads its EngineConfig and GroupConfig
          run_rank           here
            own_directories  engine/rank_directories.py   a private directory for the code that MLX compiles
            rendezvous       engine/rendezvous.py         the ranks connect to rank 0, and rank 0 to all
            join_group       engine/membership.py         native kernels; the communicator of this rank's stage
            begin_grammars   engine/role.py               rank 0 reads the vocabulary for grammars, on a thread
            load_model       engine/served_model.py       compares software, checks memory, reads weights, checks rows
            self_test        engine/group_selftest.py     all-reduces known values; equal tokens on all ranks
            plan_memory      engine/memory_plan.py        KV budget and context that fit on the smallest rank
            build_role       engine/role.py               rank 0 reports `Ready` and leads, the others work
            Leader.run, Worker.run

All ranks take these steps together and exchange what each has measured (`link.share`), so all decide the same. An error
that a restart cannot mend has an exit code of its own and reaches the server as `Failed`.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from pathlib import Path

import mlx.core as mx
from msgspec.structs import replace

from phalanx.config import MAX_RANKS, EngineConfig, GroupConfig
from phalanx.dist.collective_backend import LaunchedRank, environment_of
from phalanx.dist.group import Communicator, exchange_credentials, join
from phalanx.dist.peers import PeerFailure
from phalanx.engine.group_selftest import self_test
from phalanx.engine.leader import Leader
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.engine.membership import join_group
from phalanx.engine.memory_plan import plan_memory
from phalanx.engine.progress import reporter
from phalanx.engine.rank_directories import own_directories
from phalanx.engine.rendezvous import rendezvous
from phalanx.engine.role import begin_grammars, build_role
from phalanx.engine.served_model import load_model
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.stages import StagedRunner, wire_dtype
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.worker import Worker
from phalanx.environment import default_environment
from phalanx.errors import ConfigError, ExitCode, PhalanxError, exit_code_of
from phalanx.model.loading.resolve import resolve
from phalanx.open_files import raise_limit
from phalanx.supervision.rank_launcher import write_pid_file
from phalanx.text.printable import LineFormatter
from phalanx.tls.host_credentials import Credentials
from phalanx.types import Failed

log = logging.getLogger("phalanx.engine")


def run_rank(
    config: EngineConfig, group: GroupConfig | None, credentials: Credentials | None, socket_path: str, rank: int
) -> int:
    """Run one rank until the group ends.

    Args:
        group: None for a single rank.
        credentials: of this rank, for a group over several machines; else None.
        socket_path: of the server. Rank 0 connects to it; every rank writes its process id to a file beside it.

    Returns:
        The process's exit status (`ExitCode`).
    """
    _log_to_stderr(rank)
    write_pid_file(Path(socket_path), rank)
    _die_with_parent()
    with own_directories():
        return _run(config, group, credentials, socket_path, rank, None)


def run_launched_rank(config: EngineConfig, launcher: LaunchedRank, socket_path: str, control_host: str) -> int:
    """The same under `mpirun` or `mlx.launch`: ranks join the communicator first, and rank 0 sends its control address
    over it.

    Args:
        control_host: rank 0's address, as the other ranks reach it.
    """
    _log_to_stderr(launcher.rank)
    if config.pipeline_parallel_size > 1:
        log.error(
            "ConfigError: another launcher starts one stage; `phalanx serve --pp` and `phalanx up` start several."
        )
        return ExitCode.CONFIG
    config = replace(config, tensor_parallel_size=launcher.size, backend=launcher.backend)
    rank, size = launcher.rank, launcher.size
    if size > MAX_RANKS:
        raise ConfigError(f"{size} ranks were started; a group has {MAX_RANKS} at most.")
    default_environment(environment_of(launcher.backend, None, None))
    with own_directories():
        try:
            communicator = join(launcher.backend, rank, size, 0, where="", deadline_s=config.join_seconds)
            group, credentials = exchange_credentials(communicator, launcher.backend, control_host)
        except PhalanxError as error:
            log.error("%s: %s", type(error).__name__, error)
            return exit_code_of(error)
        return _run(config, group, credentials, socket_path, rank, communicator)


def _run(
    config: EngineConfig,
    group: GroupConfig | None,
    credentials: Credentials | None,
    socket_path: str,
    rank: int,
    communicator: Communicator | None,
) -> int:
    """Start, serve, end. Any error ends the rank, which reports it to the server and the other ranks."""
    raise_limit()
    server_socket = None
    if rank == 0:
        server_socket = ServerSocket(socket_path)
        server_socket.open()
    link: LeaderLink | WorkerLink | SingleRank = SingleRank()
    try:
        if group is not None:
            link = rendezvous(config, group, credentials, rank, on_lost=lambda lost: _report_lost(server_socket, lost))
        role = _start(config, group, credentials, communicator, link, server_socket)
        role.run()
        if role.runner.disk is not None:
            role.runner.disk.close()
        link.close()
    except PhalanxError as error:
        name = type(error).__name__
        log.error("%s: %s", name, error)
        failed = Failed(name, str(error), exit_code_of(error))
        return _report_failure(server_socket, link, failed, f"{name}: {error}")
    except Exception as error:  # MLX: out of memory, a lost peer; or a bug of ours
        name = type(error).__name__
        log.exception("the engine crashed")
        failed = Failed(name, f"the engine crashed: {name}: {error}", ExitCode.CRASH)
        return _report_failure(server_socket, link, failed, f"crashed: {name}: {error}")
    return ExitCode.OK


def _start(
    config: EngineConfig,
    group: GroupConfig | None,
    credentials: Credentials | None,
    communicator: Communicator | None,
    link: LeaderLink | WorkerLink | SingleRank,
    server_socket: ServerSocket | None,
) -> Leader | Worker:
    """Take this rank from its control connection to a leader or worker that is ready to serve."""
    report = reporter(server_socket)
    member = join_group(config, group, credentials, link, communicator, report)
    path = resolve(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    grammars = None if server_socket is None else begin_grammars(config, path, server_socket)
    model = load_model(config, path, member, report)
    deadline = StepDeadline(config.step_timeout_seconds)
    dtype = wire_dtype(config.pp_activation_dtype, model.runner, link)
    staged = StagedRunner(model.runner, member.stage, member.ends, dtype)
    tested = self_test(link, staged, model.vocab_size, deadline, unchecked=len(model.loaded.unchecked))
    plan = plan_memory(config, model.runner.facts, model.whole, model.draft, model.guard, link, model.sharing)
    mx.clear_cache()  # buffers that only the start needed
    mx.reset_peak_memory()
    link.serving()
    return build_role(config, member, model, staged, plan, tested, deadline, server_socket, grammars)


def _report_failure(
    server_socket: ServerSocket | None, link: LeaderLink | WorkerLink | SingleRank, failed: Failed, reason: str
) -> int:
    """Report why this rank ends, to the other ranks and (from rank 0) to the server. Returns the exit status."""
    if server_socket is not None:
        server_socket.send(failed)
    link.fail(ExitCode(failed.code), reason)
    return failed.code


def _report_lost(server_socket: ServerSocket | None, lost: PeerFailure) -> None:
    """Tell the server of a lost rank from the watchdog's thread, when the engine thread may be anywhere."""
    if server_socket is not None:
        server_socket.send_before_exit(Failed("PeerFailure", str(lost), lost.code))


def _log_to_stderr(rank: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"rank {rank}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def _die_with_parent() -> None:
    """End when the parent does, even if it is killed (Linux; elsewhere the closed socket ends the rank)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
