"""From a command line to a serving rank: join, load, check, budget, prove, report ready, run the loop of its role.

All ranks go through the same stages together; what one finds out, all know (`engine/link.py`), so all decide alike.
Errors a restart cannot mend leave with their own exit code and reach the server as `Failed`. Does not know HTTP.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from phalanx import __version__, memory
from phalanx.config import (
    GIB,
    MOST_RANKS,
    DraftModelSpeculation,
    EngineConfig,
    GroupConfig,
    default_environment,
    group_secret,
    memory_guard_override_gb,
)
from phalanx.dist import fault_injection
from phalanx.dist.backend import Foreign, environment_of
from phalanx.dist.corrupt_buffer import CorruptBuffer
from phalanx.dist.group import Fabric, agree, join
from phalanx.dist.peers import PeerFailure
from phalanx.dist.reduce import Reducer
from phalanx.engine.budget import find_limits, predict
from phalanx.engine.leader import Leader
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.engine.rendezvous import rendezvous
from phalanx.engine.selftest import RankFacts, compare_facts, describe, self_test
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.speculation import DraftWeights, make_speculator
from phalanx.engine.speculation import describe as describe_speculation
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.trace import Trace
from phalanx.engine.worker import Worker
from phalanx.errors import ConfigError, ExitCode, PhalanxError, exit_code_of
from phalanx.kernels import install, preload
from phalanx.kernels.native_checksum import NativeChecksum
from phalanx.model import registry
from phalanx.model.cache.layout import CacheFacts
from phalanx.model.check import check_model
from phalanx.model.loading import load
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.weights import fingerprint
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.sched.admission import KvLimits
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.supervision.launch import pid_file
from phalanx.types import Failed, Loading, ModelInfo, Ready, SelfTest

log = logging.getLogger("phalanx.engine")

PROGRESS_PERIOD_S = 0.2  # to the server
LOG_PERIOD_S = 5.0  # to the log, from ranks the server does not see


def run_rank(config: EngineConfig, group: GroupConfig | None, socket_path: str, rank: int) -> int:
    """Serve as one rank until told to end. Rank 0 does so behind the server's socket.

    Args:
        group: None for a rank that is alone.
        socket_path: of the server. Rank 0 connects to it; every rank leaves its process id beside it.

    Returns:
        The process's exit status (`ExitCode`).
    """
    _set_up(rank)
    pid_file(Path(socket_path), rank).write_text(str(os.getpid()))
    _die_with_parent()
    secret = group_secret()
    if group is not None and secret is None:
        raise ConfigError("This rank has no group secret.", remedy="Ranks are started by `phalanx serve --tp N`.")
    return _run(config, group, secret or b"", socket_path, rank, None)


def run_launched_rank(config: EngineConfig, launcher: Foreign, socket_path: str, control_host: str) -> int:
    """The same under `mpirun` or `mlx.launch`: the fabric comes first, and rank 0 tells over it where it listens.

    Args:
        control_host: rank 0's address, as the other ranks reach it.
    """
    _set_up(launcher.rank)
    config = replace(config, tensor_parallel_size=launcher.size, backend=launcher.backend)
    rank, size = launcher.rank, launcher.size
    if size > MOST_RANKS:
        raise ConfigError(f"{size} ranks were started; a group has {MOST_RANKS} at most.")
    default_environment(environment_of(launcher.backend, None, None))
    try:
        fabric = join(launcher.backend, rank, size, 0, where="", deadline_s=config.join_seconds)
        group, secret = agree(fabric, launcher.backend, control_host)
    except PhalanxError as error:
        log.error("%s: %s", type(error).__name__, error)
        return exit_code_of(error)
    return _run(config, group, secret, socket_path, rank, fabric)


def _set_up(rank: int) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"rank {rank}: %(message)s")


def _run(
    config: EngineConfig,
    group: GroupConfig | None,
    secret: bytes,
    socket_path: str,
    rank: int,
    fabric: Fabric | None,
) -> int:
    server_socket = None
    if rank == 0:
        server_socket = ServerSocket(socket_path)
        server_socket.open()
    link: LeaderLink | WorkerLink | SingleRank = SingleRank()
    try:
        if group is not None:
            link = rendezvous(config, group, secret, rank, on_lost=lambda lost: _last_word(server_socket, lost))
        role = _boot(config, group, fabric, link, server_socket)
        role.run()
        link.close()
    except PhalanxError as error:
        log.error("%s: %s", type(error).__name__, error)
        _tell(server_socket, Failed(type(error).__name__, str(error), exit_code_of(error)))
        link.fail(exit_code_of(error), f"{type(error).__name__}: {error}")
        return exit_code_of(error)
    except Exception as error:  # MLX: out of memory, a collective without its peer; or a mistake of ours
        log.exception("the engine crashed")
        _tell(
            server_socket,
            Failed(type(error).__name__, f"the engine crashed: {type(error).__name__}: {error}", ExitCode.CRASH),
        )
        link.fail(ExitCode.CRASH, f"crashed: {type(error).__name__}: {error}")
        return ExitCode.CRASH
    return ExitCode.OK


def _tell(server_socket: ServerSocket | None, failed: Failed) -> None:
    """Let the server know why this rank ends; only rank 0 can."""
    if server_socket is not None:
        server_socket.send(failed)


def _last_word(server_socket: ServerSocket | None, lost: PeerFailure) -> None:
    """The same from the watchdog's thread, when the engine thread may be anywhere."""
    if server_socket is not None:
        server_socket.last_word(Failed("PeerFailure", str(lost), lost.code))


