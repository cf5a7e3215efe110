"""Processes that tests start: stand-ins for replicas, and gateways before them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).resolve().parents[1]
QUICK = ("--health-check-interval-secs", "0.1", "--port", "0")
SUSPICIOUS = ("--health-check-timeout-secs", "2")
"""For what stands still. Three such spans make a replica count as lost."""


class Process:
    """A process that prints one line once it is ready."""

    def __init__(self, *command: str, **more: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self.first, self.log

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(self.process.stderr)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(120)


@contextmanager
def process(*command: str, **more: Any) -> Iterator[Process]:
    made = Process(*command, **more)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def stub(*arguments: str, module: str = "support.stub_replica") -> Iterator[tuple[Process, str]]:
    """A stand-in for a replica as a process, and its URL."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with process("-m", module, *arguments, env={**os.environ, "PYTHONPATH": path}) as made:
        yield made, f"http://127.0.0.1:{int(made.first)}"


@contextmanager
def gateway(*arguments: str) -> Iterator[tuple[Process, str]]:
    with process("-m", "phalanx", "gateway", *QUICK, *arguments) as made:
        assert made.first.startswith("phalanx gateway is ready: http://127.0.0.1:"), made.first
        yield made, made.first.split()[4].removesuffix("/v1")


def wait_until(true: Any) -> None:
    give_up = time.monotonic() + 120
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def states(url: str) -> dict[str, str]:
    return httpx.get(f"{url}/health", timeout=60).json()["replicas"]


def are_up(url: str, n: int) -> bool:
    return sum(state == "ok" for state in states(url).values()) == n
