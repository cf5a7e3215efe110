"""Libraries that chat: each program in `programs/` uses one as its documentation says, and prints a report.

A report is what the client made of the server's answers: a chat, a second turn that sends the client's own form of the
first answer back, a stream, the models, a text completion, and the client's exceptions for three refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from clients.demo_server import KEY, SERVED, post

PROMPT = "Tell me a story about a lighthouse."
FOLLOW_UP = "And then?"
ASKED = {"temperature": 0, "max_tokens": 24}
REFUSALS = {
    "400": "temperature must be from 0 to 100, not -1.0.",
    "401": "Incorrect API key provided. Send it as 'Authorization: Bearer KEY'.",
    "404": "The model 'gpt-unknown' is not served here; this server has demo.",
}
FIELDS = {"400": (None, "temperature"), "401": ("invalid_api_key", None), "404": ("model_not_found", "model")}
OF_OPENAI = {"400": "BadRequestError", "401": "AuthenticationError", "404": "NotFoundError"}
OF_LANGCHAIN = {
    "400": "OpenAIInvalidRequestError",
    "401": "OpenAIAuthenticationError",
    "404": "OpenAIModelNotFoundError",
}
OF_VERCEL = dict.fromkeys(REFUSALS, "AI_APICallError")
CLIENTS = {  # environment -> program, exceptions
    "openai-python": ("openai_python.py", OF_OPENAI),
    "openai-node": ("openai_node.mjs", OF_OPENAI),
    "vercel-ai": ("vercel_ai.mjs", OF_VERCEL),
    "litellm": ("litellm_client.py", OF_OPENAI),
    "langchain": ("langchain_client.py", OF_LANGCHAIN),
}


@pytest.fixture(scope="module", params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def report(client, server, report_of) -> dict[str, Any]:
    parsed: dict[str, Any] = report_of(client, CLIENTS[client][0], server.base_url, KEY, SERVED, PROMPT)
    return parsed


@pytest.fixture(scope="module")
def answer(server) -> Callable[..., str]:
    """The text that the server gives without a client's library for this conversation."""

    def chat(*turns: str, **fields: Any) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        choice = post(server, "chat/completions", messages=messages, **{**ASKED, **fields})["choices"][0]
        return str(choice["message"]["content"])

    return chat


def test_chat(report, answer):
    text = answer(PROMPT)
    assert report["chat"] == {"text": text, "finish": "length", "tokens": ASKED["max_tokens"]}
    assert report["second"] == answer(PROMPT, text, FOLLOW_UP)


def test_stream(report, answer):
    assert report["stream"] == {"text": answer(PROMPT), "tokens": ASKED["max_tokens"]}


def test_the_clients_own_accumulator(client, report, answer):
    expected = answer(PROMPT, stop=".") if client in ("openai-python", "openai-node") else None
    assert report.get("helper") == expected


def test_models(client, report):
    assert report.get("models") == (None if client in ("vercel-ai", "langchain") else [SERVED])  # two list no models


def test_completion(client, report, server):
    # Vercel's client writes "user:" before the prompt, "assistant:" after it, and stops at the next "user:".
    prompt = f"user:\n{PROMPT}\n\nassistant:\n" if client == "vercel-ai" else PROMPT
    expected = post(server, "completions", prompt=prompt, stop=["\nuser:"], **ASKED)["choices"][0]["text"]
    assert report["completion"] == expected


@pytest.mark.parametrize("status", REFUSALS)
def test_refusals_are_the_clients_own_exceptions_with_our_message(client, report, status):
    error = report["errors"][status]
    assert (error["kind"], error["status"]) == (CLIENTS[client][1][status], int(status))
    assert REFUSALS[status] in error["message"]
    if client != "litellm":  # it passes no code on
        assert (error["code"], error["param"]) == FIELDS[status]
