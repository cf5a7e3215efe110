"""Runs split models in one process: the ranks take turns, and this module sums over ranks.

A rank runs until it needs a sum to which the other ranks have not contributed yet. Once they have, it runs again from
the start. Also lists the tiny configurations that can be split in two, and the changes that the others need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from support.families import FAMILIES

from phalanx.model.loading.load import Loaded, load
from phalanx.model.loading.stage_cut import Choice
from phalanx.model.stage import call_model

UNBUILDABLE = {
    "olmo": "needs a package of its own",
    "prism_hadamard_qwen35": "needs a checkpoint in its own format",
}
NO_RECIPE = frozenset("afm7 bitnet gemma3n gpt_bigcode mamba mamba2 muse_spark phi3small plamo rwkv7".split())
"""Model files that phalanx refuses for more than one rank."""

UNCHECKED = {
    "deepseek_v41": {"deepseek_v41.MoE"},
    "kimi_k3": {"kimi_k3.KimiK3SparseMoE"},
    "longcat_flash": {"longcat_flash.LongcatFlashMoE"},
    "longcat_flash_ngram": {"longcat_flash.LongcatFlashMoE"},
    "qwen3_5": {"qwen3_5.TextModel"},
    "qwen3_5_moe": {"qwen3_5.TextModel"},
}
"""Families with blocks that sum through mlx-lm's own collective, which needs a real group."""

OVERRIDES: dict[str, dict[str, Any]] = {"openelm": {"num_kv_heads": [2, 2, 2]}}
"""Family -> the entries that make its configuration divisible by two."""

SPLIT = sorted(set(FAMILIES) - NO_RECIPE - UNBUILDABLE.keys())
CHECKED = sorted(set(SPLIT) - UNCHECKED.keys())
KINDS = """
afmoe baichuan_m1 bailing_hybrid deepseek_v3 deepseek_v32 deepseek_v41 exaone_moe falcon_h1 gear gemma3 gemma4 glm4_moe
gpt_neox gpt_oss granitemoehybrid hunyuan jamba kimi_k25 kimi_k3 kimi_linear lfm2 llama llama4 longcat_flash
longcat_flash_ngram mimo_v2_flash minimax_m3_vl nemotron-nas nemotron_h olmo2 openelm phi3 plamo2 qwen3 qwen3_5
qwen3_5_moe qwen3_moe qwen3_next recurrent_gemma step3p5
""".split()
"""Recipes of mlx-lm and of ours, each with all its kinds of cache; `UNCHECKED`; and what fuses, shares or leaves out
projections."""


class _NotYetSummed(Exception):
    """Another rank has not contributed to this sum yet."""


class Board:
    """The contributions to the sums of one forward, in the order of the model's calls."""

    def __init__(self) -> None:
        self.totals: list[mx.array] = []
        self.parts: dict[int, mx.array] = {}


class HandReducer:
    """Replaces `phalanx.dist.reduce.Reducer` on one rank of a simulated group."""

    group = None

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board = board
        self.rank = rank
        self.size = size
        self.sites: list[tuple[str, int]] = []
        self.calls = 0

    def site(self, name: str, width: int) -> int:
        self.sites.append((name, width))
        return len(self.sites) - 1

    def all_sum(self, y: mx.array, site: int) -> mx.array:
        assert y.shape[-1] == self.sites[site][1], self.sites[site]
        call, self.calls = self.calls, self.calls + 1
        if call < len(self.board.totals):
            return self.board.totals[call]
        mx.eval(y)
        self.board.parts[self.rank] = y
        raise _NotYetSummed


class Ranks:
    """All ranks of a split model, or of a stage of one."""

    def __init__(self, path: Path, size: int, dtype: Any = "float32", choose_layers: Choice | None = None) -> None:
        self.board = Board()
        self.reducers = [HandReducer(self.board, rank, size) for rank in range(size)]
        self.loaded: list[Loaded] = [
            load(
                path,
                dtype=dtype,
                guard=0,
                trust_remote_code=False,
                on_progress=lambda *_: None,
                reducer=reducer,  # type: ignore[arg-type]
                choose_layers=choose_layers,
            )
            for reducer in self.reducers
        ]

    @property
    def models(self) -> list[Module]:
        return [loaded.model for loaded in self.loaded]

    def forward(self, tokens: Sequence[int], hiddens: Sequence[mx.array] | None = None) -> list[mx.array]:
        """Every rank's logits [1, L, V] for a prompt, or what it hands on; `hiddens` are those of a stage's ranks."""
        self.board.totals.clear()
        while True:
            outputs = list(self._attempt(mx.array([tokens]), hiddens))
            if len(outputs) == len(self.models):
                return outputs
            assert not outputs, "some ranks make fewer sums than others"
            parts = [self.board.parts[rank] for rank in range(len(self.models))]
            self.board.totals.append(sum(parts[1:], parts[0]))

    def _attempt(self, tokens: mx.array, hiddens: Sequence[mx.array] | None) -> Iterator[mx.array]:
        for rank, (loaded, reducer) in enumerate(zip(self.loaded, self.reducers, strict=True)):
            reducer.calls = 0
            hidden, caches = None if hiddens is None else hiddens[rank], make_prompt_cache(loaded.model)
            try:
                logits = call_model(loaded.model, loaded.stage, tokens, caches, hidden)
                mx.eval(logits)
            except _NotYetSummed:
                continue
            yield logits
