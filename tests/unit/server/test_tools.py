"""Tools, calls and reasoning on a model that says given texts: what is sent back, and what is refused."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from msgspec.structs import replace
from support.conversations import BODIES, prompts
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CHAT, CONFIG, fake_engine, serving, sse

from phalanx.text.grammar import GrammarCompiler

URL = "/v1/chat/completions"
FUNCTION = {"name": "get-weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]
ASK = {"role": "user", "content": "How is the weather?"}
CALL = '<tool_call>\n{"name": "get-weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
END = "<|im_end|>"


def run(tokenizer, scenario, *answers, config=CONFIG):
    async def main():
        engine = ScriptedEngine(tokenizer, answers)
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            await scenario(client, engine)

    asyncio.run(main())


def body(**fields):
    return {"messages": [ASK], "tools": TOOLS, **fields}


async def message_of(client, **fields):
    answer = (await client.post(URL, json=body(**fields))).raise_for_status().json()
    return answer["choices"][0]


# What is sent back -------------------------------------------------------------------------------------------------


def test_a_call_beside_text_and_reasoning(hermes):
    async def scenario(client, engine):
        choice = await message_of(client)
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"].strip() == "I ask both."
        assert message["reasoning_content"] == message["reasoning"] == "Hm."
        assert [call["function"] for call in message["tool_calls"]] == [
            {"name": "get-weather", "arguments": '{"city": "Oslo"}'},
            {"name": "now", "arguments": "{}"},
        ]
        ids = {call["id"] for call in message["tool_calls"]}
        assert len(ids) == 2 and all(len(id) == 9 and id.isalnum() for id in ids)
        assert {call["type"] for call in message["tool_calls"]} == {"function"}
        (prompt,) = prompts(engine)
        assert json.dumps(TOOLS[0]) in prompt

    run(hermes, scenario, f"<think>Hm.</think>I ask both.{CALL}\n{NOW}{END}")


def test_a_stream_has_names_first_then_arguments_and_never_markup(hermes):
    async def scenario(client, engine):
        *chunks, done = sse((await client.post(URL, json=body(stream=True))).raise_for_status().text)
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        begun = [part for part in parts if "id" in part]
        assert [(part["index"], part["type"], part["function"]["name"]) for part in begun] == [
            (0, "function", "get-weather"),
            (1, "function", "now"),
        ]
        for index, arguments in ((0, '{"city": "Oslo"}'), (1, "{}")):
            mine = [part for part in parts if part["index"] == index]
            assert mine[0] in begun and not any("id" in part or "name" in part["function"] for part in mine[1:])
            assert "".join(part["function"]["arguments"] for part in mine) == arguments
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        text = "".join(delta.get("content", "") for delta in deltas)
        assert text.strip() == "Before. After." or text.split() == ["Before.", "After."]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"

    run(hermes, scenario, f"<think>Hm.</think>Before. {CALL}\n{NOW} After.{END}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ('<tool_call>\n{"name": "get-weather", "arguments": {"city": "Os', "not whole"),
        ('<tool_call>\n{"name": "get-weather", "arguments": {"city": Oslo}}\n</tool_call>', ""),
        ('<tool_call>\n{"name": "wind", "arguments": {}}\n</tool_call>', "wind"),
    ],
    ids=["not closed", "not JSON", "no such tool"],
)
def test_what_is_no_call_is_text(hermes, said, hint, stream):
    async def scenario(client, engine):
        response = (await client.post(URL, json=body(stream=stream))).raise_for_status()
        if stream:
            choices = [chunk["choices"][0] for chunk in sse(response.text)[:-1]]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            last = choices[-1]
        else:
            (last,) = response.json()["choices"]
            text = last["message"]["content"]
            assert "tool_calls" not in last["message"]
        assert last["finish_reason"] == "stop"
        assert hint in last["finish_detail"]
        assert "Os" in text or "wind" in text

    run(hermes, scenario, said + END)


def test_calls_cut_by_the_length_end_with_length(hermes):
    async def scenario(client, engine):
        choice = await message_of(client, max_tokens=12)
        assert choice["finish_reason"] == "length" and choice["finish_detail"]
        assert "tool_calls" not in choice["message"]

    run(hermes, scenario, CALL + END)


def test_one_call_ends_an_answer_without_parallel_calls(hermes):
    async def scenario(client, engine):
        choice = await message_of(client, parallel_tool_calls=False)
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get-weather"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        assert any(type(message).__name__ == "Finish" for message in engine.received)

    run(hermes, scenario, f"{CALL}\n{NOW} and more{END}")


@pytest.mark.parametrize("thinks", [True, False, None])
def test_reasoning_is_split_and_counted(hermes, thinks):
    said = {True: "<think>One two.</think>Three.", False: "Three.", None: "<think>never closed"}[thinks]

    async def scenario(client, engine):
        answer = (await client.post(URL, json={"messages": [ASK]})).raise_for_status().json()
        message = answer["choices"][0]["message"]
        count = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert message["content"] == ("" if thinks is None else "Three.")
        assert message.get("reasoning_content") == {True: "One two.", False: None, None: "never closed"}[thinks]
        n_reasoning = len(hermes.encode(said.split("</think>")[0], add_special_tokens=False))
        assert abs(count - (0 if thinks is False else n_reasoning)) <= 1

    run(hermes, scenario, said + END)


def test_log_probabilities_are_those_of_all_tokens(hermes):
    said = f"<think>Hm.</think>Yes. {CALL}{END}"

    async def scenario(client, engine):
        whole = (await message_of(client, logprobs=True))["logprobs"]["content"]
        chunks = sse((await client.post(URL, json=body(logprobs=True, stream=True))).text)[:-1]
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for found in streamed if found for entry in found["content"]] == whole
        assert "".join(bytes(entry["bytes"]).decode() for entry in whole) == said

    run(hermes, scenario, said, said)


def test_without_tools_calls_are_text(hermes):
    async def scenario(client, engine):
        for fields in ({"tools": None}, {"tool_choice": "none"}):
            choice = await message_of(client, **fields)
            assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert all("get-weather" not in prompt for prompt in prompts(engine))

    run(hermes, scenario, CALL + END, CALL + END)


def test_without_tools_special_marks_of_calls_are_hidden_as_before(tmp_path):
    lfm2 = tokenizer_of("lfm2", tmp_path)

    async def scenario(client, engine):
        choice = await message_of(client, tool_choice="none")
        assert choice["message"]["content"] == "[now()]"

    run(lfm2, scenario, "<think>a</think><|tool_call_start|>[now()]<|tool_call_end|>" + END)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_that_have_to_be_made_have_a_grammar(hermes, choice):
    async def scenario(client, engine):
        answer = await message_of(client, tool_choice=choice, ignore_eos=True)
        assert answer["finish_reason"] == "tool_calls"
        (request,) = (message.request for message in engine.received if hasattr(message, "request"))
        assert "now" in request.grammar
        assert ("get-weather" in request.grammar) == (choice == "required")
        assert request.stop.stop_ids >= hermes.eos_ids
        assert all(tool["function"]["name"] in prompts(engine)[0] for tool in TOOLS)

    run(hermes, scenario, NOW + END)


@pytest.mark.parametrize("said", [f"<think>Hm.</think>{NOW}", '<think>Hm.</think>{"a":1}', "Hi"])
def test_a_call_or_an_answer_of_a_format(hermes, said):
    """Agents send both: the answer may be a call, or match the schema."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    async def scenario(client, engine):
        await message_of(client, response_format=form)
        matcher = GrammarCompiler(hermes, hermes.eos_ids).matcher(engine.received[0].request.grammar)
        tokens = hermes.encode(said, add_special_tokens=False)
        n_allowed = matcher.validate_tokens([*tokens, *hermes.eos_ids])
        assert (n_allowed == len(tokens) + 1) == (said != "Hi")

    run(hermes, scenario, said + END)


