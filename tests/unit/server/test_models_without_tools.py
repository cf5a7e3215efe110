"""A model that cannot call tools says so everywhere; requests that offer it some are refused, or answered without."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from msgspec.structs import replace
from support.histories import ANTHROPIC_TOOL, BLOCKS, CALL, FLAT, HISTORY, OLLAMA_HISTORY, TOOL, USER
from support.serving import CONFIG, fake_engine, running_server, serving

from phalanx.demo import MODEL_DIR
from phalanx.supervision.fake_engine import replying
from phalanx.text.tokenizer import Tokenizer

DROPS = replace(CONFIG, tools="drop")
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
PLAIN = {
    CHAT: {"messages": [USER], "max_tokens": 3},
    MESSAGES: {"model": "tiny", "messages": [USER], "max_tokens": 3},
    RESPONSES: {"input": [USER], "max_output_tokens": 3},
    OLLAMA: {"model": "tiny", "messages": [USER], "stream": False, "options": {"num_predict": 3}},
}
"""Path -> a question without tools."""
TOOLS = {CHAT: [TOOL], MESSAGES: [ANTHROPIC_TOOL], RESPONSES: [FLAT], OLLAMA: [TOOL]}
NAME = TOOL["function"]["name"]
REQUIRED = [
    (CHAT, "required"),
    (CHAT, {"type": "function", "function": {"name": NAME}}),
    (MESSAGES, {"type": "any"}),
    (MESSAGES, {"type": "tool", "name": NAME}),
    (RESPONSES, "required"),
    (RESPONSES, {"type": "function", "name": NAME}),
    (RESPONSES, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": NAME}]}),
]
CALLED = {
    CHAT: {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"},
        ]
    },
    MESSAGES: {"messages": [USER, *BLOCKS]},
    RESPONSES: {"input": [USER, *HISTORY]},
    OLLAMA: {"messages": [USER, *OLLAMA_HISTORY]},
}
"""Path -> a conversation in which a tool was called."""


def offering(path, **fields):
    return {**PLAIN[path], "tools": TOOLS[path], **fields}


def run(tokenizer, scenario, config=CONFIG):
    async def main():
        engine = fake_engine(tokenizer, replying([5, 6, 7, *tokenizer.eos_ids]))
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            await scenario(client, engine)

    asyncio.run(main())


def message_of(response):
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


def read_prompts(engine):
    return [message.request.prompt for message in engine.received if hasattr(message, "request")]


# One rule ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shows", "parser", "said"),
    [
        (True, None, "tool calls: hermes, reasoning: think"),
        (True, "none", "tool calls: not recognised, reasoning: think"),
        (False, None, "tool calls: none, reasoning: none"),
        (False, "hermes", "tool calls: none, reasoning: none"),
    ],
)
def test_a_model_has_tools_if_its_template_shows_them_and_their_format_is_known(
    tokenizer, hermes, caplog, shows, parser, said
):
    caplog.set_level("INFO")
    tokens, has_tools = hermes if shows else tokenizer, shows and parser is None
    engine = fake_engine(tokens, replying([5, 6, 7, *tokens.eos_ids]))
    with (
        running_server(tokens, engine, replace(CONFIG, tool_call_parser=parser)) as running,
        httpx.Client(base_url=running.origin, timeout=60) as client,
    ):
        (card,) = client.get("/v1/models").json()["data"]
        assert card["tool_call_parser"] == ("hermes" if has_tools else None)
        assert client.get("/v1/models/tiny").json() == card
        abilities = client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
        assert ("tools" in abilities) == has_tools
        for path in PLAIN:
            assert client.post(path, json=offering(path)).status_code == (200 if has_tools else 400)
        counted = client.post("/tokenize", json={"messages": [USER], "tools": [TOOL]})
        assert counted.status_code == (200 if has_tools else 400)
    assert said in caplog.messages


# Refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
def test_the_error_says_what_the_model_cannot_and_what_to_do(tokenizer, path):
    async def scenario(client, engine):
        response = await client.post(path, json=offering(path))
        assert response.status_code == 400
        assert message_of(response) == (
            "The model 'tiny' cannot call tools: its chat template does not show them to it. Send no tools, serve a "
            "model that has tools, or start the server with --tools drop, which leaves optional tools out."
        )
        assert not engine.received

    run(tokenizer, scenario)


def test_the_error_names_the_flag_of_formats_only_where_it_would_help(hermes):
    async def scenario(client, engine):
        said = message_of(await client.post(CHAT, json=offering(CHAT)))
        assert "the format in which it writes calls is not known" in said and "--tool-call-parser" in said

    run(hermes, scenario, replace(CONFIG, tool_call_parser="none"))


@pytest.mark.parametrize("config", [CONFIG, DROPS], ids=["refuse", "drop"])
@pytest.mark.parametrize(("path", "choice"), REQUIRED)
def test_a_call_that_is_required_is_refused(tokenizer, path, choice, config):
    async def scenario(client, engine):
        response = await client.post(path, json=offering(path, tool_choice=choice))
        assert response.status_code == 400 and not engine.received
        said = message_of(response)
        assert "cannot call tools" in said and "Require no call" in said and "--tools" not in said
        assert ("send no tools" in said) == (config is CONFIG)  # else the next answer would be that error

    run(tokenizer, scenario, config)


@pytest.mark.parametrize("config", [CONFIG, DROPS], ids=["refuse", "drop"])
@pytest.mark.parametrize("path", CALLED)
def test_calls_of_the_history_that_the_template_leaves_out_are_refused(tokenizer, path, config):
    async def scenario(client, engine):
        response = await client.post(path, json={**PLAIN[path], **CALLED[path]})
        assert response.status_code == 400 and not engine.received
        said = message_of(response)
        assert "leaves out those of " in said and "Begin a conversation without them" in said

    run(tokenizer, scenario, config)


# Left out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
def test_optional_tools_are_left_out(tokenizer, path):
    async def scenario(client, engine):
        for body in (PLAIN[path], offering(path)):
            assert (await client.post(path, json=body)).raise_for_status()
        without, offered = read_prompts(engine)
        assert offered == without

    run(tokenizer, scenario, DROPS)


def test_counts_are_those_of_the_prompts_without_tools(tokenizer):
    async def scenario(client, engine):
        for path, body in (
            ("/tokenize", {"messages": [USER]}),
            (f"{MESSAGES}/count_tokens", {"model": "tiny", "messages": [USER]}),
            (f"{RESPONSES}/input_tokens", {"input": [USER]}),
        ):
            without = (await client.post(path, json=body)).raise_for_status().json()
            tools = TOOLS.get(path.rpartition("/")[0], [TOOL])
            assert (await client.post(path, json={**body, "tools": tools})).raise_for_status().json() == without

    run(tokenizer, scenario, DROPS)


def test_a_model_that_has_tools_gets_them_all_the_same(hermes):
    async def scenario(client, engine):
        assert (await client.post(CHAT, json=offering(CHAT))).raise_for_status()
        (prompt,) = read_prompts(engine)
        assert NAME in hermes.decode(prompt)

    run(hermes, scenario, DROPS)


def test_that_tools_are_left_out_is_logged_once(tokenizer, caplog):
    async def scenario(client, engine):
        for path in PLAIN:
            assert (await client.post(path, json=offering(path))).raise_for_status()

    with caplog.at_level(logging.INFO, logger="phalanx"):
        run(tokenizer, scenario, DROPS)
    lines = [record.getMessage() for record in caplog.records if "cannot call tools" in record.getMessage()]
    assert lines == ["tiny cannot call tools: those of requests are left out (--tools refuse: 400)"]


# Open WebUI ----------------------------------------------------------------------------------------------------------

OPEN_WEBUI_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"built_in_{i}",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"count": {"default": 10, "description": "How many.", "type": "integer"}},
            },
        },
    }
    for i in range(36)
]
"""As many as its first message has, and in their form."""


@pytest.mark.parametrize(
    ("tools", "status"), [(None, 200), ("drop", 200), ("refuse", 400)], ids=["default", "drop", "refuse"]
)
@pytest.mark.parametrize("path", [CHAT, OLLAMA])
def test_open_webui_chats_with_the_bundled_model(path, tools, status):
    demo = Tokenizer.load(MODEL_DIR)
    config = replace(CONFIG, tools=tools, engine=replace(CONFIG.engine, model="demo"), served_model_name=("demo",))
    body = {"stream": True, "model": "demo", "messages": [USER], "tools": OPEN_WEBUI_TOOLS}

    async def scenario(client, engine):
        response = await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        if status == 200:
            assert response.text.rstrip().endswith("[DONE]") or json.loads(response.text.splitlines()[-1])["done"]
            assert "built_in" not in demo.decode(read_prompts(engine)[0])

    run(demo, scenario, config)
