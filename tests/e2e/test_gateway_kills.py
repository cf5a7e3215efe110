"""Replicas as processes that are killed or stopped while streams run: those go on elsewhere, and do not show it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from processes import SUSPICIOUS, Process, are_up, gateway, process, stub, wait_until
from support.serving import sse
from support.token_replica import undisturbed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Ask = tuple[str, dict[str, Any]]


class Stream:
    """One stream, read on a thread of its own."""

    def __init__(self, url: str, ask: Ask) -> None:
        self.url, (self.path, self.body) = url, ask
        self.n_lines = 0
        self.data = b""
        self.replica = ""
        self.status = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> bytes:
        self._thread.join(120)
        assert self.status == 200 and self.ended, self.data
        return self.data

    def _read(self) -> None:
        body = json.dumps(self.body).encode()
        headers = {"Content-Type": "application/json"}
        with httpx.stream("POST", self.url + self.path, content=body, headers=headers, timeout=120) as response:
            self.status, self.replica = response.status_code, response.headers.get("x-phalanx-replica", "")
            for piece in response.iter_bytes():
                self.data += piece
                self.n_lines += piece.count(b"\n")


def continued(url: str) -> int:
    """Streams that have gone on elsewhere, as the gateway counts them."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if "gateway_stream_gap_seconds_count" in line))


