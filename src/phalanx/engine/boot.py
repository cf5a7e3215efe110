"""From a command line to a serving rank: load, check, budget, warm up, report ready, run the leader's loop.

Errors a restart cannot mend leave with their own exit code and reach the server as `Failed`. Does not know HTTP.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from typing import Any

import mlx.core as mx

from phalanx import memory
from phalanx.config import GIB, EngineConfig, memory_guard_override_gb
from phalanx.engine.leader import Leader
from phalanx.engine.mailbox import Mailbox
from phalanx.engine.trace import Trace
from phalanx.errors import ConfigError, ExitCode, MemoryShortage, PhalanxError, exit_code_of
from phalanx.model import load, registry
from phalanx.model.probe import probe
from phalanx.model.resolve import resolve
from phalanx.model.runner import Runner
from phalanx.sched.admission import GRANULE, Limits, largest_row
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.types import Failed, Loading, ModelInfo, Ready

log = logging.getLogger("phalanx.engine")

DEFAULT_CONTEXT = 8192  # for models whose config names no limit (recurrent ones)
PROGRESS_PERIOD_S = 0.2


def run_rank(config: EngineConfig, socket_path: str, rank: int) -> int:
    """Serve as `rank` behind the server's socket until it says to end.

    Returns:
        The process's exit status (`ExitCode`).
    """
    if rank != 0:
        raise ConfigError(f"--rank {rank}: this version runs one rank, number 0.")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"rank {rank}: %(message)s")
    _die_with_parent()
    mailbox = Mailbox(socket_path)
    mailbox.open()
    try:
        leader, info = _boot(config, mailbox)
        mailbox.send(Ready(info=info, pid=os.getpid()))
        leader.run()
    except PhalanxError as error:
        mailbox.send(Failed(kind=type(error).__name__, message=str(error)))
        log.error("%s: %s", type(error).__name__, error)
        return exit_code_of(error)
    return ExitCode.OK


def _boot(config: EngineConfig, mailbox: Mailbox) -> tuple[Leader, ModelInfo]:
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()  # on the CPU it runs a C++ compiler at run time and gains nothing
    machine = memory.read_machine()
    guard_gb = config.memory_guard_gb if config.memory_guard_gb is not None else memory_guard_override_gb()
    guard = memory.guard_bytes(machine.physical, guard_gb)
    path = resolve(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    loaded = load.load(
        path,
        dtype=config.dtype,
        guard=guard,
        trust_remote_code=config.trust_remote_code,
        on_progress=_reporter(mailbox),
    )
    facts = registry.inspect(loaded.model, loaded.config)
    runner = Runner(loaded.model, facts, loaded.dtype)
    mailbox.send(Loading(phase="checking the model", done=0, total=1))
    probe(runner, loaded.model)
    facts = runner.facts  # the probe may have found that rows must be computed one by one
    limits, budget = _limits(config, facts, guard)
    scheduler = Scheduler(
        SchedulerConfig(
            limits=limits,
            max_num_batched_tokens=config.max_num_batched_tokens,
            target_step_s=config.target_step_ms / 1000,
            prefix_budget=budget.prefix,
            recurrent=facts.recurrent,
        )
    )
    info = ModelInfo(
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
    )
    _announce(config, info)
    mx.clear_cache()
    mx.reset_peak_memory()
    trace = Trace(config.trace) if config.trace else None
    return Leader(scheduler, runner, mailbox, trace), info


def _limits(config: EngineConfig, facts: registry.CacheFacts, guard: int) -> tuple[Limits, memory.Budget]:
    """The memory limits of this engine, and the context that fits in them."""
    context = facts.max_len or DEFAULT_CONTEXT
    wanted = config.max_model_len or context
    if facts.max_len is not None and wanted > facts.max_len:
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the model's own context of {facts.max_len} tokens.",
            remedy="Its positions mean nothing there; use a smaller value.",
        )
    minimum = GRANULE * facts.bytes_per_token + facts.bytes_per_row
    budget = memory.serving_budget(
        memory.read_machine(), guard, config.kv_cache_gb, config.prefix_cache_gb, minimum_kv=minimum
    )
    fits = largest_row(budget.kv, facts.bytes_per_token, facts.bytes_per_row)
    if config.max_model_len is not None and config.max_model_len > fits:
        raise MemoryShortage(
            f"--max-model-len {config.max_model_len} needs more KV memory than the budget of {budget.kv / GIB:.2f} GB "
            f"holds ({fits} tokens).",
            remedy=f"Use --max-model-len {fits}, or raise --kv-cache-gb.",
        )
    if wanted > fits:
        log.warning("context limited to %d tokens by the KV budget (the model's own is %d)", fits, wanted)
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(wanted, fits),
        kv_budget=budget.kv,
        bytes_per_token=facts.bytes_per_token,
        bytes_per_row=facts.bytes_per_row,
    )
    return limits, budget


def _vocab_size(model_config: dict[str, Any]) -> int:
    scope = model_config if "vocab_size" in model_config else model_config.get("text_config", {})
    return int(scope.get("vocab_size", 0))


def _reporter(mailbox: Mailbox) -> load.Progress:
    last = 0.0

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= PROGRESS_PERIOD_S:
            last = now
            mailbox.send(Loading(phase=phase, done=done, total=total))

    return report


def _announce(config: EngineConfig, info: ModelInfo) -> None:
    """The start-up lines: how the model is served and what it may use (`load` has said what it takes, B3)."""
    log.info("%s: model type %s, %s", config.model, info.model_type, info.caches)
    log.info(
        "context %d tokens; up to %d rows; KV budget %.2f GB (%d bytes a token), prefix cache %.2f GB",
        info.max_model_len, config.max_num_seqs, info.kv_budget_bytes / GIB, info.kv_bytes_per_token,
        info.prefix_budget_bytes / GIB,
    )  # fmt: skip


def _die_with_parent() -> None:
    """End when the parent does, even if it is killed (Linux; elsewhere the closed socket tells)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
