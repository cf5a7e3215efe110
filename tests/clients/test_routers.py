"""Routers before two servers: SMG, vLLM's, LiteLLM's proxy, nginx. All but nginx write each request anew."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from clients.demo_server import KEY, SERVED, demo_server, post

from benchmarks.routers import PROGRAMS, Target, program, running

PROMPT = "Tell me a story about a lighthouse."
ASKED = {"model": SERVED, "temperature": 0, "max_tokens": 24}
CHAT = {**ASKED, "messages": [{"role": "user", "content": PROMPT}]}


@pytest.fixture(scope="module")
def origins(server) -> Iterator[tuple[str, str]]:
    """Two servers of the same model."""
    with demo_server() as other:
        yield server.origin, other.origin


@pytest.fixture(scope="module", params=PROGRAMS)
def client(request, client_folder, origins, tmp_path_factory) -> Iterator[openai.OpenAI]:
    """openai-python on a router before both."""
    folder = client_folder(request.param)
    path = program(request.param, folder.parent)
    assert path is not None
    target = Target(replicas=origins, model=SERVED, key=KEY)
    with running(request.param, path, target, tmp_path_factory.mktemp("router")) as router:
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0) as client:
            yield client


def test_chat(client, server):
    direct = post(server, "chat/completions", **CHAT)["choices"][0]["message"]["content"]
    assert client.chat.completions.create(**CHAT).choices[0].message.content == direct
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == direct
    assert chunks[-1].usage.completion_tokens == ASKED["max_tokens"]


def test_streams_side_by_side(client, server):
    """More than one server has rows for, and each whole."""
    asked = [{**ASKED, "messages": [{"role": "user", "content": f"Count to {n}."}]} for n in range(12)]
    direct = [post(server, "chat/completions", **one)["choices"][0]["message"]["content"] for one in asked]

    def text(one: dict[str, Any]) -> str:
        stream = client.chat.completions.create(**one, stream=True)
        return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)

    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(text, asked)) == direct


def test_completion(client, server):
    direct = post(server, "completions", prompt=PROMPT, **ASKED)["choices"][0]["text"]
    assert client.completions.create(prompt=PROMPT, **ASKED).choices[0].text == direct


def test_a_refusal(client):
    with pytest.raises(openai.BadRequestError, match="logit_bias has the token id 99999999"):
        client.chat.completions.create(**CHAT, logit_bias={"99999999": 1})