def _boot(
    config: EngineConfig,
    group: GroupConfig | None,
    fabric: Fabric | None,
    link: LeaderLink | WorkerLink | SingleRank,
    server_socket: ServerSocket | None,
) -> Leader | Worker:
    """From a connected group to one that is ready to serve: every rank does the same until roles part at the end."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()  # on the CPU it runs a C++ compiler at run time and gains nothing
    kernels = _kernels(config, 1 if group is None else group.ranks_here)
    injection = None if config.inject is None else fault_injection.parse(config.inject)
    injection = injection if injection is not None and injection.rank == link.rank else None
    report = _reporter(server_socket)
    report("joining the group", 0, 1)
    if injection is not None and injection.kind == "slow":
        time.sleep(fault_injection.SLOW_S)
    reducer = _reducer(config, group, fabric, link.rank, injection)
    reducer.names = [f"rank {rank} on {host}" for rank, host in enumerate(link.share(socket.gethostname()))]
    ranks_here = 1 if group is None else group.ranks_here
    guard_gb = config.memory_guard_gb if config.memory_guard_gb is not None else memory_guard_override_gb()
    guard = memory.guard_bytes(memory.read_machine().physical, guard_gb)
    loaded, draft = _load(config, link, reducer, guard, ranks_here, report)
    absorb_short_queries(loaded.model)
    facts = registry.inspect(loaded.model, loaded.config)
    reducer.discard()  # `inspect` only builds
    runner = Runner(loaded.model, facts, loaded.dtype, reducer)
    report("checking the model", 0, 1)
    check_model(runner, loaded.model, may_pack=all(link.share(install.active())))
    runner.facts = dataclasses.replace(runner.facts, packs=all(link.share(runner.facts.packs)))
    draft_runner = None if draft is None else draft.materialise(guard, report)
    deadline = StepDeadline(config.wedge_seconds)
    tested = self_test(link, runner, _vocab_size(loaded.config), deadline, unchecked=len(loaded.unchecked))
    limits, budget = find_limits(config, runner.facts, draft, guard, link, ranks_here)
    mx.clear_cache()
    mx.reset_peak_memory()
    link.serving()
    if isinstance(link, WorkerLink):
        return Worker(runner, link, injection)
    assert server_socket is not None
    info = _describe(loaded, runner.facts, limits, budget, group, tested)
    info = replace(info, kernels=kernels, speculation=describe_speculation(config.speculative_config, runner.facts))
    _announce(config, info)
    scheduler = Scheduler(
        SchedulerConfig(
            limits=limits,
            max_num_batched_tokens=config.max_num_batched_tokens,
            target_step_s=config.target_step_ms / 1000,
            prefix_budget=budget.prefix,
            recurrent=runner.facts.recurrent,
            largest_logits=budget.largest_logits(info.vocab_size),
            pack_above=runner.replay_limit if runner.facts.packs else None,
        )
    )
    trace = Trace(config.trace) if config.trace else None
    metadata = SamplingMetadataCache()
    draft_kv = 0 if draft is None else budget.kv * draft.bytes_per_token // runner.facts.bytes_per_token
    speculator = make_speculator(
        config.speculative_config, scheduler, metadata, info.vocab_size, draft_runner, draft_kv
    )
    server_socket.send(Ready(info=info, pid=os.getpid()))
    return Leader(
        scheduler, runner, server_socket, link=link, deadline=deadline, trace=trace, injection=injection,
        metadata=metadata, speculator=speculator,
    )  # fmt: skip


def _kernels(config: EngineConfig, ranks_here: int) -> str:
    """Install the native kernels, or say why MLX's own compute; one line for people."""
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
        raise ConfigError(f"{flag} is about native CPU kernels, and none are used: {why}.", remedy="Leave it out.")
    return f"MLX's own, on one thread ({why})" if on_cpu else why


