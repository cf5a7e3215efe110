"""A thousand streams over two replicas of two ranks each, while ranks, servers and whole replicas are killed in turn.

`test_gateway_kills.py` kills each replica once; this one adds every kind of death, again and again, and prints how long
clients had to wait. STREAMS is their number; after SECONDS no further one begins.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import SUSPICIOUS, Process, gateway, states
from support.messages_events import read_message
from support.ollama_lines import read_lines
from support.responses_events import check_stream
from support.serving import sse

from phalanx.bench.load_generator import percentile

STREAMS = int(os.environ.get("STREAMS", "1000"))
SECONDS = float(os.environ.get("SECONDS", "inf"))
CONCURRENCY = 8
ROWS = "16"  # for so many streams, of which some have two or four choices, on the replica that is left
BETWEEN = 8  # streams that end between two deaths, at least
KEY = "adm"
TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "control": "always"}'

# What is asked ---------------------------------------------------------------------------------------------------

CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA, OLLAMA_TEXT = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"
)  # fmt: skip
SAY = [{"role": "user", "content": "What is phalanx?"}]
COUNT = [{"role": "user", "content": "Count from one to ten, and again."}]
ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 30}
SCHEMA = {"type": "object", "properties": {"a": ITEMS}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FUNCTION = {"name": "count", "description": "Counts.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
LONG: dict[str, Any] = {"model": "demo", "stream": True, "max_tokens": 120, "ignore_eos": True}
BRIEF: dict[str, Any] = {"model": "demo", "stream": True, "max_tokens": 120}
SHORT: dict[str, Any] = {"model": "demo", "stream": True}
Ask = tuple[str, dict[str, Any]]
ASKS: list[Ask] = [
    (CHAT, {**LONG, "messages": SAY, "temperature": 0}),
    (CHAT, {**LONG, "messages": COUNT, "temperature": 0, "stream_options": {"include_usage": True}}),
    (CHAT, {**LONG, "messages": SAY, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**LONG, "messages": COUNT, "seed": 2, "temperature": 0.7, "n": 2, "stop": ["never said", "the en"]}),
    (CHAT, {**BRIEF, "messages": SAY, "seed": 3, "response_format": FORM}),
    (CHAT, {**BRIEF, "messages": SAY, "seed": 4, "n": 2, "tools": [TOOL], "tool_choice": "required"}),
    (TEXT, {**LONG, "prompt": "phalanx is", "seed": 5, "echo": True, "stop": ["never said", "the en"]}),
    (TEXT, {**LONG, "prompt": ["one two three", "four five six"], "temperature": 0, "n": 2}),
    (RESPONSES, {**SHORT, "input": "Count to ten.", "temperature": 0, "max_output_tokens": 120}),
    (RESPONSES, {**SHORT, "input": "What is phalanx?", "seed": 6, "max_output_tokens": 120,
                 "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    (RESPONSES, {**SHORT, "input": "Count.", "seed": 7, "max_output_tokens": 120, "tool_choice": "required",
                 "tools": [{"type": "function", **FUNCTION}]}),
    (MESSAGES, {**BRIEF, "messages": SAY, "temperature": 0}),
    (MESSAGES, {**BRIEF, "messages": COUNT, "temperature": 0, "stop_sequences": ["the en"]}),
    (MESSAGES, {**BRIEF, "messages": SAY, "temperature": 0, "tool_choice": {"type": "tool", "name": "count"},
                "tools": [{"name": "count", "description": "Counts.", "input_schema": SCHEMA}]}),
    (OLLAMA, {**SHORT, "messages": SAY, "options": {"seed": 8, "num_predict": 120}}),
    (OLLAMA, {**SHORT, "messages": SAY, "format": SCHEMA, "options": {"seed": 9, "num_predict": 120}}),
    (OLLAMA_TEXT, {**SHORT, "prompt": "What is phalanx?", "options": {"temperature": 0, "num_predict": 120}}),
]  # fmt: skip


def without_comments(data: str) -> str:
    """The events of a stream. A gateway keeps clients waiting with comments, in every dialect."""
    return re.sub(r"^:.*\n\n", "", data, flags=re.MULTILINE)


def said_in_chunks(data: str) -> Any:
    """Texts, calls, scored tokens and the ending of each choice."""
    *chunks, done = sse(data)
    assert done == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = choices.setdefault(choice["index"], {"text": "", "calls": {}, "scored": [], "reason": None})
        assert one["reason"] is None, "a chunk after the end of its choice"
        delta = choice.get("delta", {})
        one["text"] += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            name, arguments = one["calls"].get(call["index"], ("", ""))
            said = call["function"]
            one["calls"][call["index"]] = (name + said.get("name", ""), arguments + said.get("arguments", ""))
        scored = (choice.get("logprobs") or {}).get("content") or ()
        one["scored"] += [token["token"] for token in scored]
        one["reason"] = choice["finish_reason"]
    usage = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    return choices, usage


def said_in_items(data: str) -> Any:
    response = check_stream(data).finish()
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")}
             for item in response["output"]]  # fmt: skip
    return items, response["status"], response["usage"]["output_tokens"]


def said_in_blocks(data: str) -> Any:
    read = read_message(data)
    assert read.message is not None and read.error is None, read.error
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in read.message["content"]]
    return blocks, read.message["stop_reason"], read.message["usage"]["output_tokens"]


def said_in_lines(data: str, *, chat: bool) -> Any:
    answer = read_lines(data, chat=chat)
    assert answer.error is None, answer.error
    return answer.text, answer.last["done_reason"], answer.last["eval_count"]


READERS: dict[str, Callable[[str], Any]] = {
    CHAT: said_in_chunks,
    TEXT: said_in_chunks,
    RESPONSES: said_in_items,
    MESSAGES: said_in_blocks,
    OLLAMA: lambda data: said_in_lines(data, chat=True),
    OLLAMA_TEXT: lambda data: said_in_lines(data, chat=False),
}
"""Path -> what a whole stream says, without what differs between equal answers. Each checks the stream's grammar."""

