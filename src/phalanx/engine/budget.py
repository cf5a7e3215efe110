"""What a rank will need before it loads, and what is left for rows afterwards (B2).

Every rank finds out for itself and all share it, so that all come to the same limits. Does not know how a model is
loaded or computed.
"""

from __future__ import annotations

import logging
import socket

from msgspec.structs import replace

from phalanx import memory
from phalanx.config import GIB, EngineConfig
from phalanx.engine.link import LeaderLink, SingleRank, WorkerLink
from phalanx.engine.speculation import DraftWeights
from phalanx.errors import ConfigError, MemoryShortage
from phalanx.model.cache.layout import CacheFacts, row_bytes
from phalanx.model.loading import load
from phalanx.sched.admission import GRANULE, KvLimits, largest_row

log = logging.getLogger("phalanx.engine")

DEFAULT_CONTEXT = 8192  # for models whose config names no limit (recurrent ones)


def predict(
    config: EngineConfig,
    rank: int,
    prepared: load.Prepared,
    facts: CacheFacts,
    draft: DraftWeights | None,
    guard: int,
) -> memory.Prediction:
    """What this rank will need, a draft model included; known before a weight is read (B2)."""
    kv = GRANULE * (row_bytes(facts.layouts, prepared.dtype) + (0 if draft is None else draft.bytes_per_token))
    if config.kv_cache_gb is not None:
        kv = int(config.kv_cache_gb * GIB)
    own = prepared.predict(rank=rank, host=socket.gethostname(), kv=kv, guard=guard)
    if draft is None:
        return own
    working = max(own.working, draft.working_bytes)
    return replace(own, weights=own.weights + draft.weights_bytes, working=working)


def find_limits(
    config: EngineConfig,
    facts: CacheFacts,
    draft: DraftWeights | None,
    guard: int,
    link: LeaderLink | WorkerLink | SingleRank,
    ranks_here: int,
) -> tuple[KvLimits, memory.Budget]:
    """The memory limits of this group, which are those of its smallest rank, and the context that fits in them.

    A draft model's rows get as many tokens as the target's, from the same budget.
    """
    context = facts.max_len or DEFAULT_CONTEXT
    wanted = config.max_model_len or context
    if facts.max_len is not None and wanted > facts.max_len:
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the model's own context of {facts.max_len} tokens.",
            remedy="Its positions mean nothing there; use a smaller value.",
        )
    drafting = 0 if draft is None else draft.bytes_per_token
    minimum = GRANULE * (facts.bytes_per_token + drafting) + facts.bytes_per_row
    link.share(True)  # all have loaded, so that what is free is free
    machine = memory.read_machine()
    machine = replace(machine, available=guard + (machine.available - guard) // ranks_here)
    own = memory.serving_budget(machine, guard, config.kv_cache_gb, config.prefix_cache_gb, minimum_kv=minimum)
    if drafting:
        own = replace(own, kv=own.kv * facts.bytes_per_token // (facts.bytes_per_token + drafting))
    budgets = link.share(own)
    budget = memory.Budget(
        kv=min(b.kv for b in budgets), prefix=min(b.prefix for b in budgets), logits=min(b.logits for b in budgets)
    )
    fits = largest_row(budget.kv, facts.bytes_per_token, facts.bytes_per_row)
    if config.max_model_len is not None and config.max_model_len > fits:
        raise MemoryShortage(
            f"--max-model-len {config.max_model_len} needs more KV memory than the budget of {budget.kv / GIB:.2f} GB "
            f"holds ({fits} tokens).",
            remedy=f"Use --max-model-len {fits}, or raise --kv-cache-gb.",
        )
    if wanted > fits and link.rank == 0:
        log.warning("context limited to %d tokens by the KV budget (the model's own is %d)", fits, wanted)
    limits = KvLimits(
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(wanted, fits),
        kv_budget=budget.kv,
        bytes_per_token=facts.bytes_per_token,
        bytes_per_row=facts.bytes_per_row,
    )
    return limits, budget
