"""phalanx's HTTP server against mlx_lm.server: the same models and requests, in turns, by `phalanx bench compare`.

Decoding reads every weight once per step, so one stream cannot be faster than bytes of weights over memory bandwidth,
and rows computed together share that read. MLX's CPU kernels are far from that limit, and both servers call them here:
they differ in everything around the model call. Decoding is compared by TPOT.

`bench compare` does not measure the time to the first token of a short prompt that comes while a long one is being
prefilled. A server that prefills the long prompt in one piece makes the short one wait for all of it; chunks make it
wait for one chunk. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cpu_models import SMALL, write_mlx
from servers import MODEL_NAME, endless_demo, mlx_lm, phalanx
from short_chats import prompt, request

from phalanx.bench.http_client import open_client, stream_chat
from phalanx.config import RUN_PHALANX
from phalanx.environment import KERNELS_VARIABLE

RATE = "33"  # per second: mlx_lm.server listens with a backlog of 5, and of 16 requests at once it resets a few
LOADS = ((1, 128), (4, 96), (16, 64))
"""Streams at once, and tokens of each answer."""


class Subject(NamedTuple):
    """A model and its prompts."""

    write: Callable[[Path], Path]
    words: int
    long_words: int
    shorter: int  # answers are so many times shorter


SUBJECTS = {
    "demo": Subject(endless_demo, 24, 1200, 1),
    "random 100M": Subject(lambda folder: write_mlx(SMALL, folder), 1, 60, 4),  # prefill is as slow as decoding here
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SUBJECTS, help="one model only")
    options = parser.parse_args()
    os.environ[KERNELS_VARIABLE] = "0"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        for name, subject in SUBJECTS.items():
            if options.only in (None, name):
                print(f"{name}:", flush=True)
                results[name] = compare(subject, Path(directory), options.rounds)
    print(json.dumps({"benchmark": "serving", "short_beside_long_ttft_ms": results}))


def compare(subject: Subject, directory: Path, rounds: int) -> dict[str, list[float]]:
    """All measurements on one model; prints the tables of `bench`, and returns what that does not measure."""
    model = subject.write(directory)
    with phalanx(model) as ours, mlx_lm(model, directory / "mlx_lm.log") as theirs:
        addresses = {"phalanx": ours, "mlx_lm": theirs}
        for streams, tokens in LOADS:
            load = [
                "--backend", "openai-chat", "--model", MODEL_NAME, "--request-rate", RATE, "--burstiness", "inf",
                "--random-input-len", subject.words, "--random-output-len", tokens // subject.shorter,
                "--num-prompts", streams, "--rounds", rounds,
            ]  # fmt: skip
            servers = [f"{name}={url}" for name, url in addresses.items()]
            subprocess.run([sys.executable, *RUN_PHALANX, "bench", "compare", *servers, *map(str, load)], check=True)
        found = asyncio.run(measure_beside(addresses, subject, rounds))
    medians = {name: statistics.median(each) for name, each in found.items()}
    print("short beside long, TTFT:", ", ".join(f"{name} {each:.0f} ms" for name, each in medians.items()), flush=True)
    return found


async def measure_beside(addresses: Mapping[str, str], subject: Subject, rounds: int) -> dict[str, list[float]]:
    """TTFT (ms) of a short prompt sent just after a long one, by server and round."""
    result: dict[str, list[float]] = {name: [] for name in addresses}
    for turn in range(rounds):
        for name in list(addresses)[:: 1 if turn % 2 == 0 else -1]:
            async with open_client(addresses[name]) as client:
                result[name].append(await _beside(client, subject.long_words, turn))
    return result


async def _beside(client: httpx.AsyncClient, words: int, turn: int) -> float:
    long = asyncio.create_task(stream_chat(client, request(prompt(words, turn, 99), 1)))
    await asyncio.sleep(0.3)  # the long one is being prefilled
    if long.done():
        raise RuntimeError("The long prompt was prefilled before the short one came; make it longer.")
    short = await stream_chat(client, request(prompt(0, turn, 98), 4))
    await long
    assert short.ttft_s is not None
    return 1000 * short.ttft_s


if __name__ == "__main__":
    main()