@pytest.mark.parametrize("n_tokens", [5, 30], ids=["in reasoning", "in a call"])
def test_an_engine_that_dies_inside_changes_nothing(hermes, n_tokens):
    said = f"<think>One, two, three.</think>{CALL}{END}"

    async def answer(crash):
        engine = ScriptedEngine(hermes, [said], manual=True)
        async with asyncio.timeout(60), serving(hermes, engine, CONFIG) as client:
            asking = asyncio.create_task(message_of(client))
            for step in range(len(said)):
                while not engine.received:
                    await asyncio.sleep(0.001)
                if crash and step == n_tokens:
                    engine.crash()
                    engine.recover()
                engine.step()
            return await asking

    undisturbed, disturbed = asyncio.run(answer(crash=False)), asyncio.run(answer(crash=True))
    for choice in (undisturbed, disturbed):
        assert choice["message"]["tool_calls"][0].pop("id")
    assert disturbed == undisturbed


# What is refused ---------------------------------------------------------------------------------------------------


def called(arguments, **fields):
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}, **fields}
    return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def tool(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


REFUSED = [
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
    (tool(name="no blanks"), "tools[0].function.name"),
    (tool(name="x" * 129), "tools[0].function.name"),
    (tool(name=""), "tools[0].function.name"),
    (tool(parameters={"type": "string"}), "tools[0].function.parameters"),
    (tool(parameters=[]), "tools[0].function.parameters"),
    (tool(description="x" * (1 << 20)), "tools"),
    ({"tools": [*TOOLS, TOOLS[1]]}, "tools"),
    ({"tools": TOOLS * 300}, "tools"),
    ({"tool_choice": "all"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "wind"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (called("{not JSON"), "messages[1].tool_calls[0].function.arguments"),
    (called("[1]"), "messages[1].tool_calls[0].function.arguments"),
    (called('{"a": NaN}'), "messages[1].tool_calls[0].function.arguments"),
    (called("{}" + " " * (1 << 18)), "messages[1].tool_calls[0].function.arguments"),
    (called('{"a":' * 2000 + "1" + "}" * 2000), "messages[1].tool_calls[0].function.arguments"),
    (called(7), "messages[1].tool_calls[0].function.arguments"),
    (called("{}", type="custom"), "messages[1].tool_calls[0].type"),
    (called("{}", images=["x"]), "messages[1].tool_calls[0].images"),
    ({"messages": [{**called("{}")["messages"][1], "role": "user", "content": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [ASK, {"role": "tool", "tool_call_id": "1"}]}, "messages[1].content"),
    ({"messages": [{**ASK, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
]


def test_refused_by_name(hermes):
    async def scenario(client, engine):
        for fields, param in REFUSED:
            response = await client.post(URL, json=body(**fields))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), (fields, response.text)
        assert not engine.received

    run(hermes, scenario)


CALLED = called("{}")["messages"][1]["tool_calls"][0]
ACCEPTED = {
    "no arguments": called(""),
    "arguments as they are": called({"a": [1, {"b": None}]}),
    "a huge number": called('{"a": 123456789012345678901234567890}'),
    "ids that nobody gave": {"messages": [ASK, {"role": "tool", "tool_call_id": "?", "content": "fine"}]},
    "a result in parts": {
        "messages": [
            *called("{}")["messages"],
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "fine"}]},
        ]
    },
    "two results": {
        "messages": [
            ASK,
            {"role": "assistant", "tool_calls": [{**CALLED, "id": id} for id in ("1", "2")]},
            *({"role": "tool", "tool_call_id": id, "content": "fine", "name": "now"} for id in ("1", "2")),
        ]
    },
    "an index, as it was streamed": called("{}", index=0),
    "further fields of a tool": tool(returns={}, copilot_cache_control={"type": "ephemeral"}),
    "end marks in texts": called(json.dumps({"a": "<|im_end|></tool_call>"})),
    "no content": {"messages": [ASK, {"role": "assistant", "tool_calls": called("{}")["messages"][1]["tool_calls"]}]},
    "no choice": {"tools": [], "tool_choice": "auto"},
    "a neutral function_call": {"function_call": "none"},
    "a strict tool": tool(strict=True, parameters={"type": "object", "properties": {}, "additionalProperties": False}),
}


def test_histories_of_all_kinds_are_rendered(hermes):
    async def scenario(client, engine):
        for name, fields in ACCEPTED.items():
            response = await client.post(URL, json=body(**fields))
            assert response.status_code == 200, (name, response.text)

    run(hermes, scenario, *(["Fine." + END] * len(ACCEPTED)))


def test_a_template_that_shows_no_tools(tokenizer):
    """Its model would not know of them: tools and calls of the history are refused, not left out in silence."""

    async def main():
        chosen = replace(CONFIG, tool_call_parser="hermes")
        for config, choice, param in (
            (CONFIG, {}, "tools"),
            (chosen, {}, "tools"),
            (chosen, {"tools": None, **called("{}")}, "messages[1].tool_calls"),
            (CONFIG, {"tool_choice": "none"}, None),
        ):
            async with serving(tokenizer, fake_engine(tokenizer), config) as client:
                response = await client.post(URL, json={**CHAT, "tools": TOOLS, "max_tokens": 3, **choice})
                error = response.json().get("error", {})
                assert error.get("param") == param, error

    asyncio.run(main())


def test_an_automatic_choice_can_be_turned_off(hermes):
    async def scenario(client, engine):
        refused = await client.post(URL, json=body())
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
        assert (await message_of(client, tool_choice="required"))["finish_reason"] == "tool_calls"

    run(hermes, scenario, NOW + END, config=replace(CONFIG, enable_auto_tool_choice=False))


def test_a_parser_that_the_operator_chose(hermes):
    config = replace(CONFIG, tool_call_parser="mistral", reasoning_parser="none")

    async def scenario(client, engine):
        choice = await message_of(client)
        assert choice["message"]["content"] == "<think>a</think>" and "reasoning" not in choice["message"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["tool_call_parser"], card["reasoning_parser"]) == ("mistral", None)

    run(hermes, scenario, "<think>a</think>[TOOL_CALLS]now[ARGS]{}" + END, config=config)


def test_tokenize_counts_tools(hermes):
    async def scenario(client, engine):
        await message_of(client)
        counted = (await client.post("/tokenize", json=body())).raise_for_status().json()
        assert counted["tokens"] == engine.received[0].request.prompt
        refused = await client.post("/tokenize", json={"prompt": "a", "tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")

    run(hermes, scenario, "Fine." + END)


# Odd bodies ---------------------------------------------------------------------------------------------------------

ODD = [
    *(None, True, 0, -1, 1e308, "", "x", "\ud800", "<|im_end|>", "zq7mark"),
    *([], {}, [None], [[]], {"a": None}, "{}", "[1]"),
]
SEEDS = [
    body(),
    body(tool_choice="auto", parallel_tool_calls=False),
    body(**called('{"a": 1}')),
    body(messages=[*called("{}")["messages"], {"role": "tool", "tool_call_id": "1", "content": "zq7mark"}]),
]


def mutated(value, rnd):
    """The value with one part of it replaced, dropped or doubled."""
    if not isinstance(value, (dict, list)) or not value or rnd.random() < 0.15:
        return rnd.choice(ODD)
    if isinstance(value, list):
        i = rnd.randrange(len(value))
        return [*value[:i], *rnd.choice(([], [value[i]] * 2, [mutated(value[i], rnd)])), *value[i + 1 :]]
    key = rnd.choice(sorted(value))
    changed = {name: item for name, item in value.items() if name != key}
    return changed if rnd.random() < 0.2 else {**changed, key: mutated(value[key], rnd)}


@pytest.mark.grows
@pytest.mark.parametrize("said", [CALL, NOW + CALL, "<think>a" + CALL[:20], "x</tool_call>" + CALL[3:]])
def test_odd_bodies_are_answered_or_refused_by_name(hermes, said):
    """Whatever clients send about tools, and whatever the model says."""
    rnd = Random(said)

    async def main():
        engine = ScriptedEngine(hermes, lambda prompt: said + END)
        statuses = set()
        async with asyncio.timeout(120), serving(hermes, engine, CONFIG) as client:
            for _ in range(BODIES):
                sent = rnd.choice(SEEDS)
                for _ in range(rnd.randint(1, 3)):
                    sent = mutated(sent, rnd)
                data = json.dumps(sent).encode()
                response = await client.post(URL, content=data, headers={"Content-Type": "application/json"})
                statuses.add(response.status_code)
                assert response.status_code in (200, 400, 404), (sent, response.text)
                if response.status_code == 400:
                    assert response.json()["error"]["message"]
        assert {200, 400} <= statuses

    asyncio.run(main())


@pytest.mark.parametrize("arguments", ['{"city": "\\ud800"}', '{"city": 1e400}', f'{{"city": {"7" * 5000}}}'])
def test_what_was_sent_comes_back_though_no_strict_parser_reads_it(hermes, arguments):
    def turn(call, text):
        called = {**call, "function": {**call["function"], "arguments": text}}
        answer = {"role": "assistant", "content": None, "tool_calls": [called]}
        return [ASK, answer, {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}]

    async def scenario(client, engine):
        (call,) = (await message_of(client))["message"]["tool_calls"]
        assert call["function"]["arguments"] == arguments
        for text in (arguments, "{}"):  # the second one as a client that changes it
            assert (await message_of(client, messages=turn(call, text)))["message"]["content"] == "Rain."

    said = '<tool_call>\n{"name": "get-weather", "arguments": ' + arguments + "}\n</tool_call>"
    run(hermes, scenario, f"{said}{END}", f"Rain.{END}", f"Rain.{END}")


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}],
    ids=["required", "beside response_format"],
)
def test_a_tools_schema_that_has_no_grammar_is_named(hermes, fields):
    named = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    other = {"type": "function", "function": {"name": "tag", "parameters": named}}

    async def scenario(client, engine):
        response = await client.post(URL, json=body(**fields, tools=[*TOOLS, other]))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "tools"
        assert error["message"].startswith("tools[2].function.parameters.properties.tags cannot be compiled: ")
        assert "uniqueItems" in error["message"] and "r0" not in error["message"]

    run(hermes, scenario)
