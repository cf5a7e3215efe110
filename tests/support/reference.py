"""mlx-lm's own greedy output, one prompt at a time, computed without phalanx's code and kept (`golden.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.golden import golden
from support.mlx_lm_greedy import greedy_here

Job = dict[str, Any]

SCRIPT = Path(__file__).with_name("mlx_lm_greedy.py")


def reference(path: Path, jobs: Sequence[Job]) -> list[dict[str, list[Any]]]:
    """Tokens and gaps for each job."""
    return reference_many([{**entry, "model": str(path)} for entry in jobs])


def reference_many(jobs: Sequence[Job]) -> list[dict[str, list[Any]]]:
    """Tokens and gaps for jobs that name their models; those that are not kept are computed in one process."""
    return golden().answers(SCRIPT.read_text(), jobs, _from_a_process)


def _from_a_process(jobs: list[Job]) -> list[dict[str, list[Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "jobs.json", Path(folder) / "out.json"
        source.write_text(json.dumps(jobs))
        command = [sys.executable, str(SCRIPT), str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        answer: list[dict[str, list[Any]]] = json.loads(target.read_text())
        return answer


def reference_greedy(path: Path, jobs: Sequence[Job]) -> list[list[int]]:
    """Only the tokens of `reference`."""
    return [answer["tokens"] for answer in reference(path, jobs)]


def reference_here(path: Path, prompts: Sequence[Sequence[int]], tokens: int, *, tie: float = 0.0) -> list[list[int]]:
    """`stock_greedy` of a model in its own dtype; what is not kept is computed in this process, which is up at once."""
    jobs = [{"model": str(path), "prompt": list(prompt), "tokens": tokens, "tie": tie} for prompt in prompts]
    return golden().answers(SCRIPT.read_text(), jobs, greedy_here)


def job(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> Job:
    """One job, without its model."""
    return {"prompt": list(prompt), "max_tokens": max_tokens, "stop_ids": list(stop_ids)}
