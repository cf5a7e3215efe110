"""The anthropic package, as its documentation uses it, against a model that says given texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from clients.environments import PROGRAMS
from msgspec.structs import replace
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CONFIG, running_server

KEY, SERVED = "secret", "claude-scripted"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LOOP = {
    "blocks": ["thinking", "tool_use"],
    "thinking": "Let me ask.",
    "input": {"city": "Oslo"},
    "reasons": ["tool_use", "end_turn"],
    "text": "It rains.",
}


def say(prompt: str) -> str:
    """A call after a question, a text after its result, and another one where there are no tools."""
    if "<tools>" not in prompt:
        return "Rain and wind and cold.<|im_end|>"
    return "<think>\nLet me ask.\n</think>\n\n" + ("It rains." if "rain and wind" in prompt else CALL) + "<|im_end|>"


@pytest.fixture(scope="module")
def report(run, tmp_path_factory) -> Iterator[dict[str, Any]]:
    tokenizer = tokenizer_of("hermes", tmp_path_factory.mktemp("tokenizer"))
    config = replace(CONFIG, api_key=(KEY,), served_model_name=(SERVED,))
    with running_server(tokenizer, ScriptedEngine(tokenizer, say), config) as running:
        program = str(PROGRAMS / "anthropic_client.py")
        ended = run("anthropic", "python", program, running.origin, KEY, SERVED)
        assert ended.returncode == 0, ended.stderr
        yield json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("form", ["whole", "streamed"])
def test_a_loop_of_calls(report, form):
    loop = report[form]
    assert loop.items() >= LOOP.items()
    assert loop["counted"] == loop["prompt"]
    assert loop["cached"] >= loop["first"] - 1, "the answer comes back as it was computed"


def test_a_text_that_a_stop_sequence_ends(report):
    assert (report["text"], report["stop"]) == ("Rain and ", ["stop_sequence", "wind"])


def test_models(report):
    assert report["models"] == [[SERVED, "model", SERVED]]


@pytest.mark.parametrize(
    ("status", "kind", "type", "said"),
    [
        ("400", "BadRequestError", "invalid_request_error", "messages[0].content[0].type is not supported"),
        ("401", "AuthenticationError", "authentication_error", "Incorrect API key"),
        ("404", "NotFoundError", "not_found_error", f"this server has {SERVED}"),
    ],
)
def test_refusals_are_the_clients_own_exceptions_with_our_message(report, status, kind, type, said):
    error = report["errors"][status]
    assert (error["kind"], error["type"]) == (kind, type)
    assert said in error["message"]
