"""Predicts a rank's memory before it loads, and splits what is left for rows afterwards.

Every rank measures its own memory and shares the figures, so that all ranks compute the same limits.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from msgspec.structs import replace

from phalanx import memory
from phalanx.config import GIB, EngineConfig
from phalanx.engine.link import Link
from phalanx.engine.speculation import DraftWeights
from phalanx.environment import memory_guard_override_gb
from phalanx.errors import MemoryShortage
from phalanx.model.cache.layer_layout import CacheFacts, buffer_shapes, page_tokens, row_bytes
from phalanx.model.cache.row_memory import can_reserve, in_pages
from phalanx.model.device_memory import read_memory
from phalanx.model.loading import load
from phalanx.model.model_limits import check_context
from phalanx.sched.admission import GRANULE, KvLimits, max_row, round_up

log = logging.getLogger("phalanx.engine")

DEFAULT_CONTEXT = 8192  # for models whose config names no limit (recurrent ones)


class MemoryPlan(NamedTuple):
    """The group's limits while it serves: those of its smallest rank."""

    limits: KvLimits
    budget: memory.MemoryBudget
    draft_kv: int
    """Bytes for the rows of a draft model, on the leader."""


def memory_guard(config: EngineConfig) -> int:
    """Bytes of this rank's memory, the host's or its GPU's, that stay free."""
    guard_gb = config.memory_guard_gb if config.memory_guard_gb is not None else memory_guard_override_gb()
    return memory.guard_bytes(read_memory(), guard_gb)


def predict(
    config: EngineConfig,
    link: Link,
    prepared: load.Prepared,
    facts: CacheFacts,
    draft: DraftWeights | None,
    guard: int,
) -> memory.Prediction:
    """This rank's memory once it serves, a draft model included, predicted before a weight is read."""
    kv = GRANULE * (row_bytes(facts.layouts, prepared.dtype) + (0 if draft is None else draft.bytes_per_token))
    if config.kv_cache_gb is not None:
        kv = int(config.kv_cache_gb * GIB)
    own = prepared.predict(rank=link.rank, host=link.host, kv=kv, guard=guard)
    if draft is None:
        return own
    working = max(own.working, draft.working_bytes)
    return replace(own, weights=own.weights + draft.weights_bytes, working=working)


def plan_memory(
    config: EngineConfig,
    facts: CacheFacts,
    whole: CacheFacts,
    draft: DraftWeights | None,
    guard: int,
    link: Link,
    sharing: int,
) -> MemoryPlan:
    """Split the memory that loading left, and find the context that fits. Every rank of the group calls this.

    A draft model's rows get as many tokens as the target's, from the same budget.

    Args:
        facts: of this rank's caches.
        whole: as `ServedModel.whole`, the same on all ranks of a pipeline.
        sharing: number of ranks that share this one's memory.

    Raises:
        ConfigError: `--max-model-len` is beyond the model's own context, or a size is not a number of GiB.
        MemoryShortage: the flags ask for more than fits.
    """
    wanted = wanted_context(config, facts)
    draft_bytes = 0 if draft is None else draft.bytes_per_token
    link.share(True)  # a barrier: once all ranks have loaded, free memory stays free
    own = _scaled_to_whole(_own_budget(config, facts, draft_bytes, guard, sharing), facts, whole)
    budgets, hosts = link.share(own), link.share(link.host)
    budget = memory.MemoryBudget(
        kv=min(b.kv for b in budgets), prefix=min(b.prefix for b in budgets), logits=min(b.logits for b in budgets)
    )
    fits = max_row(budget.kv, whole.bytes_per_token, whole.bytes_per_row)
    whose = ""
    if whole is not facts:
        least = min(range(link.size), key=lambda rank: budgets[rank].kv)
        whose = f" (rows of all stages; rank {least} on {hosts[least]} has the least for its layers)"
    _check_context(config, wanted, fits, budget.kv, whose, link.rank)
    context = min(wanted, fits)
    limits = KvLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=context,
        kv_budget=budget.kv,
        bytes_per_token=whole.bytes_per_token,
        bytes_per_row=whole.bytes_per_row,
        page_tokens=_page_tokens(config, facts, context, link),
    )
    draft_kv = 0 if draft is None else budget.kv * draft_bytes // whole.bytes_per_token
    return MemoryPlan(limits, budget, draft_kv)


def _page_tokens(config: EngineConfig, facts: CacheFacts, context: int, link: Link) -> int:
    """Tokens by which the memory of rows grows; 0 where some rank cannot reserve address space for them."""
    reserved = can_reserve(buffer_shapes(facts.layouts, config.max_num_seqs, round_up(context)))
    if in_pages() and not reserved:
        log.warning(
            "this host gives no address space for %d rows of %d tokens (ulimit -v, vm.overcommit_memory): rows share "
            "buffers, which are copied when they grow",
            config.max_num_seqs,
            context,
        )
    of_ranks = link.share(page_tokens(facts.layouts) if reserved else 0)
    return max(of_ranks) if all(of_ranks) else 0


def wanted_context(config: EngineConfig, facts: CacheFacts) -> int:
    """Tokens of the wanted context: the flag's, else the model's own.

    Raises:
        ConfigError: the flag's is longer than the model's own.
    """
    check_context(config.max_model_len, facts.max_len)
    return config.max_model_len or facts.max_len or DEFAULT_CONTEXT


def _check_context(config: EngineConfig, wanted: int, fits: int, kv_budget: int, whose: str, rank: int) -> None:
    """Refuse a flag's context that does not fit; log that the model's own is cut.

    Args:
        whose: names the rank of the budget, with stages.
    """
    if config.max_model_len is not None and config.max_model_len > fits:
        raise MemoryShortage(
            f"--max-model-len {config.max_model_len} needs more KV memory than the budget of {kv_budget / GIB:.2f} GiB"
            f"{whose} holds ({fits} tokens).",
            remedy=f"Use --max-model-len {fits}, or raise --kv-cache-gb.",
        )
    if wanted > fits and rank == 0:
        log.warning("context limited to %d tokens by the KV budget%s; the model's own is %d", fits, whose, wanted)


def _own_budget(
    config: EngineConfig, facts: CacheFacts, draft_bytes: int, guard: int, sharing: int
) -> memory.MemoryBudget:
    """This rank's budget: its share of the free memory.

    Args:
        draft_bytes: per token of a draft model's rows, which come out of the KV budget.
    """
    minimum = GRANULE * (facts.bytes_per_token + draft_bytes) + facts.bytes_per_row
    machine = read_memory(sharing)
    machine = replace(machine, available=guard + (machine.available - guard) // sharing)
    budget = memory.serving_budget(machine, guard, config.kv_cache_gb, config.prefix_cache_gb, minimum_kv=minimum)
    if draft_bytes:
        budget = replace(budget, kv=budget.kv * facts.bytes_per_token // (facts.bytes_per_token + draft_bytes))
    return budget


def _scaled_to_whole(budget: memory.MemoryBudget, own: CacheFacts, whole: CacheFacts) -> memory.MemoryBudget:
    """A stage's budget, scaled to rows of the whole model, so that the budgets of all stages compare."""
    shares = ((own.bytes_per_token, whole.bytes_per_token), (own.bytes_per_row, whole.bytes_per_row))
    ratio = min((all_ / mine for mine, all_ in shares if mine), default=1.0)
    return replace(budget, kv=int(budget.kv * ratio), prefix=int(budget.prefix * ratio))
