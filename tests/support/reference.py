"""mlx-lm's own greedy output, one prompt at a time, from a process without phalanx's code.

As a script: `python tests/support/reference.py JOBS.json OUT.json`, where JOBS is a list of
`{"model": directory, "prompt": [ids], "max_tokens": n, "stop_ids": [ids]}` and OUT becomes a list of
`{"tokens": [ids], "gaps": [floats]}`: the gap between the two largest logits at each step, for the near-tie rule
(design: Proof). A stop id is the last token of its output. As a module: `reference_greedy(path, jobs)` runs that
script; `reference_many` for jobs on several models.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def reference(path: Path, jobs: Sequence[Job]) -> list[dict[str, list[Any]]]:
    """Tokens and gaps for each job, from a subprocess."""
    return reference_many([{**entry, "model": str(path)} for entry in jobs])


def reference_many(jobs: Sequence[Job]) -> list[dict[str, list[Any]]]:
    """Tokens and gaps for jobs that name their models, from one subprocess."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "jobs.json", Path(folder) / "out.json"
        source.write_text(json.dumps(list(jobs)))
        command = [sys.executable, str(Path(__file__).resolve()), str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        answer: list[dict[str, list[Any]]] = json.loads(target.read_text())
        return answer


def reference_greedy(path: Path, jobs: Sequence[Job]) -> list[list[int]]:
    """Only the tokens of `reference`."""
    return [answer["tokens"] for answer in reference(path, jobs)]


def job(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> Job:
    """One entry of JOBS."""
    return {"prompt": list(prompt), "max_tokens": max_tokens, "stop_ids": list(stop_ids)}


def main() -> None:
    """Run the jobs of a file in this process, one model at a time."""
    # Imported here, because only the reference process needs mlx-lm.
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm.generate import generate_step  # noqa: PLC0415
    from mlx_lm.utils import load_model  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32", help="weights are cast to it, scales included")
    args = parser.parse_args()
    answers = []
    loaded, model = "", None
    for entry in json.loads(args.jobs.read_text()):
        if entry["model"] != loaded:
            loaded = entry["model"]
            model, _ = load_model(Path(loaded))
            model.set_dtype(getattr(mx, args.dtype))
        tokens: list[int] = []
        gaps: list[float] = []
        stop = set(entry.get("stop_ids", []))
        steps = generate_step(mx.array(entry["prompt"]), model, max_tokens=entry["max_tokens"])
        for token, logprobs in steps:
            best = mx.sort(mx.topk(logprobs.astype(mx.float32), 2))
            tokens.append(int(token))
            gaps.append(float((best[1] - best[0]).item()))
            if tokens[-1] in stop:
                break
        answers.append({"tokens": tokens, "gaps": gaps})
    args.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