# Who asks, and who is killed ---------------------------------------------------------------------------------------


@dataclass
class Replica:
    """A server of two ranks at a port of its own, started again whenever it is gone."""

    port: int
    template: Path
    process: Process = field(init=False)

    def start(self) -> None:
        """As a supervisor does: again and again, until it serves."""
        for attempt in range(5):
            try:
                self.process = self._begin()
                return
            except AssertionError as error:  # it ended without a line; its log is the error
                print(f"{self.url} did not start, attempt {attempt}: {str(error)[-2000:]}", flush=True)
        raise AssertionError(f"{self.url} does not start")

    def _begin(self) -> Process:
        return Process(
            "-m", "phalanx", "serve", "demo", "--port", str(self.port), "--tp", "2", "--backend", "mpi",
            "--max-num-seqs", ROWS, "--kv-cache-gb", "0.1", "--prefix-cache-gb", "0.05", "--admin-key", KEY,
            "--tool-call-parser", "hermes", "--chat-template", str(self.template), "--speculative-config", DRAFTS,
        )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rank(self, number: int) -> psutil.Process:
        return psutil.Process(httpx.get(f"{self.url}/health", timeout=60).json()["ranks"][number]["pid"])

    def tree(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.process.pid)
        return [server, *server.children(recursive=True)]

    def end(self) -> None:
        """End every process of it, whatever state they are in."""
        with suppress(psutil.NoSuchProcess):
            for process in self.tree():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.process.wait(60)


def kill_rank(replica: Replica) -> None:
    replica.rank(1).kill()


def kill_leader(replica: Replica) -> None:
    replica.rank(0).kill()


def stop_rank(replica: Replica) -> None:
    replica.rank(1).suspend()


def kill_server(replica: Replica) -> None:
    replica.process.signal(signal.SIGKILL)


def stop_server(replica: Replica) -> None:
    replica.process.signal(signal.SIGSTOP)


DEATHS = (stop_server, kill_rank, kill_server, kill_leader, Replica.end, stop_rank)
LOSES_SERVER = (kill_server, Replica.end, stop_server)


