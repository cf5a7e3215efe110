"""Names of models and lists of models, as clients of several APIs ask for them."""

from __future__ import annotations

import json

import msgspec
import pytest

from phalanx.http.model_lists import lm_studio_list, model_card, model_list, name_meant

CARD = {"id": "demo", "object": "model", "created": 1_764_287_647, "owned_by": "phalanx", "max_model_len": 512}
CARD["tool_call_parser"] = "hermes"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
MISTRAL = {"user-agent": "mistral-client-python/3.7.0"}


@pytest.mark.parametrize(
    ("asked", "names", "meant"),
    [
        ("demo", ("demo",), "demo"),
        ("demo:latest", ("demo",), "demo"),
        ("Demo", ("demo",), "demo"),
        ("DEMO:LATEST", ("demo",), "demo"),
        ("demo", ("Org/Demo", "Demo:latest"), "Demo:latest"),
        ("demo", ("DEMO", "Demo", "demo"), "demo"),
        ("demo:latest", ("Demo", "demo"), "demo"),
        ("demo:latest", ("demo", "demo:latest"), "demo:latest"),
        ("dEmo", ("DEMO", "Demo"), "DEMO"),
        ("demo:7b", ("demo",), None),
        ("latest", ("demo:latest",), None),
        ("demo", (), None),
    ],
)
def test_the_name_that_is_meant(asked, names, meant):
    assert name_meant(asked, names) == meant


def test_openais_list_has_no_field_of_others():
    assert model_list([CARD], {"user-agent": "OpenAI/Python 2.54.0"}, {}) == {"object": "list", "data": [CARD]}


def test_anthropics_client_finds_its_fields():
    found = json.loads(msgspec.json.encode(model_list([CARD, {**CARD, "id": "b"}], ANTHROPIC, {})))
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "demo", "b")
    more = {"type": "model", "display_name": "demo", "created_at": "2025-11-27T23:54:07Z"}
    assert found["data"][0] == {**CARD, **more}
    assert model_list([], ANTHROPIC, {}) == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None
    }  # fmt: skip


@pytest.mark.parametrize("created", [None, "yesterday", -1, 1 << 70, 1e300, [], True])
def test_a_time_that_is_none_is_the_first_one(created):
    """Cards come from replicas of any program."""
    card = model_card({**CARD, "created": created}, ANTHROPIC)
    assert json.loads(msgspec.json.encode(card))["created_at"].startswith("1970-01-01T00:00:0")


def test_mistrals_client_finds_its_fields():
    """Its reader takes a card for a model by `type`, and wants capabilities."""
    (found,) = model_list([CARD], MISTRAL, {})["data"]
    assert (found["type"], found["max_context_length"]) == ("base", 512)
    assert found["capabilities"]["completion_chat"] and found["capabilities"]["function_calling"]
    toolless = model_card({**CARD, "tool_call_parser": None}, MISTRAL)
    assert toolless["capabilities"]["function_calling"] is False


def test_lm_studios_list():
    foreign = {"id": "x"}
    toolless = {**CARD, "tool_call_parser": None}
    assert lm_studio_list([CARD, toolless, foreign]) == {
        "object": "list",
        "data": [
            {
                "id": id,
                "object": "model",
                "type": "llm",
                "publisher": publisher,
                "compatibility_type": "mlx",
                "state": "loaded",
                "max_context_length": context,
                "loaded_context_length": context,
                "capabilities": capabilities,
            }
            for id, publisher, context, capabilities in (
                ("demo", "phalanx", 512, ["tool_use"]), ("demo", "phalanx", 512, []), ("x", "", None, ["tool_use"]),
            )
        ],
    }  # fmt: skip
