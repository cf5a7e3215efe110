"""Decodes with rows that are packed, against mlx-lm's caches on its own kernels; prints what was found, as JSON.

python tests/native/packed.py FAMILY[+WINDOW] ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
from mlx_lm.utils import load_model
from support.models import make_model
from support.ragged import Driver, make_prompts
from support.reference import job, reference_many

from phalanx.kernels import install
from phalanx.model import registry
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner

TIE = 1e-4
PROMPTS, LONGEST, TOKENS = 6, 40, 32


def make(name: str, folder: Path) -> Path:
    family, _, window = name.partition("+")
    return make_model(family, folder / name.replace(":", "_"), **({"sliding_window": int(window)} if window else {}))


def references_of(paths: list[Path], prompts: list[list[int]]) -> list[list[list[int]]]:
    """mlx-lm's tokens up to the first near tie behind the first token, by model: from a process without the kernels."""
    jobs = [{**job(prompt, TOKENS), "model": str(path)} for path in paths for prompt in prompts]
    rows = []
    for answer in reference_many(jobs):
        ties = (at for at, gap in enumerate(answer["gaps"]) if at and gap < TIE)
        rows.append(answer["tokens"][: next(ties, TOKENS)])
    return [rows[at : at + len(prompts)] for at in range(0, len(rows), len(prompts))]


def main(folder: Path) -> None:
    mx.disable_compile()  # as the engine does
    prompts = make_prompts(PROMPTS, LONGEST)
    names = sys.argv[1:]
    paths = [make(name, folder) for name in names]
    models = [load_model(path) for path in paths]
    assert install.install("exact", 2) is not None
    found = {}
    for name, (model, config), references in zip(names, models, references_of(paths, prompts), strict=True):
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
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
