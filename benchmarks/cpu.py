"""phalanx with its native CPU kernels against llama.cpp: the same shapes, the same bits per weight, taking turns.

Needs `pip install -e ".[bench-cpu]"`, which builds llama-cpp-python. Models have random weights (`cpu_models.py`).
Both keep their model loaded, and one is idle while the other computes. phalanx is measured through its HTTP server, by
the client's clock; the engine's own rate comes from its step counters.

    decode C    tokens/s of one stream after C tokens of context
    decode x8   tokens/s of eight streams together
    prompt C    tokens/s while reading C tokens
    busy        decode beside another process that keeps one core busy, relative to decode without it
    read limit  decode 128, relative to how often per second the machine can read all weights, keys and values, at the
                bandwidth that `kernels.py` measures in the same round
    http        decode 128 through HTTP, relative to the rate of the engine's own steps in the same answer

Ratios are taken within a round, then their median; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from cpu_models import BYTES, SHAPES, VOCAB, Shape, write_gguf, write_mlx
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from servers import MODEL_NAME, phalanx
from short_chats import own_counters, progress, spread

from phalanx.bench.http_client import open_client, stream_chat

ROUNDS = 7
TOKENS = 48
HTTP_TOKENS = 4 * TOKENS
"""More tokens than TOKENS, because the two rates differ by some percent only."""
MAX_CONTEXT = 2048 + 2 * TOKENS
ROWS = 8
CASES = {
    "decode 128": (128, 1),
    "decode 1024": (1024, 1),
    "decode x8": (64, ROWS),
    "prompt 512": (512, 1),
    "prompt 2048": (2048, 1),
    "busy": (128, 1),
}
"""Case -> (tokens of context, rows)."""
PRECISIONS = {
    "exact": ["--cpu-precision", "exact"],
    "fast": ["--cpu-precision", "fast"],
    "bfloat16": ["--cpu-precision", "exact", "--dtype", "bfloat16"],
}
"""Options of `phalanx serve`. Activations are float32, in the last case bfloat16, as on a GPU."""
OWN = ("read limit", "http")
"""Figures of phalanx alone."""


class Llama:
    """llama.cpp in a subprocess."""

    def __init__(self, model: Path, threads: int) -> None:
        worker = str(Path(__file__).with_name("llama_worker.py"))
        command = [sys.executable, worker, str(model), "--threads", str(threads)]
        command += ["--context", str(MAX_CONTEXT), "--rows", str(ROWS)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"llama.cpp ended with status {self.process.wait()}. (0.3.36 crashes in AMX products: build it with "
                "CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON' where the processor has them.)"
            )
        return dict(json.loads(line))

    def run(self, context: int, tokens: int, rows: int) -> dict[str, float]:
        """Seconds for prompts and decoding."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"context": context, "tokens": tokens, "rows": rows}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Close the pipe, which ends the subprocess."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def prompts(context: int, rows: int, turn: int) -> list[list[int]]:
    """Random token ids that no prefix cache holds; none is a byte token or EOS."""
    draw = random.Random(f"{context} {rows} {turn}")
    return [[draw.randrange(BYTES + 1, VOCAB) for _ in range(context)] for _ in range(rows)]