def name(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/v1")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_replica_that_is_killed_or_stopped_go_on_at_another_one(how):
    with ExitStack() as stack:
        stubs = [stack.enter_context(stub("0.05", module="support.token_replica")) for _ in range(2)]
        (victim, url_a), (_, url_b) = stubs
        flags = ("--worker-urls", f"{url_a},{url_b}", "--worker-admin-key", "adm", *SUSPICIOUS)
        _, url = stack.enter_context(gateway(*flags))
        wait_until(lambda: are_up(url, 2))
        bodies = [{"model": "m", "stream": True, "tokens": 200, "i": i} for i in range(6)]
        streams = [Stream(url, ((CHAT, "/v1/responses", "/api/chat")[i % 3], body)) for i, body in enumerate(bodies)]
        wait_until(lambda: all(stream.n_lines > 3 for stream in streams))
        victim.signal(how)
        for stream in streams:
            assert stream.result() == undisturbed(stream.path, json.dumps(stream.body).encode())
        assert continued(url) == sum(stream.replica == name(url_a) for stream in streams) == 3


# Real servers ----------------------------------------------------------------------------------------------------

SAY = [{"role": "user", "content": "What is phalanx?"}]
NUMBERS = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 80}}}
SCHEMA = {**NUMBERS, "required": ["a"], "additionalProperties": False}
LONG = {"model": "demo", "stream": True, "max_tokens": 300, "ignore_eos": True}
TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}assistant: "
INNER = {"Authorization": "Bearer inner"}
BRIEF = {"model": "demo", "stream": True}
TOOL = {"name": "count", "description": "Counts.", "input_schema": SCHEMA}
ASKS: dict[str, Ask] = {
    "greedy": (CHAT, {**LONG, "messages": SAY, "temperature": 0}),
    "choices": (CHAT, {**LONG, "messages": SAY, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2}),
    "schema": (
        CHAT,
        {
            **BRIEF,
            "messages": SAY,
            "seed": 2,
            "max_tokens": 300,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    "echo and stop": (
        TEXT,
        {**LONG, "prompt": "phalanx is", "seed": 3, "echo": True, "stop": ["never said", "the en"]},
    ),
    "responses": (
        "/v1/responses",
        {
            **BRIEF,
            "input": "What is phalanx?",
            "seed": 4,
            "max_output_tokens": 300,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
    ),
    "calls": (
        "/v1/messages",
        {
            **BRIEF,
            "messages": SAY,
            "max_tokens": 300,
            "temperature": 0,
            "tools": [TOOL],
            "tool_choice": {"type": "tool", "name": "count"},
        },
    ),
    "ollama": ("/api/chat", {**BRIEF, "messages": SAY, "format": SCHEMA, "options": {"seed": 5, "num_predict": 300}}),
}


def said(path: str, data: bytes) -> list[Any]:
    """What a client makes of a stream: how texts are cut into events, and ids, differ from one answer to the next."""
    lines = [line.removeprefix(b"data: ").strip() for line in data.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith(b"{")]
    if path == "/api/chat":
        return ["".join(event["message"]["content"] for event in events), events[-1]["done"], events[-1]["done_reason"]]
    if path == "/v1/responses":
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        (item,) = events[-1]["response"]["output"]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return [text, item["content"][0]["text"], events[-1]["type"]]
    if path == "/v1/messages":
        deltas = [event.get("delta", {}) for event in events]
        return ["".join(delta.get("partial_json", "") for delta in deltas), [event["type"] for event in events[-2:]]]
    assert len({event["id"] for event in events}) == 1 and lines[-2:] == [b"[DONE]", b""]
    return [_choice(path, [one for event in events for one in event["choices"] if one["index"] == i]) for i in range(2)]


def _choice(path: str, parts: list[Any]) -> list[Any]:
    text = "".join(part["text"] if path == TEXT else part["delta"].get("content") or "" for part in parts)
    scored = [token["token"] for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
    return [text, scored, [part["finish_reason"] for part in parts if part["finish_reason"]]]


def server_of(server: Process) -> int:
    return server.process.pid


def engine_of(server: Process) -> int:
    """What computes in a server, which starts it again."""
    health = httpx.get(f"http://{name(server.first.split()[3])}/health", headers=INNER, timeout=60).json()
    (rank,) = health["ranks"]
    return int(rank["pid"])


def kill_under(pid: int, replica: str, streams: list[Stream]) -> None:
    """Kill a process as soon as a stream of its replica has begun: a fast machine soon ends them all."""
    wait_until(
        lambda: (
            any(stream.replica == replica and stream.n_lines > 3 and not stream.ended for stream in streams)
            or all(stream.ended for stream in streams)
        )
    )
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Process], str]]:
    """Two real servers, and the address of a gateway before them."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    serve = (
        "-m", "phalanx", "serve", "demo", "--port", "0", "--max-num-seqs", "8", "--admin-key", "adm",
        "--api-key", "inner", "--kv-cache-gb", "0.1", "--prefix-cache-gb", "0.05",
        "--tool-call-parser", "hermes", "--chat-template", str(template),
    )  # fmt: skip
    with ExitStack() as stack:
        servers = [stack.enter_context(process(*serve)) for _ in range(2)]
        urls = ",".join(server.first.split()[3] for server in servers)
        keys = ("--worker-key", "inner", "--worker-admin-key", "adm")
        _, url = stack.enter_context(gateway("--worker-urls", urls, *keys, "--policy", "round_robin"))
        wait_until(lambda: are_up(url, 2))
        yield servers, url


def test_two_real_servers(real):
    servers, url = real
    assert httpx.get(f"{url}/health", timeout=60).json()["requests"] == {"running": 0, "waiting": 0, "limit": 16}
    (card,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    asked = {"model": card["id"], "messages": SAY, "max_tokens": 20, "temperature": 0}
    answers, names = set(), {"streams": set(), "whole": set()}
    for _ in range(2):
        streamed = Stream(url, (CHAT, {**asked, "stream": True}))
        *events, done = sse(streamed.result().decode())
        assert done == "[DONE]"
        answers.add("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
        names["streams"].add(streamed.replica)
    for _ in range(2):
        whole = httpx.post(url + CHAT, json=asked, timeout=60)
        answers.add(whole.json()["choices"][0]["message"]["content"])
        names["whole"].add(whole.headers["x-phalanx-replica"])
    assert len(answers) == 1 and answers != {""}
    assert names["streams"] == names["whole"] == {name(server.first.split()[3]) for server in servers}
    refused = httpx.post(url + CHAT, json={**asked, "temperature": -1}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"


@pytest.mark.full
def test_the_engine_of_a_real_server_and_then_another_server_are_killed_and_no_stream_is_lost_or_changed(real):
    servers, url = real
    undisturbed = {which: said(ask[0], Stream(url, ask).result()) for which, ask in ASKS.items()}
    for victim, server in ((engine_of, servers[1]), (server_of, servers[0])):
        wait_until(lambda: are_up(url, 2))
        before, pid = continued(url), victim(server)
        streams = {which: Stream(url, ask) for which, ask in ASKS.items()}
        kill_under(pid, name(server.first.split()[3]), list(streams.values()))
        found = {which: said(stream.path, stream.result()) for which, stream in streams.items()}
        assert found == undisturbed
        assert continued(url) > before
