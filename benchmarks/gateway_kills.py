"""The same death of one of two replicas through each router: what clients get whose streams it was writing.

Once one of the replicas has written some tokens for each of its streams, it is killed, server and ranks: the same
moment for all routers, whatever they hold back. What a client gets is compared with an undisturbed answer:

    complete      to its last token, the same text
    other text    to its last token, another text
    error event   tells the client that the answer is not whole
    broken        the connection breaks off, so that the client's library raises
    truncated     ends as if it were whole, and is not

Then new requests are sent. Other routers lie in a folder with an environment for each (`make clients` makes one).
`gateway_report.py` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from msgspec import Struct
from routers import Target, installed, running
from servers import MODEL_NAME, endless_demo

from phalanx.cli.private import PrivateServer
from phalanx.errors import PhalanxError

OUTCOMES = ("complete", "other text", "error event", "broken", "truncated")
DEATH_S = 60.0  # until the moment has come
AFTERWARDS = 8  # requests after the death
KEY, ADMIN_KEY = "secret", "secret of gateways"
CHAT = "/v1/chat/completions"
WRITTEN = re.compile(r"^phalanx:generation_tokens_total\S* (\S+)$", re.M)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that `measure` reads, besides --routers."""
    parser.add_argument("--kill-streams", type=int, default=8)
    parser.add_argument("--kill-tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--kill-after", type=int, default=150, help="tokens of each of its streams by then")
    parser.add_argument("--kill-only", action="append", metavar="ROUTER", help="may be repeated")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each router's outcomes.

    Raises:
        RuntimeError: the replica that was to die got no streams, or they were over before.
    """
    found, absent = installed(options.routers)
    n, tokens, after = options.kill_streams, options.kill_tokens, options.kill_after
    results = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        model = endless_demo(Path(directory))
        with replica(model, n) as server:
            wanted = [stream.text for stream in asyncio.run(undisturbed(server.url.removesuffix("/v1"), n, tokens))]
        for name, path in found.items():
            if options.kill_only and name not in options.kill_only:
                continue
            with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as own, ExitStack() as stack:
                replicas = [stack.enter_context(replica(model, n)) for _ in range(2)]
                urls = tuple(one.url.removesuffix("/v1") for one in replicas)
                target = Target(replicas=urls, model=MODEL_NAME, key=KEY, admin_key=ADMIN_KEY)
                router = stack.enter_context(running(name, path, target, Path(own)))
                results[name] = asyncio.run(one_death(router.url, replicas[0], wanted, tokens, after))
    return {"streams": n, "tokens": tokens, "killed_after": after, "absent": absent, "results": results}


@contextmanager
def replica(model: Path, places: int) -> Iterator[PrivateServer]:
    """A server of one rank, which may be killed."""
    keys = ["--api-key", KEY, "--admin-key", ADMIN_KEY]
    flags = ["--port", "0", "--served-model-name", MODEL_NAME, "--max-num-seqs", str(places), *keys]
    server = PrivateServer(str(model), flags)
    try:
        server.wait_ready(lambda line: None)
        yield server
    finally:
        with suppress(PhalanxError):
            server.stop()


def kill(server: PrivateServer) -> None:
    """Server and ranks, at once."""
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)


class Client(Struct):
    """One stream as its client sees it."""

    text: str = ""
    pieces: int = 0
    finish_reason: str | None = None
    is_done: bool = False  # the event that ends a stream has come
    error: str = ""  # of an error event, or of an answer that is none
    broken: str = ""  # what the client's library raised
    longest_gap_s: float = 0.0

    def outcome(self, wanted: str, tokens: int) -> str:
        """One of `OUTCOMES`."""
        if self.broken:
            return "broken"
        if self.error:
            return "error event"
        if self.finish_reason != "length":
            return "truncated"
        return "complete" if self.text == wanted else "other text"

    async def run(self, session: aiohttp.ClientSession, url: str, number: int, tokens: int) -> None:
        """Ask, and read to the end, whatever that is."""
        messages = [{"role": "user", "content": f"Tell me story number {number} about a lighthouse."}]
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        try:
            async with session.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {KEY}"}) as response:
                if response.status != 200:
                    self.error = f"{response.status}: {(await response.text())[:300]}"
                    return
                last = time.monotonic()
                async for line in response.content:
                    self._read(line)
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
        except aiohttp.ClientError as error:
            self.broken = f"{type(error).__name__}: {error}"[:300]

    def _read(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.is_done = True
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("error"):
                self.error = str(event["error"].get("message") or event["error"])[:300]
            for choice in event.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    self.text += piece
                    self.pieces += 1
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


async def undisturbed(url: str, n: int, tokens: int) -> list[Client]:
    """The streams where nothing dies."""
    clients = [Client() for _ in range(n)]
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client.run(session, url, i, tokens) for i, client in enumerate(clients)))
    for client in clients:
        if client.finish_reason != "length":
            raise RuntimeError(f"{url}: an undisturbed stream ended early: {client.error or client.broken}")
    return clients


async def until_written(server: PrivateServer, session: aiohttp.ClientSession, after: int) -> int:
    """Wait until it has written so many tokens for each request that it runs. Returns how many those are.

    Raises:
        RuntimeError: it gets no requests.
    """
    url, headers = server.url.removesuffix("/v1"), {"Authorization": f"Bearer {KEY}"}
    begun: float | None = None
    give_up = time.monotonic() + DEATH_S
    while time.monotonic() < give_up:
        async with session.get(f"{url}/health", headers=headers) as response:
            running = int((await response.json())["requests"]["running"])
        async with session.get(f"{url}/metrics", headers=headers) as response:
            found = WRITTEN.findall(await response.text())
        written = sum(map(float, found))
        begun = written if begun is None else begun
        if running and written - begun >= after * running:
            return running
        await asyncio.sleep(0.01)
    raise RuntimeError(f"the replica {url} got no requests, or they were over at once")


async def one_death(url: str, victim: PrivateServer, wanted: list[str], tokens: int, after: int) -> dict[str, Any]:
    """Stream, kill, and look; then ask anew."""
    clients = [Client() for _ in wanted]
    async with aiohttp.ClientSession() as session:
        async with asyncio.TaskGroup() as group:
            for i, client in enumerate(clients):
                group.create_task(client.run(session, url, i, tokens))
            on_victim = await until_written(victim, session, after)
            kill(victim)
        later = [Client() for _ in range(AFTERWARDS)]
        for i, client in enumerate(later):
            await client.run(session, url, i, 8)
    outcomes = [client.outcome(text, tokens) for client, text in zip(clients, wanted, strict=True)]
    name = victim.url.removeprefix("http://").removesuffix("/v1")
    lost = [client for client, outcome in zip(clients, outcomes, strict=True) if outcome not in OUTCOMES[:2]]
    return {
        "streams_on_the_killed": on_victim,
        "outcomes": {outcome: Counter(outcomes)[outcome] for outcome in OUTCOMES},
        "ended_with_done": sum(client.is_done for client in lost),
        "names_the_replica": sum(name in client.error for client in lost),
        "an_error": next((client.error or client.broken for client in lost if client.error or client.broken), ""),
        "pieces_of_lost": sorted(client.pieces for client in lost),
        "longest_gap_s": round(max(client.longest_gap_s for client in clients), 3),
        "answered_afterwards": sum(client.finish_reason == "length" for client in later),
        "asked_afterwards": AFTERWARDS,
    }
