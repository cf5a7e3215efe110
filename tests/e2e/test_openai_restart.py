"""The engine process is killed while it streams: the clients see a pause and the same tokens, no error."""

from __future__ import annotations

import os
import signal
import time

import httpx
import openai
from support.serving import MODEL, Running

REQUEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "tell me more"}],
    "temperature": 1.0,
    "max_tokens": 200,
    "seed": 9,
    "extra_body": {"ignore_eos": True},
}


def test_killed_mid_stream(frail_server: Running):
    client = openai.OpenAI(base_url=frail_server.base_url, api_key="none", max_retries=0, timeout=120)
    undisturbed = client.chat.completions.create(**REQUEST, n=2)
    expected = {choice.index: choice.message.content for choice in undisturbed.choices}
    texts = {0: "", 1: ""}
    before = frail_server.engine.state.restarts
    killed = 0
    for chunk in client.chat.completions.create(**REQUEST, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if not killed and min(len(text) for text in texts.values()) > 20:
            killed = frail_server.engine.pid
            os.kill(killed, signal.SIGKILL)
    assert killed and frail_server.engine.pid not in (None, killed)
    assert texts == expected
    health = httpx.get(f"{frail_server.origin}/health")
    assert (health.status_code, health.json()["restarts"]) == (200, before + 1)


def test_killed_twice_quarantines(frail_server: Running):
    client = openai.OpenAI(base_url=frail_server.base_url, api_key="none", max_retries=0, timeout=120)
    pids = []
    try:
        for chunk in client.chat.completions.create(**REQUEST, stream=True):
            pid = frail_server.engine.pid
            if chunk.choices[0].delta.content and pid is not None and pid not in pids:
                pids.append(pid)
                os.kill(pid, signal.SIGKILL)
        raise AssertionError("the stream should have ended with an error")
    except openai.APIError as error:
        assert "2 engine crashes" in error.message
    assert len(pids) == 2
    while httpx.get(f"{frail_server.origin}/health").status_code != 200:
        time.sleep(0.05)
    assert client.chat.completions.create(**{**REQUEST, "max_tokens": 5}).usage.completion_tokens == 5
