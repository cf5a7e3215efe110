"""Decodes with rows that are packed, against mlx-lm's caches on its own kernels; prints what was found, as JSON.

python tests/native/packed.py FAMILY[+WINDOW] ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
from support.families import WEIGHTS, Weights
from support.models import build, make_config
from support.ragged import Driver, make_prompts, stock_greedy

from phalanx.kernels import install
from phalanx.model import registry
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner

TIE = 1e-4
PROMPTS, LONGEST, TOKENS = 6, 40, 32


def main() -> None:
    mx.disable_compile()  # as the engine does
    prompts = make_prompts(PROMPTS, LONGEST)
    models: dict[str, tuple[Any, Any, list[list[int]]]] = {}
    for name in sys.argv[1:]:
        family, _, window = name.partition("+")
        config = make_config(family, **({"sliding_window": int(window)} if window else {}))
        model = build(config, WEIGHTS.get(family, Weights()), mx.float32)
        models[name] = model, config, stock_greedy(model, prompts, TOKENS, tie=TIE)
    assert install.install("exact", 2) is not None
    found = {}
    for name, (model, config, references) in models.items():
        absorb_short_queries(model)
        runner = Runner(model, registry.inspect(model, config), mx.float32)
        registry.check_model(runner, model, may_pack=True)
        driver = Driver(runner, prompts, references, seed=1)
        outputs = driver.run()
        pairs = enumerate(zip(outputs, references, strict=True))
        wrong = [i for i, (ours, theirs) in pairs if ours != theirs[: len(ours)]]
        found[name] = {
            "packs": runner.facts.packs, "packed": driver.counts["packed"], "wrong": wrong,
            "distinct": min(len(set(row)) for row in references),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
