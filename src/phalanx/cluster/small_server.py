"""Serves the bundled model on this machine for a few seconds, and times its streams as a client on this machine sees
them: what serving and a group cost shows in the steps of a model that computes almost nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.bench.http_client import RequestFailed, open_client, stream_chat
from phalanx.bench.load_generator import closed_loop
from phalanx.catalog.short_names import DEMO
from phalanx.config import RUN_PHALANX
from phalanx.environment import child_environment
from phalanx.errors import ClusterError
from phalanx.planning.timings import ServedSteps

LIMIT_S = 300.0  # for the server to start and to be timed
ROWS = (1, 4, 16)
PROMPT = 8  # tokens, so few that all streams soon decode
OUTPUT = 256  # tokens, and more for each further stream, which delays the others
MORE = 8
FIRSTS = 5  # requests whose first token is timed
MAX_ID = 2000  # below the vocabulary of the bundled model
FLAGS = (
    *("--port", "0", "--prefix-cache-gb", "0", "--kv-cache-gb", "0.25", "--memory-guard-gb", "0.1"),
    *("--log-level", "error", "--stop-on-eof"),
)


def timed_steps(stages: int, width: int) -> ServedSteps:
    """What the bundled model's steps take when a group of this machine serves it.

    Raises:
        ClusterError: the server does not start, or does not answer.
    """
    shape = ("--tp", str(width), "--pp", str(stages))
    try:
        with _server(shape) as url:
            return asyncio.run(_measure(url))
    except RequestFailed as error:
        raise ClusterError(f"A server of the {DEMO} model does not answer here: {error.message}") from error


@contextmanager
def _server(shape: tuple[str, ...]) -> Iterator[str]:
    command = [sys.executable, *RUN_PHALANX, "serve", DEMO, *FLAGS, *shape]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=child_environment(), start_new_session=True,
    )  # fmt: skip
    late = threading.Timer(LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("phalanx is ready: "):
            raise ClusterError(
                f"A group of {DEMO} ({' '.join(shape)}) does not start here.",
                remedy=f"`phalanx selftest {DEMO} {' '.join(shape)}` says why.",
            )
        yield line.split()[3]
    finally:
        late.cancel()
        process.send_signal(signal.SIGTERM)
        process.communicate()


async def _measure(url: str) -> ServedSteps:
    """Seconds of a step by number of streams, and of a first token."""
    draw = random.Random(0)

    def body(n: int) -> dict[str, Any]:
        prompt = [draw.randrange(100, MAX_ID) for _ in range(PROMPT)]
        return {
            "model": DEMO, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True,
            "skip_special_tokens": False,  # every token yields text, so that its arrival can be timed
        }  # fmt: skip

    async with open_client(url) as client:
        await stream_chat(client, body(OUTPUT), path="/completions")
        steps, contexts = {}, {}
        for rows in ROWS:
            bodies = [body(OUTPUT + MORE * rows) for _ in range(rows)]
            load = await closed_loop(client, bodies, rows, path="/completions")
            if load.decode_tokens_per_s > 0:
                steps[rows] = rows / load.decode_tokens_per_s
                contexts[rows] = PROMPT + (OUTPUT + MORE * rows) // 2
        firsts = [(await stream_chat(client, body(2), path="/completions")).ttft_s or 0.0 for _ in range(FIRSTS)]
    if 1 not in steps:
        raise ClusterError(f"A server of the {DEMO} model wrote no tokens here.")
    return ServedSteps(prompt=PROMPT, context=contexts, step_s=steps, first_s=statistics.median(firsts))
