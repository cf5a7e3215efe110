"""Checks phalanx beside mlx-lm on this machine's device; ends with a summary in JSON. `gpu_check.sh` installs first.

    python tools/gpu_check.py --backend cuda13 [MODEL_DIRECTORY ...] [--tokens N] [--json FILE]

For the bundled model and each directory: phalanx loads it and says its memory budget; its greedy tokens are mlx-lm's on
the same device, or differ by rounding alone (tests/support/near_ties.py); tokens per second of both. Once: an answer
over HTTP from `phalanx serve demo`, and two ranks over NCCL where there are two GPUs. Exit status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import httpx  # noqa: E402
from support.near_ties import FACTOR, Forced, force, judge  # noqa: E402

from phalanx import LLM, SamplingParams  # noqa: E402
from phalanx.cli.private import PrivateServer  # noqa: E402
from phalanx.demo import MODEL_DIR  # noqa: E402
from phalanx.dist.gpus import usable_gpus  # noqa: E402

LIMIT_S = 540.0
"""For everything: a machine that is lent for ten minutes is still there when the summary is written."""
FLOAT32_TIE = 1e-4
"""Of logits that float32 may order either way; see `tests/support/conformance.py`."""
CHATS = ["What is phalanx?", "What is 2+2?", "Why is the sky blue?", "Name three colours."]
PACKAGES = ("mlx", "mlx-lm", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu")


@dataclass
class Check:
    """Runs the parts of the check and notes what came of each."""

    backend: str
    tokens: int
    started: float = field(default_factory=time.monotonic)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def part(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run one part. It passes unless it raises, or says `"ok": False`."""
        before = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            self.left_s()
            found = run()
        except Exception as error:  # noqa: BLE001 (whatever it is, the other parts are worth knowing)
            traceback.print_exc()
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        self.parts[name] = {"ok": True, **found, "seconds": round(time.monotonic() - before, 1)}
        print(json.dumps(self.parts[name]), flush=True)

    def left_s(self) -> float:
        """Seconds that a command may take.

        Raises:
            TimeoutError: none.
        """
        left = self.started + LIMIT_S - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the check has run for {LIMIT_S:g} s")
        return left

    def json_of(self, command: Sequence[str]) -> Any:
        """What a Python command prints on stdout, as JSON.

        Raises:
            RuntimeError: it failed; has the end of what it said.
        """
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=self.left_s())
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:5])} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout)

    def summary(self) -> dict[str, Any]:
        """All parts, and whether all passed."""
        return {
            "ok": all(part["ok"] for part in self.parts.values()),
            "backend": self.backend,
            "seconds": round(time.monotonic() - self.started, 1),
            "parts": self.parts,
        }


# The parts ---------------------------------------------------------------------------------------------------------


def device(check: Check) -> dict[str, Any]:
    """MLX's device and the versions; fails if MLX does not use the GPU that it was installed for."""
    found = check.json_of([__file__, "device"])
    return {**found, "ok": found["device"] == ("cpu" if check.backend == "cpu" else "gpu")}


def load(check: Check, model: str) -> dict[str, Any]:
    """Load a model on one rank: its facts and memory, in GB."""
    found = check.json_of(["-P", "-m", "phalanx", "selftest", model, "--tp", "1", "--json"])
    info, (rank,) = found["info"], found["ranks"]
    sizes = {
        "weights_gb": info["weights_bytes"],
        "kv_budget_gb": info["kv_budget_bytes"],
        "prefix_budget_gb": info["prefix_budget_bytes"],
        "active_gb": rank["active_bytes"],
    }
    facts = {name: info[name] for name in ("model_type", "dtype", "quantization", "load_s", "kernels")}
    return {**facts, **{name: round(size / (1 << 30), 3) for name, size in sizes.items()}}


def compare(check: Check, model: str, dtype: str) -> dict[str, Any]:
    """Greedy tokens of some chats and the speed of one long answer, of phalanx and of mlx-lm on the same device."""
    greedy = SamplingParams(temperature=0, max_tokens=check.tokens)
    with LLM(model) as llm:
        outputs = llm.chat([[{"role": "user", "content": chat}] for chat in CHATS], greedy)
        long: Any = {"prompt_token_ids": outputs[0].prompt_token_ids}
        whole = SamplingParams(temperature=0, max_tokens=check.tokens, ignore_eos=True)
        timed = [llm.generate(long, whole)[0] for _ in range(2)][-1]  # the first one warms up
    said = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    jobs = [{"prompt": prompt, "tokens": len(tokens)} for prompt, tokens in said]
    jobs += [{"prompt": said[0][0], "tokens": check.tokens}] * 2
    theirs = mlx_lm(check, model, dtype, jobs)
    answers = [answer["tokens"] for answer in theirs[: len(said)]]
    speeds = {
        "phalanx_tokens_per_s": round(1 / timed.timing["tpot"], 1),
        "mlx_lm_tokens_per_s": round(theirs[-1]["tokens_per_s"], 1),
    }
    return {**same_tokens(said, answers, lambda: forced(model, dtype, said, check.backend), dtype), **speeds}


def forced(model: str, dtype: str, said: Sequence[tuple[list[int], list[int]]], backend: str) -> list[Forced]:
    """mlx-lm's logits for what phalanx said: of float32 on the processor, and of `dtype` on the device."""
    return force(Path(model), dtype, said, device="cpu" if backend == "cpu" else "gpu")


