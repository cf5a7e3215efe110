"""How mlx-lm generates greedily, one prompt at a time. `reference.py` asks; nothing here knows of phalanx.

As a script: `python tests/support/mlx_lm_greedy.py JOBS.json OUT.json`, where JOBS is a list of
`{"model": directory, "prompt": [ids], "max_tokens": n, "stop_ids": [ids]}` and OUT becomes a list of
`{"tokens": [ids], "gaps": [floats]}`: the gap between the two largest logits at each step, in three digits, for the
near-tie rule (design: Proof). A stop id is the last token of its output.

Its text is part of the key of every answer that is kept (`golden.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def stock_greedy(
    model: nn.Module, prompts: Sequence[Sequence[int]], tokens: int, *, tie: float = 0.0
) -> list[list[int]]:
    """Greedy output of mlx-lm's model and caches in this process, one prompt at a time, fed as `generate_step` does.

    A row ends before the first step (but not the very first) whose two best logits are closer than `tie`: there, two
    correct ways of adding up in fp32 may choose differently.
    """
    outputs = []
    for prompt in prompts:
        caches = make_prompt_cache(model)
        if len(prompt) > 1:
            model(mx.array([prompt[:-1]]), cache=caches)
            mx.eval([c.state for c in caches])
        output, last = [], prompt[-1]
        for _ in range(tokens):
            logits = np.array(model(mx.array([[last]]), cache=caches)[0, -1].astype(mx.float32))
            second, best = np.partition(logits, -2)[-2:]
            if output and best - second < tie:
                break
            last = int(logits.argmax())
            output.append(last)
        outputs.append(output)
    return outputs


def greedy_here(jobs: Sequence[dict[str, Any]]) -> list[list[int]]:
    """`stock_greedy` for jobs `{"model", "prompt", "tokens", "tie"}` on models as mlx-lm loads them."""
    native = sys.modules.get("phalanx_cpu")
    if hasattr(mx.matmul, "__wrapped__") or getattr(native, "BLAS_IN_USE", False):
        raise RuntimeError("the native kernels compute in this process, so mlx-lm's own answers are not to be had here")
    as_on_every_machine()
    outputs, loaded, model = [], "", None
    for entry in jobs:
        if entry["model"] != loaded:
            loaded = entry["model"]
            model, _ = load_model(Path(loaded))
        outputs += stock_greedy(model, [entry["prompt"]], entry["tokens"], tie=entry["tie"])
    return outputs


def as_on_every_machine() -> None:
    """On a processor MLX compiles with the C++ compiler that it finds, whose roundings are its own."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()


def main() -> None:
    """Run the jobs of a file in this process, one model at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    as_on_every_machine()
    answers = []
    loaded, model = "", None
    for entry in json.loads(args.jobs.read_text()):
        if entry["model"] != loaded:
            loaded = entry["model"]
            model, _ = load_model(Path(loaded))
            model.set_dtype(mx.float32)  # scales included
        tokens: list[int] = []
        gaps: list[float] = []
        stop = set(entry.get("stop_ids", []))
        steps = generate_step(mx.array(entry["prompt"]), model, max_tokens=entry["max_tokens"])
        for token, logprobs in steps:
            best = mx.sort(mx.topk(logprobs.astype(mx.float32), 2))
            tokens.append(int(token))
            gaps.append(float(f"{(best[1] - best[0]).item():.3g}"))
            if tokens[-1] in stop:
                break
        answers.append({"tokens": tokens, "gaps": gaps})
    args.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
