"""One rank of a group that decodes greedily on several models in turn: a process of `test_tp_families.py`.

`python greedy_rank.py JOBS.json OUT SIZE BACKEND`: jobs as `reference.py` has them; OUT.<rank> becomes a list of
`{"tokens", "sums", "unchecked"}`. The rank is where the launcher put it. Every sum is checked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from phalanx.dist.collective_backend import foreign_launcher
from phalanx.dist.group import join
from phalanx.dist.reduce import Reducer
from phalanx.model.loading.load import load

NONCE = 4711


def greedy(entry: dict[str, Any], group: mx.distributed.Group) -> dict[str, Any]:
    """The tokens of one job."""
    reducer = Reducer(group)
    loaded = load(
        Path(entry["model"]), dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None,
        reducer=reducer,
    )  # fmt: skip
    reducer.foreign = bool(loaded.unchecked)
    cache = make_prompt_cache(loaded.model)
    tokens: list[int] = []
    inputs = entry["prompt"]
    for step in range(entry["max_tokens"]):
        logits = loaded.model(mx.array([inputs]), cache=cache)[0, -1]
        pending = reducer.finish()
        best = mx.argmax(logits)
        mx.eval(*pending, best, [c.state for c in cache if not c.empty()])
        reducer.judge(step, pending)
        tokens.append(int(best.item()))
        inputs = tokens[-1:]
    return {"tokens": tokens, "sums": loaded.sums, "unchecked": loaded.unchecked}


def main() -> None:
    """Run all jobs."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    jobs, out, size, backend = sys.argv[1:]
    place = foreign_launcher(os.environ)
    assert place is not None
    group = join(backend, place.rank, int(size), NONCE, where="", deadline_s=30)  # type: ignore[arg-type]
    answers = [greedy(entry, group) for entry in json.loads(Path(jobs).read_text())]
    Path(f"{out}.{place.rank}").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
