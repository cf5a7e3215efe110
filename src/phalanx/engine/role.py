"""What a rank becomes when it has started: the leader, which reports `Ready` to the server, or a worker."""

from __future__ import annotations

import logging
import os

from phalanx.config import GIB, EngineConfig
from phalanx.engine.leader import Leader
from phalanx.engine.link import WorkerLink
from phalanx.engine.membership import Membership
from phalanx.engine.memory_plan import MemoryPlan
from phalanx.engine.selftest import describe as describe_self_test
from phalanx.engine.served_model import ServedModel
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.speculation import describe as describe_speculation
from phalanx.engine.speculation import make_speculator
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.trace import Trace
from phalanx.engine.worker import Worker
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.types import ModelInfo, Ready, SelfTest

log = logging.getLogger("phalanx.engine")


def build_role(
    config: EngineConfig,
    member: Membership,
    model: ServedModel,
    plan: MemoryPlan,
    tested: SelfTest | None,
    deadline: StepDeadline,
    server_socket: ServerSocket | None,
) -> Leader | Worker:
    """The leader or a worker, ready to run. Rank 0 sends `Ready` to the server.

    Args:
        tested: what the self-test found; None for a single rank.
        server_socket: of rank 0; None on the others.
    """
    if isinstance(member.link, WorkerLink):
        return Worker(model.runner, member.link, member.injection)
    assert server_socket is not None
    info = _model_info(config, member, model, plan, tested)
    _announce(config, info)
    scheduler = Scheduler(_scheduler_config(config, model, plan))
    metadata = SamplingMetadataCache()
    speculator = make_speculator(
        config.speculative_config, scheduler, metadata, info.vocab_size, model.draft_runner, plan.draft_kv
    )
    server_socket.send(Ready(info=info, pid=os.getpid()))
    return Leader(
        scheduler,
        model.runner,
        server_socket,
        link=member.link,
        deadline=deadline,
        trace=Trace(config.trace) if config.trace else None,
        injection=member.injection,
        metadata=metadata,
        speculator=speculator,
    )


def _scheduler_config(config: EngineConfig, model: ServedModel, plan: MemoryPlan) -> SchedulerConfig:
    facts = model.runner.facts
    return SchedulerConfig(
        limits=plan.limits,
        max_num_batched_tokens=config.max_num_batched_tokens,
        target_step_s=config.target_step_ms / 1000,
        prefix_budget=plan.budget.prefix,
        recurrent=facts.recurrent,
        largest_logits=plan.budget.largest_logits(model.vocab_size),
        pack_above=model.runner.replay_limit if facts.packs else None,
    )


def _model_info(
    config: EngineConfig, member: Membership, model: ServedModel, plan: MemoryPlan, tested: SelfTest | None
) -> ModelInfo:
    loaded, facts, group = model.loaded, model.runner.facts, member.group
    return ModelInfo(
        model_type=str(loaded.config.get("model_type", "unknown")),
        max_model_len=plan.limits.max_model_len,
        vocab_size=model.vocab_size,
        dtype=str(loaded.dtype).removeprefix("mlx.core."),
        quantization=loaded.quantization,
        rolls_back=facts.rolls_back,
        caches=facts.description,
        weights_bytes=loaded.weights_bytes,
        kv_bytes_per_token=facts.bytes_per_token,
        kv_budget_bytes=plan.budget.kv,
        prefix_budget_bytes=plan.budget.prefix,
        load_s=loaded.load_s,
        ranks=1 if group is None else group.size,
        backend="none" if group is None else group.backend,
        self_test=tested,
        kernels=member.kernels,
        speculation=describe_speculation(config.speculative_config, facts),
    )


def _announce(config: EngineConfig, info: ModelInfo) -> None:
    """Log how the model is served and what it may use; `load` has logged what it takes (B3)."""
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
        log.info("%s", describe_self_test(info.self_test, info.backend, info.ranks))
