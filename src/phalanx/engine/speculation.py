"""Builds the configured drafter and control (`spec/`) on the leader."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

from phalanx.config import EngineConfig
from phalanx.dist.reduce import Reducer
from phalanx.errors import ConfigError
from phalanx.model import registry
from phalanx.model.cache.layer_layout import CacheFacts, buffer_shapes, row_bytes
from phalanx.model.cache.row_memory import can_reserve
from phalanx.model.check import check_model
from phalanx.model.loading import load
from phalanx.model.loading.resolve import resolve
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.sched.admission import KvLimits, round_up
from phalanx.sched.scheduler import Scheduler
from phalanx.spec import rules
from phalanx.spec.comparison import Comparison
from phalanx.spec.draft_model import MAX_CATCH_UP, DraftModel
from phalanx.spec.drafters import BUCKETS, Drafter, RandomDrafter
from phalanx.spec.ngram import NgramDrafter
from phalanx.spec.running_grammars import Grammars
from phalanx.spec.sampling_metadata import SamplingMetadataCache
from phalanx.spec.speculator import Speculator
from phalanx.spec.stats import SpecMeter
from phalanx.spec.suffix import SuffixDrafter
from phalanx.speculation_config import (
    DraftModelSpeculation,
    NgramSpeculation,
    RandomSpeculation,
    SpeculativeConfig,
    SuffixSpeculation,
)
from phalanx.text.tokenizer import Tokenizer

log = logging.getLogger("phalanx.engine")


class DraftWeights:
    """A draft model before its weights are read. Only the leader has one, whole.

    Args:
        target: folder of the model that is served.

    Raises:
        ConfigError: the tokenizers differ, or its cache cannot roll back; says which.
        ModelUnsupported, WeightsError: as for any model.
    """

    def __init__(self, config: EngineConfig, draft: DraftModelSpeculation, target: Path) -> None:
        trust = config.trust_remote_code
        path = resolve(draft.model, revision=draft.revision, trust_remote_code=trust)
        difference = Tokenizer.load(target, trust_remote_code=trust).differs_from(
            Tokenizer.load(path, trust_remote_code=trust)
        )
        if difference:
            raise ConfigError(
                f"The draft model {draft.model} has another tokenizer than {config.model}: {difference}.",
                remedy="A draft model must come from the same family; or use the method ngram or suffix.",
            )
        self._prepared = load.prepare(path, dtype=config.dtype, trust_remote_code=trust)
        self._facts = registry.inspect(self._prepared.model, self._prepared.config)
        if not self._facts.supports_rollback:
            raise ConfigError(
                f"The draft model {draft.model} keeps recurrent state, which cannot roll back.",
                remedy="Use a draft model with attention only, or the method ngram or suffix.",
            )

    @property
    def weights_bytes(self) -> int:
        """Bytes of its weights."""
        return self._prepared.weights_bytes

    @property
    def working_bytes(self) -> int:
        """Largest number of bytes besides the weights while it loads."""
        return self._prepared.working_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of its KV cache per token."""
        return row_bytes(self._facts.layouts, self._prepared.dtype)

    def materialise(self, guard: int, report: load.Progress) -> Runner:
        """Read the weights and check the model; the arguments are those of `load.Prepared.materialise`."""
        loaded = self._prepared.materialise(guard, report)
        absorb_short_queries(loaded.model)
        runner = Runner(loaded.model, registry.inspect(loaded.model, loaded.config), loaded.dtype, Reducer(None))
        check_model(runner, loaded.model)
        return runner


def describe(config: SpeculativeConfig | None, facts: CacheFacts) -> str:
    """One line: the drafter, or why there is none."""
    if config is None:
        return "off"
    if not facts.supports_rollback:
        return "off: the model keeps recurrent state, which cannot roll back"
    method = type(config).__struct_config__.tag
    name = f"{method} {config.model}" if isinstance(config, DraftModelSpeculation) else str(method)
    packed = ", rows packed" if facts.packs else ""
    n = config.compare_steps
    comparison = "" if n is None else f", alternating with none every {n} steps"
    return f"{name}, up to {config.num_speculative_tokens} tokens a step, control {config.control}{packed}{comparison}"


def _reserved_rows(draft: Runner, limits: KvLimits) -> tuple[int, int] | None:
    """Rows and tokens of a draft model's buffers, if they take memory by the page as the target's rows do."""
    size = limits.max_num_seqs, round_up(limits.max_model_len + BUCKETS + MAX_CATCH_UP)
    return size if limits.page_tokens and can_reserve(buffer_shapes(draft.facts.layouts, *size)) else None


def make_speculator(
    config: SpeculativeConfig | None,
    scheduler: Scheduler,
    metadata: SamplingMetadataCache,
    vocab_size: int,
    draft: Runner | None,
    draft_kv: int,
    grammars: Grammars,
) -> Speculator | None:
    """The speculator of this leader; None without speculation and for recurrent models.

    Args:
        draft: the draft model, if the configuration names one.
        draft_kv: bytes for its rows.
        grammars: cut drafts, and draft the tokens that they force.
    """
    if config is None or scheduler.config.recurrent:
        return None

    def metadata_after(number: int, drafts: Sequence[int]) -> SamplingMetadata:
        return metadata.after(scheduler.by_number[number], drafts)

    if draft is not None:
        reserved = _reserved_rows(draft, scheduler.config.limits)
        drafter: Drafter = DraftModel(
            draft, vocab_size, draft_kv, metadata_after, scheduler.config.max_logits, reserved
        )
    else:
        drafter = _drafter(config, vocab_size)
    comparison = None if config.compare_steps is None else Comparison(config.compare_steps)
    meter = SpecMeter(str(type(config).__struct_config__.tag), config.window, comparison)
    return Speculator(
        drafter,
        rules.build(config, pack_above=scheduler.config.pack_above),
        meter,
        vocab_size,
        config.disable_by_batch_size or math.inf,
        lambda: [row for row in scheduler.layout.rows() if not row.decoding],
        grammars,
    )


def _drafter(config: SpeculativeConfig, vocab_size: int) -> Drafter:
    match config:
        case RandomSpeculation():
            return RandomDrafter(vocab_size)
        case NgramSpeculation():
            return NgramDrafter(config)
        case SuffixSpeculation():
            return SuffixDrafter(config)
        case DraftModelSpeculation():
            raise AssertionError("`make_speculator` handles draft models")
        case _:
            assert_never(config)