@dataclass
class Storm:
    """The streams and what became of them."""

    url: str
    replicas: list[Replica]
    expected: list[Any] = field(default_factory=list)
    ended: int = 0
    deaths: int = 0
    over: bool = False
    gaps: list[tuple[float, str]] = field(default_factory=list)
    """Of each stream: its longest time without an event in seconds, and the last death before the end of it."""
    death: str = "none"
    faults: list[str] = field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient, i: int) -> str:
        path, body = ASKS[i % len(ASKS)]
        pieces, last, longest = [], 0.0, (0.0, "none")
        async with client.stream("POST", self.url + path, json=body) as response:
            async for piece in response.aiter_text():
                now = time.monotonic()
                if "{" in piece:  # not only a sign of life
                    longest = max(longest, (now - last, self.death)) if last else longest
                    last = now
                pieces.append(piece)
        self.gaps.append(longest)
        assert response.status_code == 200, "".join(pieces)
        return "".join(pieces)

    async def worker(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for i in numbers:
            data = ""
            try:
                data = await self.ask(client, i)
                if READERS[ASKS[i % len(ASKS)][0]](without_comments(data)) != self.expected[i % len(ASKS)]:
                    self.faults.append(f"stream {i} says something else: {ASKS[i % len(ASKS)]}\n{data}")
            except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
                self.faults.append(f"stream {i} of {ASKS[i % len(ASKS)]}: {error!r}\n{data}")
            self.ended += 1

    def numbers(self, give_up_at: float) -> Iterator[int]:
        for i in range(STREAMS):
            if time.monotonic() > give_up_at:
                return
            yield i

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not self.over and not await asyncio.to_thread(is_so):
            await asyncio.sleep(0.1)

    def are_up(self) -> bool:
        return set(states(self.url).values()) == {"ok"}

    async def disturb(self) -> None:
        """One death after another, each with every replica up before it."""
        choose = random.Random(45)
        while not self.over:
            death, replica = DEATHS[self.deaths % len(DEATHS)], self.replicas[self.deaths // 2 % 2]
            before, self.death = self.ended, death.__name__
            await asyncio.to_thread(death, replica)
            self.deaths += 1
            print(f"{time.strftime('%X')} {self.ended} streams, {len(self.faults)} lost: {death.__name__}", flush=True)
            await self.until(lambda: not self.are_up())
            if death in LOSES_SERVER:
                await asyncio.to_thread(replica.end)
                await asyncio.to_thread(replica.start)
            await self.until(self.are_up)
            await self.until(lambda before=before: self.ended - before >= BETWEEN)  # type: ignore[misc]
            await asyncio.sleep(choose.random())

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            for i, (path, _) in enumerate(ASKS):
                self.expected.append(READERS[path](await self.ask(client, i)))
            self.gaps.clear()
            numbers = self.numbers(time.monotonic() + SECONDS)
            disturbing = asyncio.create_task(self.disturb())
            await asyncio.gather(*(self.worker(client, numbers) for _ in range(CONCURRENCY)))
            self.over = True
            await disturbing  # fails if a replica could not be started again

    def gaps_after(self, death: str | None) -> str:
        """One line on the longest gap of each stream in which this death was the last; None: of all streams."""
        gaps = sorted(gap for gap, cause in self.gaps if death in (None, cause))
        if not gaps:
            return f"    {death}: none"
        p50, p99, longest = percentile(gaps, 50), percentile(gaps, 99), gaps[-1]
        return f"    {death or 'all'}: {len(gaps)}, median {p50:.2f} s, p99 {p99:.2f} s, longest {longest:.2f} s"

    def report(self) -> str:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        moved = [line for line in text.splitlines() if "migrations_total" in line or "stream_gap_seconds_sum" in line]
        return "\n".join([
            f"{self.ended} streams, {self.deaths} deaths, {len(self.faults)} lost or changed; longest gap of a stream:",
            *map(self.gaps_after, [None, *(death.__name__ for death in DEATHS)]),
            *(line for line in moved if not line.startswith("#")),
        ])  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.soak  # deaths of every kind, again and again; `test_gateway_kills.py` has one of each server
def test_a_thousand_streams_outlive_every_death_of_two_replicas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    with ExitStack() as stack, capfd.disabled():
        replicas = [Replica(free_port(), template) for _ in range(2)]
        for replica in replicas:
            replica.start()
            stack.callback(replica.end)
        flags = ("--worker-urls", ",".join(replica.url for replica in replicas), "--worker-admin-key", KEY)
        process, url = stack.enter_context(gateway(*flags, *SUSPICIOUS, "--cb-failure-threshold", "1000"))
        storm = Storm(url, replicas)
        asyncio.run(until_up_and_run(storm))
        print(storm.report(), flush=True)
        (tmp_path / "faults").write_text("\n\n".join(storm.faults) + process.log)
        assert not storm.faults, f"{storm.faults[0][:3000]}\nall {len(storm.faults)} are in {tmp_path / 'faults'}"
        assert storm.deaths and storm.ended == len(storm.gaps) and (storm.ended == STREAMS or math.inf > SECONDS)


async def until_up_and_run(storm: Storm) -> None:
    await storm.until(storm.are_up)
    await storm.run()
