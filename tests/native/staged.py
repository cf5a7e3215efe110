"""Decodes with stages in one process, with native kernels; prints in what they differ from the whole model, as JSON.

python tests/native/staged.py FAMILY[/BITS] ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
from support.models import make_model
from support.ragged import Driver, make_prompts
from support.stages import StagedRunner, staged_runner

from phalanx.kernels import install
from phalanx.model.graph_cache import GraphCache
from phalanx.sched.plan import Admit, Forward, Resize

STAGES = 3


def decode(runner: StagedRunner) -> None:
    """One row, then two of equal and of different length, often enough to be captured; then drafts."""
    runner.apply([Resize(0, 2, 48), Admit(0, 0, 0), Admit(0, 1, 1)])
    for row, prompt in enumerate([(7, 11, 30, 5, 80), (9, 4, 2)]):
        runner.forward(Forward(0, row, (row,), (prompt,), (len(prompt),), sample=False), [0])
    lengths = [5, 3]
    for n in range(10):
        runner.forward(Forward(0, 0, (0,), ((n + 3,),), (1,), sample=True), lengths[:1])
        lengths[0] += 1
    for n in range(10):
        runner.forward(Forward(0, 0, (0, 1), ((n + 3,), (90 - n,)), (1, 1), sample=True), lengths)
        lengths = [length + 1 for length in lengths]
    if runner.facts.recurrent:
        return
    for n in range(10):  # going back after each
        runner.forward(Forward(0, 0, (0, 1), ((n, 8, 9), (n + 1, 6, 0)), (3, 2), sample=True), lengths)


def main() -> None:
    mx.disable_compile()  # as the engine does
    assert install.install("exact", 2) is not None
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        family, _, bits = name.partition("/")
        with tempfile.TemporaryDirectory() as folder:
            quantize = {"bits": int(bits)} if bits else None
            path = make_model(family, Path(folder) / "model", quantize=quantize, dtype=mx.bfloat16)
            runner = staged_runner(path, STAGES, dtype="auto", may_pack=True)
        decode(runner)
        runner.apply([Resize(0, 0, 0)])
        graphs = [stage._graphs for stage in runner.stages]
        assert all(isinstance(cache, GraphCache) for cache in graphs)
        replayed = [cache.replayed for cache in graphs if isinstance(cache, GraphCache)]
        prompts = make_prompts(3, 20)
        driver = Driver(runner, prompts, [[5, 9] * 12] * len(prompts), seed=0)
        driver.run()
        found[name] = {
            "forwards": runner.forwards, "different": len(runner.different), "replayed": replayed,
            "packed": driver.counts["packed"], "packs": [stage.facts.packs for stage in (runner, *runner.stages)],
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
