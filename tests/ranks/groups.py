"""Servers on groups of ranks, streams against them, and what /health says meanwhile. Shared by the tests here."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from msgspec.structs import replace
from support.driver import PATIENT
from support.serving import CONFIG, MODEL, Running, running_server

from phalanx.config import EngineConfig
from phalanx.supervision.process import EngineProcess, Launched
from phalanx.text.tokenizer import Tokenizer

TOKENS = 120
PROMPTS = ["tell me more", "hello", "the quick brown fox jumps over the lazy dog", "a"]


class FaultyEngine(EngineProcess):
    """Has a fault in each of its first starts: one start per fault, where a group per fault would take two."""

    def __init__(self, config: EngineConfig, faults: Sequence[str]) -> None:
        super().__init__(config)
        self._faults = [*faults]

    async def _launch(self, directory: Path) -> Launched:
        if self._ready_at is not None:  # a start whose ranks did not find each other has had no fault yet
            self._faults = self._faults[1:]
        self._config = replace(self._config, inject=self._faults[0] if self._faults else None)
        return await super()._launch(directory)


@contextmanager
def group_server(
    path: Path, ranks: int | tuple[int, ...], backend: str, *, faults: Sequence[str] = (), **settings: Any
) -> Iterator[Running]:
    """A server on a group of real rank processes, or on stages of so many; no process is left afterwards.

    Args:
        faults: to be injected into its starts, one after the other.
    """
    engine = replace(
        CONFIG.engine,
        model=str(path),
        kv_cache_gb=0.1,
        prefix_cache_gb=0.02,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=1 if isinstance(ranks, int) else len(ranks),
        **({"backend": backend} if ranks != 1 else {}),
        **PATIENT,
        **settings,
    )
    process = FaultyEngine(engine, faults) if faults else EngineProcess(engine)
    seen: dict[int, float] = {}
    with running_server(Tokenizer.load(path), process, replace(CONFIG, engine=engine)) as running:
        yield running
        seen.update(identify(process.rank_pids.values()))
    assert_gone(seen)


def identify(pids: Any) -> dict[int, float]:
    """Process id -> when it was created: numbers are used again."""
    return {pid: psutil.Process(pid).create_time() for pid in pids}


def assert_gone(processes: dict[int, float]) -> None:
    """No process of these is left. One without memory, and so without arguments, has ended but for the traces that its
    parent or the kernel clears away.
    """
    left = []
    for pid, created in processes.items():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created and (words := process.cmdline()):
                left.append(" ".join(words)[:200])
    assert not left, left


class Load:
    """Streams running at once against a server, and the reasons /health gave while it was not ready."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.texts: dict[str, str] = {}
        self.reasons: list[str] = []
        self.processes: dict[int, float] = {}

    async def stream_all(self, when: Callable[[], Awaitable[None]] | None = None) -> dict[str, str]:
        """The whole answers, by prompt. `when` is awaited once every stream has begun."""
        self.texts = dict.fromkeys(PROMPTS, "")
        async with openai.AsyncOpenAI(  # it comes again where it came too late, and the group is starting again
            base_url=self._running.base_url, api_key="none", max_retries=30, timeout=240
        ) as client:
            streams = [asyncio.create_task(self._stream(client, prompt)) for prompt in PROMPTS]
            if when is not None:
                while not all(self.texts.values()):
                    await asyncio.sleep(0.03)
                    assert not any(stream.done() and stream.exception() for stream in streams)
                await when()
            await asyncio.gather(*streams)
        return self.texts

    async def _stream(self, client: openai.AsyncOpenAI, prompt: str) -> None:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            temperature=0.8,
            seed=4,
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self.texts[prompt] += chunk.choices[0].delta.content or ""

    async def watch_health(self) -> None:
        """Note every reason for not being ready, and every rank's process, until cancelled."""
        async with httpx.AsyncClient(base_url=self._running.origin, timeout=60) as client:
            while True:
                answer = await client.get("/health")
                if answer.status_code == 503 and (reason := answer.json().get("reason", "")) not in self.reasons:
                    self.reasons.append(reason)
                for pid in self._running.engine.rank_pids.values():
                    with suppress(psutil.NoSuchProcess):
                        self.processes |= identify([pid])
                await asyncio.sleep(0.03)


Strike = Callable[[], Awaitable[None]]


def signal_to(running: Running, rank: int, number: signal.Signals) -> Strike:
    """Send a signal to a rank."""

    async def strike() -> None:
        os.kill(running.engine.rank_pids[rank], number)

    return strike


def named(reasons: list[str], *parts: str) -> None:
    """Some reason that /health gave contains all parts."""
    assert any(all(part.lower() in reason.lower() for part in parts) for reason in reasons), reasons


def undisturbed(path: Path) -> dict[str, str]:
    """What one rank answers when nothing happens."""
    with group_server(path, 1, "none") as running:
        texts = asyncio.run(Load(running).stream_all())
    assert all(len(text) >= TOKENS / 2 for text in texts.values())
    assert len(set(texts.values())) == len(PROMPTS)
    return texts


def through_a_fault(
    running: Running, expected: dict[str, str], strike: Strike | None = None, times: int = 1
) -> list[str]:
    """Streams through a fault, which `strike` produces unless it is injected: the answers are the expected ones.

    Returns:
        The reasons that /health gave while the group was down; it went down so many times.
    """

    async def main() -> list[str]:
        load = Load(running)
        restarts = running.engine.state.restarts
        watch = asyncio.create_task(load.watch_health())
        texts = await load.stream_all(strike)
        watch.cancel()
        assert texts == expected
        assert running.engine.state.restarts == restarts + times
        ended = {pid: at for pid, at in load.processes.items() if pid not in running.engine.rank_pids.values()}
        assert ended
        assert_gone(ended)
        return load.reasons

    return asyncio.run(main())


def network(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def reachable(process: psutil.Process) -> list[str]:
    """Addresses on which a process listens in this network, other than loopback."""
    if network(process.pid) != network("self"):
        return []
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [f"{process.name()} {at.ip}:{at.port}" for at in listening if not ipaddress.ip_address(at.ip).is_loopback]


def assert_only_loopback_listens(backend: str) -> None:
    """No process of the group that runs now can be connected to from outside; on Linux, where that can be seen."""
    if sys.platform != "linux":
        return
    family = psutil.Process().children(recursive=True)
    names = [one.name() for one in family]
    assert ("prterun" in names) == (backend == "mpi") and len(names) >= 2
    assert [at for one in family for at in reachable(one)] == []
