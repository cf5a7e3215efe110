"""Builds the leader, which reports `Ready` to the server, or a worker, once a rank has started."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import msgspec

from phalanx.config import GIB, EngineConfig, GroupConfig
from phalanx.engine.disk import DiskOutcomes, open_index, open_store, serve_blocks
from phalanx.engine.group_selftest import describe as describe_self_test
from phalanx.engine.leader import Leader
from phalanx.engine.link import WorkerLink
from phalanx.engine.membership import Membership
from phalanx.engine.memory_plan import MemoryPlan
from phalanx.engine.served_model import ServedModel
from phalanx.engine.server_socket import ServerSocket
from phalanx.engine.speculation import describe as describe_speculation
from phalanx.engine.speculation import make_speculator
from phalanx.engine.stages import StagedRunner
from phalanx.engine.step_deadline import StepDeadline
from phalanx.engine.trace import Trace
from phalanx.engine.worker import Worker
from phalanx.sched.prefill_budget import prefill_bounds
from phalanx.sched.scheduler import Scheduler, SchedulerConfig
from phalanx.spec.running_grammars import Grammars
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.text.grammar import GrammarCompiler
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import ModelInfo, Ready, SelfTest

log = logging.getLogger("phalanx.engine")


def build_role(
    config: EngineConfig,
    member: Membership,
    model: ServedModel,
    staged: StagedRunner,
    plan: MemoryPlan,
    tested: SelfTest | None,
    deadline: StepDeadline,
    server_socket: ServerSocket | None,
    grammars: Grammars | None,
) -> Leader | Worker:
    """The leader or a worker, ready to run. Rank 0 sends `Ready` to the server.

    Args:
        tested: the self-test's result; None for a single rank.
        server_socket, grammars: of rank 0; None on the others.
    """
    opened = open_store(config, member.link, model.runner, _identity(config, member, model))
    if isinstance(member.link, WorkerLink):
        if opened is not None:
            serve_blocks(opened, model.runner, member.link.rank, plan.budget.prefix, member.link.notify)
        return Worker(staged, member.link, member.injection)
    assert server_socket is not None and grammars is not None
    info = _model_info(config, member, model, plan, tested)
    _announce(config, info)
    scheduler = Scheduler(_scheduler_config(config, model, plan, member.topology.n_stages))
    outcomes = DiskOutcomes(scheduler.disk, server_socket.wake)
    if opened is not None:
        member.link.listen(outcomes.put)
        serve_blocks(opened, model.runner, 0, plan.budget.prefix, outcomes.put)
        whole_only, verify = model.runner.facts.recurrent, config.verify_restores
        open_index(opened, scheduler.disk, member.link.size, whole_only=whole_only, verify=verify)
    metadata = SamplingMetadataCache()
    speculator = make_speculator(
        config.speculative_config, scheduler, metadata, info.vocab_size, model.draft_runner, plan.draft_kv, grammars
    )
    log.info("serving")  # the last line before `Ready`: the supervisor waits for it (`supervision/rank_log.py`)
    server_socket.send(Ready(info=info, pid=os.getpid()))
    stages = member.topology.n_stages
    return Leader(
        scheduler,
        staged,
        server_socket,
        link=member.link,
        plans_ahead=stages if stages > 1 else 0,
        deadline=deadline,
        trace=Trace(config.trace) if config.trace else None,
        injection=member.injection,
        metadata=metadata,
        speculator=speculator,
        grammars=grammars,
        disk_outcomes=outcomes,
    )


def begin_grammars(config: EngineConfig, path: Path, server_socket: ServerSocket) -> Grammars:
    """The leader's grammars. Their thread reads the tokenizer and its vocabulary while the weights load.

    Args:
        path: the model's directory.
    """

    def load() -> GrammarCompiler:
        tokenizer = Tokenizer.load(path, trust_remote_code=config.trust_remote_code)
        return GrammarCompiler(tokenizer, tokenizer.eos_ids)

    grammars = Grammars(load, server_socket.wake)
    grammars.prepare()
    return grammars


def _scheduler_config(config: EngineConfig, model: ServedModel, plan: MemoryPlan, stages: int) -> SchedulerConfig:
    facts = model.runner.facts
    return SchedulerConfig(
        limits=plan.limits,
        prefill=prefill_bounds(
            on_gpu=mx.default_device() != mx.Device(mx.cpu),
            stages=stages,
            max_tokens=config.max_num_batched_tokens,
            rows=config.max_num_seqs,
        ),
        target_step_s=config.target_step_ms / 1000,
        decode_share=config.decode_share,
        prefix_budget=plan.budget.prefix,
        recurrent=facts.recurrent,
        max_logits=plan.budget.max_logits(model.vocab_size),
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
        supports_rollback=facts.supports_rollback,
        caches=facts.description,
        weights_bytes=loaded.weights_bytes,
        kv_bytes_per_token=model.whole.bytes_per_token,
        kv_budget_bytes=plan.budget.kv,
        prefix_budget_bytes=plan.budget.prefix,
        load_s=loaded.load_s,
        ranks=1 if group is None else group.size,
        stages=member.topology.n_stages,
        backend=(None if group is None else group.backend) or "none",
        self_test=tested,
        kernels=member.kernels,
        speculation=describe_speculation(config.speculative_config, facts),
        identity=_identity(config, member, model),
    )


def _identity(config: EngineConfig, member: Membership, model: ServedModel) -> str:
    """See `ModelInfo.identity`. It covers the order in which ranks add, because float sums depend on it."""
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    device = str(mx.device_info().get("device_name")) if on_gpu else f"{platform.system()} {platform.machine()}"
    order = reduction_order(config, member.group, model.layers)
    facts = (model.software, str(model.loaded.dtype), member.kernels, device, order)
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=8).hexdigest()


def reduction_order(
    config: EngineConfig, group: GroupConfig | None, layers: Sequence[tuple[int, int]]
) -> tuple[object, ...] | None:
    """The settings on which order and rounding of all-reduces depend; None for a single rank.

    Args:
        layers: as `ServedModel.layers`. The order depends on the stages' widths, and each link may round.
    """
    if group is None:
        return None
    stages = (group.widths, layers, config.pp_activation_dtype) if layers else ()
    return group.size, group.backend, config.collective, *stages


def _announce(config: EngineConfig, info: ModelInfo) -> None:
    """Log how the model is served and its limits; `load` has logged its size."""
    log.info("%s: model type %s, %s", config.model, info.model_type, info.caches)
    log.info("kernels: %s", info.kernels)
    if config.speculative_config is not None:
        log.log(logging.INFO if info.supports_rollback else logging.WARNING, "speculation: %s", info.speculation)
    log.info(
        "context %d tokens; up to %d rows; KV budget %.2f GiB (%d bytes a token), prefix cache %.2f GiB",
        info.max_model_len, config.max_num_seqs, info.kv_budget_bytes / GIB, info.kv_bytes_per_token,
        info.prefix_budget_bytes / GIB,
    )  # fmt: skip
    if info.self_test is not None:
        log.info("%s", describe_self_test(info.self_test, info.backend, info.ranks))
