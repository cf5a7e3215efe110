"""Seconds until a fault is noticed and until streams resume, for real groups and every kind of fault.

A stream runs on a group of ranks; then a rank is killed, stopped or stuck, or its collective backend delivers
a wrong buffer.

    noticed   from the fault (or the last token before it) until the leader's verdict reaches the server, or the
              leader's process ends
    down      until no process of the group is left: ranks get 3 s to end, then the server kills them
    back      until the stream's next token, from a group that has started, loaded and tested itself again

What to expect: a death closes a connection (milliseconds); silence takes --heartbeat-timeout-seconds (2 s); a stuck
rank takes the step's limit, the larger of --step-timeout-seconds and 5 times the predicted step. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from phalanx.config import EngineConfig
from phalanx.supervision.process import EngineProcess
from phalanx.types import (
    Batch,
    Failed,
    Finished,
    FromEngine,
    ModelInfo,
    Sampling,
    SequenceRequest,
    StopRule,
    Submit,
    Tokens,
)

STEP = 40
FAULTS: dict[str, str | Callable[[EngineProcess], None]] = {
    "worker killed": lambda engine: os.kill(engine.rank_pids[1], signal.SIGKILL),
    "leader killed": lambda engine: os.kill(engine.rank_pids[0], signal.SIGKILL),
    "worker stopped (SIGSTOP)": lambda engine: os.kill(engine.rank_pids[1], signal.SIGSTOP),
    "worker terminated (SIGTERM)": lambda engine: os.kill(engine.rank_pids[1], signal.SIGTERM),
    "worker stands still": f"wedge:rank=1,step={STEP}",
    "rows tampered with": f"tamper:rank=1,step={STEP}",
    "garbage from the backend": f"garbage:rank=1,step={STEP},layer=3",
}
REQUEST = SequenceRequest(
    id="a", group="a", prompt=[5, 6, 7], sampling=Sampling(temperature=0.0), stop=StopRule(max_tokens=400)
)


class Watched(EngineProcess):
    """An engine that records the time of every event, as its own `EngineListener`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.at: dict[str, float] = {}
        self.tokens: list[int] = []
        self.reason = ""
        self.news = asyncio.Event()
        self.subscribe(self)

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self.note("noticed")
        super()._handle(message)

    def note(self, what: str) -> None:
        self.at.setdefault(what, time.monotonic())
        self.news.set()

    def on_batch(self, batch: Batch) -> None:
        """Record tokens."""
        for event in batch.events:
            if isinstance(event, Tokens):
                self.tokens += event.tokens
                if "down" in self.at:
                    self.note("back")
                else:
                    self.at["last token"] = time.monotonic()
            elif isinstance(event, Finished):
                self.note("finished")
        self.news.set()

    def on_ready(self, info: ModelInfo) -> None:
        """Submit the request, or the rest of it after a restart."""
        self.send(Submit(replace(REQUEST, committed=list(self.tokens))))

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Record the end of the group."""
        self.reason = reason
        self.note("noticed")
        self.note("down")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; checks it after every event."""
        while not condition():
            await self.news.wait()
            self.news.clear()


async def suffer(config: EngineConfig, fault: str | Callable[[EngineProcess], None]) -> dict[str, Any]:
    """Cause a fault in a running stream. Returns the seconds of each stage and the reported reason."""
    engine = Watched(replace(config, inject=fault) if isinstance(fault, str) else config)
    await engine.start()
    try:
        await engine.until(lambda: len(engine.tokens) >= STEP // 2)
        if not isinstance(fault, str):
            fault(engine)
            engine.at["fault"] = time.monotonic()
        await engine.until(lambda: "back" in engine.at)
    finally:
        await engine.close()
    start = engine.at.get("fault", engine.at["last token"])
    return {what: engine.at[what] - start for what in ("noticed", "down", "back")} | {"reason": engine.reason}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", nargs="*", default=["2:ring", "2:mpi", "4:mpi"], help="RANKS:BACKEND")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    table = Table("fault", "group", "noticed s", "down s", "back s", "reason")
    for group in options.groups:
        ranks, _, backend = group.partition(":")
        config = EngineConfig(
            model="demo", kv_cache_gb=0.1, prefix_cache_gb=0.0, tensor_parallel_size=int(ranks), backend=backend
        )
        for name, fault in FAULTS.items():
            result = asyncio.run(suffer(config, fault))
            results[f"{name}, {group}"] = result
            seconds = (f"{result[what]:.2f}" for what in ("noticed", "down", "back"))
            table.add_row(name, group, *seconds, result["reason"][:90])
    Console(width=170, highlight=False).print(table)
    versions = {name: version(name) for name in ("phalanx", "mlx", "mlx-lm")}
    machine = f"{platform.system()} {platform.machine()}"
    print(json.dumps({"benchmark": "faults", "machine": machine, "versions": versions, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
