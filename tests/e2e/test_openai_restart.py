"""The engine process is killed while it streams: the clients see a pause and the same tokens, no error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from support.messages_events import read_message
from support.ollama_lines import read_lines
from support.responses_events import check_stream, text_of
from support.serving import MODEL, Running, sse

MESSAGES = [{"role": "user", "content": "tell me more"}]
TOKENS = 200
ATTEMPTS = 20  # where the machine is busy, an engine may be ahead of its readers


def said_in_chunks(stream: str) -> Any:
    texts = {0: "", 1: ""}
    *chunks, done = sse(stream)
    assert done == "[DONE]"
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


def said_in_blocks(stream: str) -> Any:
    message = read_message(stream).message
    assert message is not None
    return message["content"], message["stop_reason"], message["usage"]["output_tokens"]


def said_in_items(stream: str) -> Any:
    response = check_stream(stream).finish()
    items = [(item["type"], text_of(item)) for item in response["output"]]
    return items, response["status"], response["usage"]["output_tokens"]


def said_in_lines(stream: str) -> Any:
    answer = read_lines(stream)
    assert answer.error is None
    return answer.text, answer.last["done_reason"], answer.last["eval_count"]


DRAWN = {"temperature": 1.0, "seed": 9, "n": 2, "max_tokens": TOKENS, "ignore_eos": True}
DIALECTS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, **DRAWN}, said_in_chunks),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}, said_in_blocks),
    "/v1/responses": ({"input": "tell me more", "max_output_tokens": TOKENS, "temperature": 0}, said_in_items),
    "/api/chat": ({"messages": MESSAGES, "options": {"num_predict": TOKENS, "temperature": 0}}, said_in_lines),
}
"""Path -> a request of this dialect, and what a whole stream of it says. The reader checks the stream's grammar."""


class Stream(threading.Thread):
    """A stream in one dialect."""

    def __init__(self, server: Running, path: str) -> None:
        super().__init__()
        self._url = f"{server.origin}{path}"
        self.body = {"model": MODEL, "stream": True, **DIALECTS[path][0]}
        self.text = ""

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self.body, timeout=240) as response:
            for piece in response.iter_text():
                self.text += piece


def streams(server: Running, while_they_run: Callable[[list[Stream]], None] = lambda _: None) -> dict[str, str]:
    """By path, what a stream of each dialect sends; all at once."""
    started = {path: Stream(server, path) for path in DIALECTS}
    for one in started.values():
        one.start()
    while_they_run([*started.values()])
    for one in started.values():
        one.join(240)
    return {path: one.text for path, one in started.items()}


def test_killed_mid_stream(frail_server: Running):
    undisturbed = streams(frail_server)
    cut: list[int] = []  # bytes that each had got

    def kill(running: list[Stream]) -> None:
        while any(len(one.text) < 1000 for one in running):
            time.sleep(0.001)
        pid = frail_server.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        cut[:] = [len(one.text) for one in running]

    for _ in range(ATTEMPTS):
        before = frail_server.engine.state.restarts
        disturbed = streams(frail_server, kill)
        for path, (_, said) in DIALECTS.items():
            assert said(disturbed[path]) == said(undisturbed[path]), path
        url = f"{frail_server.origin}/health"
        while (health := httpx.get(url, timeout=60)).status_code != 200:
            time.sleep(0.05)
        assert health.json()["restarts"] == before + 1
        if all(n < 0.9 * len(text) for n, text in zip(cut, undisturbed.values(), strict=True)):
            return
    pytest.fail("the engine was never killed in the midst of all streams")


def test_a_request_that_ends_every_engine_is_quarantined(frail_server: Running, monkeypatch: pytest.MonkeyPatch):
    """`unit/server/test_journal.py` has how many crashes it takes; here it is one as any other, and one alone."""
    monkeypatch.setattr("phalanx.server.sequences.journal.CRASHES", 1)
    monkeypatch.setattr("phalanx.server.sequences.journal.TRIAL_TOKENS", 1 << 20)
    client = openai.OpenAI(base_url=frail_server.base_url, api_key="none", max_retries=0, timeout=240)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}

    def refused() -> str:
        """Kill every engine that sends something; the error that ends the stream, or "" where it was faster."""
        pids = []
        try:
            for chunk in client.chat.completions.create(**asked, max_tokens=1000, stream=True):
                pid = frail_server.engine.pid
                if chunk.choices[0].delta.content and pid is not None and pid not in pids:
                    pids.append(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        except openai.APIError as error:
            assert len(pids) == 2
            return error.message
        return ""

    said = next(filter(None, (refused() for _ in range(ATTEMPTS))), "")
    assert "alone in 1 engine crashes" in said
    while httpx.get(f"{frail_server.origin}/health", timeout=60).status_code != 200:
        time.sleep(0.05)
    assert client.chat.completions.create(**asked, max_tokens=5).usage.completion_tokens == 5
