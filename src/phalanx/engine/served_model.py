"""Loads and checks a rank's part of the model, once all ranks have compared software and files and found memory enough;
on the leader also a draft model.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from phalanx import __version__, memory
from phalanx.config import EngineConfig
from phalanx.engine.group_selftest import RankFacts, compare_facts
from phalanx.engine.link import Link
from phalanx.engine.membership import Membership
from phalanx.engine.memory_plan import memory_guard, predict, wanted_context
from phalanx.engine.speculation import DraftWeights
from phalanx.engine.stages import layer_choice
from phalanx.kernels import install
from phalanx.model import device_memory, registry
from phalanx.model.cache.layer_layout import CacheFacts
from phalanx.model.check import check_model
from phalanx.model.loading import load
from phalanx.model.loading.weights import fingerprint
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.speculation_config import DraftModelSpeculation

log = logging.getLogger("phalanx.engine")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """This rank's part of the model, ready to run."""

    loaded: load.Loaded
    runner: Runner
    draft: DraftWeights | None
    """The draft model, on the leader if the configuration names one."""
    draft_runner: Runner | None
    guard: int
    """Bytes of this rank's memory that stay free."""
    sharing: int
    """Number of ranks, this one among them, that share this rank's memory."""
    software: RankFacts
    """Versions and model files, the same on all ranks."""
    layers: tuple[tuple[int, int], ...]
    """By rank: the layers `[first, last)` of its stage; empty in a group of one stage."""

    @property
    def whole(self) -> CacheFacts:
        """The caches by which rows are counted: with stages those of the whole, unsharded model, else this rank's."""
        return self.runner.facts if self.loaded.stage is None else self.loaded.stage.whole

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary; 0 where its config does not say."""
        config = self.loaded.config
        scope = config if "vocab_size" in config else config.get("text_config", {})
        return int(scope.get("vocab_size", 0))


def load_model(config: EngineConfig, path: Path, member: Membership, report: load.Progress) -> ServedModel:
    """Load the model in a directory, after checking that all ranks have the same files and that each part fits.

    Raises:
        GroupError: ranks differ in software or in the model's files.
        MemoryShortage: the model does not fit on some rank; says what would fit.
        ModelUnsupported, WeightsError: the model cannot be loaded, or disagrees with mlx-lm.
        ConfigError: the draft model does not fit this model.
    """
    link, reducer = member.link, member.reducer
    guard = memory_guard(config)
    software = _compared_software(config, link, path)
    prepared = load.prepare(
        path,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
        reducer=reducer,
        choose_layers=layer_choice(config, member.topology, link, guard),
    )
    reducer.foreign = bool(prepared.unchecked)
    facts = registry.inspect(prepared.model, prepared.config, prepared.stage)
    reducer.discard()  # `inspect` builds a forward and does not evaluate it
    wanted_context(config, facts)  # raises before any weights are read
    draft = _draft_weights(config, link.rank, facts, path)
    sharing = _check_memory(config, link, prepared, facts, draft, guard)
    device_memory.wire(config.wired_limit, sharing)
    stage = prepared.stage
    layers = () if stage is None else tuple(link.share((stage.first, stage.last)))
    loaded = prepared.materialise(guard, report, ranks_here=member.ranks_here, sharing=sharing)
    runner = _checked_runner(loaded, member, report)
    draft_runner = None if draft is None else draft.materialise(guard, report)
    return ServedModel(loaded, runner, draft, draft_runner, guard, sharing, software, layers)


def _compared_software(config: EngineConfig, link: Link, path: Path) -> RankFacts:
    """This rank's software and model, after comparing them with all ranks'."""
    facts = RankFacts(
        phalanx=__version__,
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        model=fingerprint(path),
        dtype=config.dtype,
    )
    if link.size > 1:
        compare_facts(link, facts)
    return facts


def _draft_weights(config: EngineConfig, rank: int, facts: CacheFacts, target: Path) -> DraftWeights | None:
    """The leader's draft model, not read yet; None on other ranks and without a draft model."""
    if rank != 0 or not isinstance(config.speculative_config, DraftModelSpeculation) or not facts.supports_rollback:
        return None
    return DraftWeights(config, config.speculative_config, target)


def _check_memory(
    config: EngineConfig, link: Link, prepared: load.Prepared, facts: CacheFacts, draft: DraftWeights | None, guard: int
) -> int:
    """Check that the weights fit on every rank. Returns the number of ranks that share this one's memory."""
    predictions = link.share(predict(config, link, prepared, facts, draft, guard))
    memory.check_group(prepared.path.name, predictions)  # its error shows the table as well
    if link.rank == 0:
        log.info("before loading:\n%s", memory.prediction_table(predictions))
    return memory.ranks_beside(predictions, link.rank)


def _checked_runner(loaded: load.Loaded, member: Membership, report: load.Progress) -> Runner:
    """A runner of the loaded model whose rows agree with mlx-lm; rows are packed only where every rank can."""
    absorb_short_queries(loaded.model)
    facts = registry.inspect(loaded.model, loaded.config, loaded.stage)
    member.reducer.discard()  # as above
    runner = Runner(loaded.model, facts, loaded.dtype, member.reducer, stage=loaded.stage)
    report("checking the model", 0, 1)
    link = member.link
    check_model(runner, loaded.model, may_pack=all(link.share(install.active())))
    runner.facts = dataclasses.replace(runner.facts, packs=all(link.share(runner.facts.packs)))
    return runner
