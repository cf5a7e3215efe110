"""litellm with the providers whose APIs this server has: a loop of tools with each, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from clients.demo_server import KEY, SERVED
from clients.scripted_server import FINAL, PLACES, THOUGHT

PROVIDERS = {  # prefix of the model's name -> whether litellm hands reasoning on
    "openai": True,
    "hosted_vllm": True,
    "anthropic": True,
    "ollama_chat": True,
    "openai/responses": False,
}


@pytest.fixture(scope="module")
def report(scripted_server, report_of) -> dict[str, Any]:
    told: dict[str, Any] = report_of("litellm", "litellm_providers.py", scripted_server.origin, KEY, SERVED)
    return told


@pytest.mark.parametrize("way", ["whole", "streamed", "whole, asynchronous", "streamed, asynchronous"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_loop_of_tools(report, provider, way):
    thought = THOUGHT if PROVIDERS[provider] else ""
    ended = {"calls": PLACES, "text": FINAL, "thought": thought, "ends": ["tool_calls", "stop"]}
    assert report[provider][way] == ended


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_refusal_has_our_message(report, provider):
    assert "top_p must be from 0 to 1, not 2.0." in report[provider]["refusal"]
