"""The largest bodies of all kinds against a server process, beside a running stream: nothing holds the event loop."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.large_bodies import BLOCKS, LINES, RAW, Attack, attacks, valid
from support.serving import sse

LARGEST = (8 << 20) - 64  # of --max-body-mb
PROMPT = 500_000  # bytes of a valid prompt
HELD_MS = 250.0  # alone it is a fifth of that
ATTEMPTS = 3  # a busy machine may let other threads of the server run in place of its event loop
LEFT_BYTES = 64 << 20  # after 400 MB of bodies


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    script, folder = Path(__file__).with_name("probed_server.py"), tmp_path_factory.mktemp("server")
    paths = os.pathsep.join([str(script.parents[1]), *sys.path])
    program = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                while client.get("/health").status_code != 200:
                    assert child.poll() is None
                yield client
        finally:
            child.kill()  # a signal would wait for the stream


class Stream(threading.Thread):
    """An answer that is streamed until the test ends it."""

    def __init__(self, url: httpx.URL) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ending = threading.Event()
        self.began = threading.Event()
        self.text = ""

    def run(self) -> None:
        body = {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 200_000}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as response:
            for piece in response.iter_text():
                self.text += piece
                self.began.set()
                if self._ending.is_set():
                    return

    def end(self) -> None:
        self._ending.set()
        self.join(60)


def probe(server: httpx.Client, *, trim: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/probe", params={"trim": trim}).json()
    return found


def send(server: httpx.Client, attack: Attack) -> dict[str, Any]:
    """Send a body, check its answer, and return what the probe saw meanwhile."""
    response = server.post(attack.route, content=attack.body, headers={"content-type": "application/json"})
    assert response.status_code == attack.status, (attack.name, response.text[:300])
    if attack.status != 200:
        error = response.json()["error"]
        if attack.route in (LINES, RAW):
            error = {"message": error, "type": None, "param": None, "code": None}
        assert set(error) == ({"message", "type"} | (set() if attack.route == BLOCKS else {"param", "code"}))
        assert attack.said in error["message"] and len(response.content) < 1000, (attack.name, error)
    seen = probe(server)
    held = f"held {seen['processor_ms']:5.1f} ms (by the clock {seen['clock_ms']:5.1f} ms)"
    print(f"{attack.name:40s} {len(attack.body):8d} bytes, {held}, {seen['rss'] / 2**20:.0f} MiB")
    return seen


def held_ms(server: httpx.Client, attack: Attack) -> float:
    """How long a body holds the event loop, the least of some attempts."""
    least = math.inf
    for _ in range(ATTEMPTS):
        least = min(least, send(server, attack)["processor_ms"])
        if least <= HELD_MS:
            break
    return least


def test_no_body_stops_the_streams_of_others(server: httpx.Client) -> None:
    """One body of numbers for messages stopped all streams for 87 s and took 4.7 GB."""
    stream = Stream(server.base_url)
    stream.start()
    assert stream.began.wait(60)
    for attack in valid(10_000):
        send(server, attack)
    probe(server)
    held = {attack.name: held_ms(server, attack) for attack in chain(attacks(LARGEST), valid(PROMPT))}
    assert len(held) > 50
    assert {name: ms for name, ms in held.items() if ms > HELD_MS} == {}
    assert stream.is_alive()
    stream.end()
    events = sse(stream.text.rpartition("\n\n")[0] + "\n\n")
    assert len(events) > 100 and not any("error" in event for event in events)
    before = probe(server, trim=True)  # with what one round leaves in pieces of the allocator's
    for attack in attacks(LARGEST):
        send(server, attack)
    after = probe(server, trim=True)
    assert after["rss"] < before["rss"] + LEFT_BYTES