async def ours(client: httpx.AsyncClient, context: int, tokens: int, rows: int, turn: int) -> dict[str, float]:
    """Seconds to the first token of one prompt, and tokens/s of all streams while all decode."""
    bodies = [
        {"model": MODEL_NAME, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        for ids in prompts(context, rows, turn)
    ]
    sent = time.perf_counter()
    answers = await asyncio.gather(*(stream_chat(client, body, path="/completions") for body in bodies))
    for answer in answers:
        if answer.completion_tokens != tokens:
            raise RuntimeError(f"phalanx answered with {answer.completion_tokens} tokens instead of {tokens}")
    start = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    arrived = sum(sum(start < at <= end for at in answer.arrivals) for answer in answers)
    return {"prompt_s": answers[0].arrivals[0] - sent, "decode": arrived / (end - start) if arrived else math.nan}


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps one processor busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def compare(
    shape: Shape, folder: Path, threads: int, flags: list[str], rounds: int, cases: list[str]
) -> dict[str, Any]:
    """All figures of one model with `threads` threads."""
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    mlx_model, gguf = write_mlx(shape, folder), write_gguf(shape, folder)
    per_token = bytes_per_token(mlx_model, 128 + TOKENS // 2, 2 if "bfloat16" in flags else 4)
    server = ("--threads", str(threads), "--no-prefix-caching", "--max-model-len", str(MAX_CONTEXT), *flags)
    with phalanx(mlx_model, *server) as url:
        theirs = Llama(gguf, threads)
        try:
            async with open_client(url) as client:
                await ours(client, 64, 8, 1, -1)
                theirs.run(64, 8, 1)
                for turn in range(rounds):
                    progress(f"{shape.name}, {threads} threads, round {turn + 1} of {rounds}")
                    for who in ("phalanx", "llama.cpp") if turn % 2 == 0 else ("llama.cpp", "phalanx"):
                        await _measure(who, client, theirs, turn, cases, figures[who])
                    if "decode 128" in cases:
                        figures["phalanx"]["read limit"].append(await _of_limit(client, turn, threads, per_token))
                        figures["phalanx"]["http"].append(await _http_ratio(client, turn))
        finally:
            theirs.end()
    return {who: dict(values) for who, values in figures.items()}


async def _measure(
    who: str, client: httpx.AsyncClient, theirs: Llama, turn: int, cases: list[str], figures: dict[str, list[float]]
) -> None:
    async def run(context: int, rows: int) -> tuple[float, float]:
        if who == "phalanx":
            found = await ours(client, context, TOKENS, rows, turn)
            return context / found["prompt_s"], found["decode"]
        found = theirs.run(context, TOKENS, rows)
        return context * rows / found["prompt_s"], rows * TOKENS / found["decode_s"]

    for case in cases:
        context, rows = CASES[case]
        if case == "busy":
            undisturbed = (await run(context, rows))[1]
            with busy_neighbour():
                figures[case].append((await run(context, rows))[1] / undisturbed)
        else:
            prompt, decode = await run(context, rows)
            figures[case].append(prompt if case.startswith("prompt") else decode)


async def _of_limit(client: httpx.AsyncClient, turn: int, threads: int, per_token: int) -> float:
    """Tokens/s of one stream after a context of 128, relative to the reads of all weights per second that the memory
    allows. The bandwidth is measured just before and just after, because it drifts on a shared machine."""
    before = bandwidth(threads)
    found = await ours(client, 128, TOKENS, 1, 2000 + turn)
    return found["decode"] * per_token / statistics.mean((before, bandwidth(threads)))


async def _http_ratio(client: httpx.AsyncClient, turn: int) -> float:
    """Tokens/s of one stream after a context of 128, by the client's clock relative to the engine's. The engine's time
    is that of a long answer less that of an answer of one token."""
    steps, seconds, rate = 0.0, 0.0, 0.0
    for tokens, sign in ((1, -1), (1 + HTTP_TOKENS, 1)):
        before = await own_counters(client)
        found = await ours(client, 128, tokens, 1, 1000 + turn)
        after = await own_counters(client)
        steps += sign * (after["steps_total"] - before["steps_total"])
        seconds += sign * (after["step_seconds_total"] - before["step_seconds_total"])
        rate = found["decode"]
    return rate * seconds / steps


def bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read, measured by `kernels.py`."""
    command = [sys.executable, str(Path(__file__).with_name("kernels.py")), "--threads", str(threads), "--only", "-"]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1])["read_limit"])


def bytes_per_token(model: Path, context: int, kv_bytes: int) -> int:
    """Bytes that one row's step reads: one row of the embedding, the experts of one token, keys and values of
    `kv_bytes` each, and all other weights."""
    config = json.loads((model / "config.json").read_text())
    kv = 2 * kv_bytes * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * context
    share = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    total = float(kv)
    with safe_open(model / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            part = file.get_slice(name)
            size = math.prod(part.get_shape()) * {"U32": 4, "BF16": 2, "F32": 4}[part.get_dtype()]
            total += 0 if "embed_tokens" in name else size * share if ".switch_mlp." in name else size
    return int(total)


def ratio(found: dict[str, Any], key: str) -> float:
    """Median over rounds of phalanx's figure divided by llama.cpp's."""
    pairs = zip(found["phalanx"][key], found["llama.cpp"][key], strict=True)
    return float(statistics.median(a / b for a, b in pairs))


def show(console: Console, title: str, found: dict[str, Any]) -> None:
    """A table of medians and extremes."""
    table = Table(title=title)
    for column in ("", "phalanx", "llama.cpp", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for key in found["llama.cpp"]:
        digits = {who: spread(found[who][key]) for who in ("phalanx", "llama.cpp")}
        if key == "busy":
            digits = {who: f"{statistics.median(found[who][key]):.2f}" for who in digits}
        table.add_row(key, digits["phalanx"], digits["llama.cpp"], f"{ratio(found, key):.2f}")
    for key in found["phalanx"].keys() & set(OWN):
        table.add_row(key, f"{statistics.median(found['phalanx'][key]):.2f}", "", "")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", nargs="*", type=int, default=[2, 1])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, help="Where models are kept; else they are written anew.")
    options = parser.parse_args()
    console = Console(stderr=False, width=120)
    results = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        folder = options.folder or Path(directory)
        for name in options.models:
            for threads in options.threads:
                for precision in options.precisions:
                    flags = PRECISIONS[precision]
                    found = asyncio.run(compare(SHAPES[name], folder, threads, flags, options.rounds, options.cases))
                    show(console, f"{name}, {threads} threads, {precision}", found)
                    ratios = {key: ratio(found, key) for key in found["llama.cpp"]}
                    results.append(
                        {"model": name, "threads": threads, "precision": precision, "ratios": ratios, "values": found}
                    )
    about = {
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("phalanx", "phalanx-cpu", "mlx", "llama-cpp-python")},
    }
    print(json.dumps({"benchmark": "cpu", **about, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