def same_tokens(
    said: Sequence[tuple[list[int], list[int]]],
    theirs: Sequence[list[int]],
    logits: Callable[[], list[Forced]],
    dtype: str,
) -> dict[str, Any]:
    """Whether phalanx's greedy tokens are mlx-lm's, or differ from the likeliest ones by rounding alone.

    Args:
        said: (prompt, phalanx's tokens) of each answer.
        theirs: mlx-lm's tokens of each answer.
        logits: mlx-lm's logits for what phalanx said; asked for if an answer differs.
    """
    equal = sum(ours == other for (_, ours), other in zip(said, theirs, strict=True))
    found = {"answers": len(said), "equal": equal, "tokens": sum(len(tokens) for _, tokens in said)}
    if equal == len(said):
        return found
    tie = FLOAT32_TIE / FACTOR if dtype == "float32" else 0.0
    verdict = judge([replace(answer, rounding=max(answer.rounding, tie)) for answer in logits()])
    unexplained = [{"at": at, "gap": gap, "limit": limit} for at, gap, limit in verdict.unexplained]
    return {**found, "ok": verdict.right, "near_ties": verdict.flips, "unexplained": unexplained[:10]}


def mlx_lm(check: Check, model: str, dtype: str, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """mlx-lm's own greedy answers, of a process without phalanx's code."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model": model, "dtype": dtype, "jobs": list(jobs)}, file)
        file.flush()
        answers: list[dict[str, Any]] = check.json_of([__file__, "mlx-lm", file.name])
    return answers


def over_http(check: Check) -> dict[str, Any]:
    """An answer of `phalanx serve demo` to a client of the API."""
    server = PrivateServer("demo", ["--port", "0"])
    try:
        server.wait_ready(print)
        body = {"model": "demo", "messages": [{"role": "user", "content": CHATS[0]}], "temperature": 0}
        response = httpx.post(f"{server.url}/chat/completions", json=body, timeout=check.left_s())
        response.raise_for_status()
        answer = response.json()["choices"][0]
        health = httpx.get(server.url.removesuffix("/v1") + "/health", timeout=check.left_s()).status_code
    finally:
        ended = server.stop()
    ok = bool(answer["message"]["content"].strip()) and health == 200 and ended == 0
    return {"ok": ok, "answer": answer["message"]["content"], "health": health, "exit_status": ended}


def two_ranks(check: Check) -> dict[str, Any]:
    """The self-test of two ranks, with a GPU each."""
    if len(usable_gpus()) < 2:
        return {"skipped": f"{len(usable_gpus())} GPUs that MLX can use"}
    info = check.json_of(["-P", "-m", "phalanx", "selftest", "demo", "--tp", "2", "--json"])["info"]
    test = info["self_test"]
    ok = info["backend"] == "nccl" and test["total"] == test["expected"]
    return {"ok": ok, "backend": info["backend"], "step_ms": round(test["step_ms"], 2), "equal_tokens": test["tokens"]}


# In processes of their own, so that this one keeps no memory on a GPU ------------------------------------------------


def show_device() -> None:
    """Print MLX's device and the versions of its packages."""
    import importlib.metadata as metadata  # noqa: PLC0415

    import mlx.core as mx  # noqa: PLC0415

    facts = mx.device_info()
    names = {dist.metadata["Name"] for dist in metadata.distributions()}
    versions = {name: metadata.version(name) for name in PACKAGES if name in names}
    kind = str(mx.default_device().type).rpartition(".")[2]
    print(json.dumps({"device": kind, "facts": facts, "versions": versions, "python": sys.version.split()[0]}))


def answer_jobs(file: str) -> None:
    """Print mlx-lm's greedy tokens of each job, and tokens per second after the first token."""
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm.generate import generate_step  # noqa: PLC0415
    from mlx_lm.utils import load_model  # noqa: PLC0415

    wanted = json.loads(Path(file).read_text())
    model, _ = load_model(Path(wanted["model"]))
    model.set_dtype(getattr(mx, wanted["dtype"]))
    answers = []
    for job in wanted["jobs"]:
        tokens, at = [], []
        for token, _ in generate_step(mx.array(job["prompt"]), model, max_tokens=job["tokens"]):
            tokens.append(int(token))
            at.append(time.perf_counter())
        answers.append({"tokens": tokens, "tokens_per_s": (len(at) - 1) / max(at[-1] - at[0], 1e-9)})
    print(json.dumps(answers))


def main() -> int:
    """Run all parts, print the summary, write it to a file if asked to."""
    if sys.argv[1:2] == ["device"]:
        show_device()
        return 0
    if sys.argv[1:2] == ["mlx-lm"]:
        answer_jobs(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", type=Path, help="directories of models, besides the bundled one")
    parser.add_argument("--backend", required=True, choices=["cpu", "cuda12", "cuda13", "metal"])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--json", type=Path, help="file for the summary")
    given = parser.parse_args()
    for model in given.model:
        if not (model / "config.json").is_file():
            parser.error(f"{model} is no directory of a model")
    check = Check(given.backend, given.tokens)
    signal.signal(signal.SIGALRM, lambda *_: check.left_s())  # which raises: an engine may hang while it starts
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    check.part("device", lambda: device(check))
    for model in (MODEL_DIR, *given.model):
        name = "demo" if model == MODEL_DIR else model.name
        check.part(f"{name}: load", lambda model=model: load(check, str(model)))
        dtype = check.parts[f"{name}: load"].get("dtype")
        if dtype is not None:
            check.part(f"{name}: tokens", lambda model=model, dtype=dtype: compare(check, str(model), dtype))
    check.part("http", lambda: over_http(check))
    check.part("two ranks", lambda: two_ranks(check))
    summary = check.summary()
    if given.json is not None:
        given.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
