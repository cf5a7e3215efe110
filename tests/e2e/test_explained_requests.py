"""The life of requests on a real engine: what was cached, and in which message a prompt left what was kept."""

from __future__ import annotations

import time
from typing import Any

import httpx
from support.serving import Running

LONG = "the quick brown fox says hello to the world and " * 8


def ask(client: httpx.Client, *contents: str) -> dict[str, Any]:
    """The life of a chat with these messages of the user, after its first message of the system."""
    messages = [{"role": "system", "content": LONG}, *({"role": "user", "content": text} for text in contents)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    life: dict[str, Any] = client.get(f"/v1/requests/{answer.json()['id']}").json()
    return life


def test_a_prompt_that_differs_is_told_of_with_its_message(real_server: Running) -> None:
    with httpx.Client(base_url=real_server.origin, timeout=60) as client:
        first = ask(client, LONG + "one", LONG + "two")
        second = ask(client, LONG + "one", "something else" + LONG)
        for _ in range(500):  # the message is found on a thread
            if second["prefix"]["left_at_message"] is not None:
                break
            time.sleep(0.02)
            second = client.get(f"/v1/requests/{second['id']}").json()
    assert first["prefix"]["cached_tokens"] == 0 and first["choices"][0]["chunks"] >= 1
    prefix = second["prefix"]
    assert 0 < prefix["cached_tokens"] == prefix["left_at_token"] < second["prompt_tokens"]
    assert prefix["nearest_tokens"] >= first["prompt_tokens"]
    assert prefix["left_at_message"] == {"index": 2, "role": "user"}
    assert any("in message 3 of 3 (user)" in line for line in second["story"])
    assert second["choices"][0]["steps"] == 4 and second["seconds"]["prefill"] > 0