def _reducer(
    config: EngineConfig,
    group: GroupConfig | None,
    fabric: Fabric | None,
    rank: int,
    injection: fault_injection.Injection | None,
) -> Reducer:
    """This rank's place in the fabric, joined now unless it was before."""
    if group is None:
        return Reducer(None)
    if fabric is None:
        where = group.addresses[rank] if group.addresses else ""
        fabric = join(group.backend, rank, group.size, group.nonce, where=where, deadline_s=config.join_seconds)
    corrupt = injection is not None and injection.kind in fault_injection.BUFFER_FAULTS
    fault = CorruptBuffer(injection) if injection is not None and corrupt else None
    checksum = NativeChecksum() if install.active() else None
    return Reducer(fabric, checked=config.check_collectives, fault=fault, checksum=checksum)


def _load(
    config: EngineConfig,
    link: LeaderLink | WorkerLink | SingleRank,
    reducer: Reducer,
    guard: int,
    ranks_here: int,
    report: load.Progress,
) -> tuple[load.Loaded, DraftWeights | None]:
    """The model, after all ranks have agreed on what it is and that their parts fit; and what the leader drafts with,
    which is not read yet."""
    path = resolve(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    if link.size > 1:
        facts = RankFacts(
            phalanx=__version__,
            mlx=version("mlx"),
            mlx_lm=version("mlx-lm"),
            model=fingerprint(path),
            dtype=config.dtype,
        )
        compare_facts(link, facts)
    prepared = load.prepare(path, dtype=config.dtype, trust_remote_code=config.trust_remote_code, reducer=reducer)
    reducer.foreign = bool(prepared.unchecked)
    draft = None
    caches = registry.inspect(prepared.model, prepared.config)
    reducer.discard()  # inspecting only builds
    if link.rank == 0 and isinstance(config.speculative_config, DraftModelSpeculation) and caches.rolls_back:
        draft = DraftWeights(config, config.speculative_config, path)
    predictions = link.share(predict(config, link.rank, prepared, caches, draft, guard))
    if link.rank == 0:
        log.info("before loading:\n%s", memory.prediction_table(predictions))
    memory.check_group(path.name, predictions)
    return prepared.materialise(guard, report, ranks_here=ranks_here), draft


def _describe(
    loaded: load.Loaded,
    facts: CacheFacts,
    limits: KvLimits,
    budget: memory.Budget,
    group: GroupConfig | None,
    tested: SelfTest | None,
) -> ModelInfo:
    return ModelInfo(
        model_type=str(loaded.config.get("model_type", "unknown")),
        max_model_len=limits.max_model_len,
        vocab_size=_vocab_size(loaded.config),
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        quantization=loaded.quantization,
        rolls_back=facts.rolls_back,
        caches=facts.description,
        weights_bytes=loaded.weights_bytes,
        kv_bytes_per_token=facts.bytes_per_token,
        kv_budget_bytes=budget.kv,
        prefix_budget_bytes=budget.prefix,
        load_s=loaded.load_s,
        ranks=1 if group is None else group.size,
        backend="none" if group is None else group.backend,
        self_test=tested,
    )


def _vocab_size(model_config: dict[str, Any]) -> int:
    scope = model_config if "vocab_size" in model_config else model_config.get("text_config", {})
    return int(scope.get("vocab_size", 0))


def _reporter(server_socket: ServerSocket | None) -> load.Progress:
    """Progress to the server from rank 0, to the log from the others, at most every so often."""
    period = PROGRESS_PERIOD_S if server_socket is not None else LOG_PERIOD_S
    last = time.monotonic()

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if server_socket is not None and (done >= total or done == 0 or now - last >= period):
            last = now
            server_socket.send(Loading(phase=phase, done=done, total=total))
        elif server_socket is None and now - last >= period:
            last = now
            log.info("%s: %.2f of %.2f GB", phase, done / GIB, total / GIB)

    return report


def _announce(config: EngineConfig, info: ModelInfo) -> None:
    """The start-up lines: how the model is served and what it may use (`load` has said what it takes, B3)."""
    log.info("%s: model type %s, %s", config.model, info.model_type, info.caches)
    log.info("kernels: %s", info.kernels)
    if config.speculative_config is not None:
        log.log(logging.INFO if info.rolls_back else logging.WARNING, "speculation: %s", info.speculation)
    log.info(
        "context %d tokens; up to %d rows; KV budget %.2f GB (%d bytes a token), prefix cache %.2f GB",
        info.max_model_len, config.max_num_seqs, info.kv_budget_bytes / GIB, info.kv_bytes_per_token,
        info.prefix_budget_bytes / GIB,
    )  # fmt: skip
    if info.self_test is not None:
        log.info("%s", describe(info.self_test, info.backend, info.ranks))


def _die_with_parent() -> None:
    """End when the parent does, even if it is killed (Linux; elsewhere the closed socket tells)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
