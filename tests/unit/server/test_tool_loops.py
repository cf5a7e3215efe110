"""Conversations that call tools, on a model that says given texts: nothing of them is computed twice."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from support.conversations import run
from support.scripted_model import TEMPLATES, tokenizer_of
from support.serving import CONFIG, sse

from phalanx.text.tokenizer import Tokenizer

URL = "/v1/chat/completions"
TURNS = 40
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get-weather", "description": "Ask.", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module", params=TEMPLATES)
def shape(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(shape, tmp_path_factory) -> Tokenizer:
    return tokenizer_of(shape, tmp_path_factory.mktemp(shape))


def call(shape: str, turn: int) -> str:
    """A model's call, never as the template would write it: other blanks and another order."""
    arguments = f'{{"days":{turn},  "city":"Oslo \\u00e9 {turn}"}}'
    markup = f"<parameter=days>\n{turn}\n</parameter>\n\n<parameter=city>\nOslo é {turn}\n</parameter>\n"
    return {
        "hermes": f'<tool_call> {{"name": "get-weather",  "arguments": {arguments}}}</tool_call><|im_end|>',
        "qwen3_coder": f"<tool_call>\n<function=get-weather>\n{markup}</function> </tool_call><|im_end|>",
        "lfm2": f"<|tool_call_start|>[get-weather(days = {turn}, city='Oslo é {turn}')]<|tool_call_end|><|im_end|>",
        "openai": "<|start|>assistant<|channel|>commentary to=functions.get-weather <|constrain|>json<|message|>"
        f"{arguments}<|call|>",
    }[shape]


def said(shape: str, turn: int) -> str:
    """What the model says in a turn: reasoning and a call."""
    thought = f" Let us ask  for day {turn}."
    if shape == "openai":
        return f"<|channel|>analysis<|message|>{thought}<|end|>{call(shape, turn)}"
    return f"<think>{thought}\n</think>\n\n\n{call(shape, turn)}"


def final(shape: str) -> str:
    return "<|channel|>final<|message|>Fine.<|return|>" if shape == "openai" else "Fine.<|im_end|>"


async def ask(client, messages, *, stream, **options):
    """The answer's message, fragments of arguments, finish reason and usage."""
    body = {"messages": messages, "tools": TOOLS, **options}
    if not stream:
        answer = (await client.post(URL, json=body)).raise_for_status().json()
        choice = answer["choices"][0]
        return choice["message"], [], choice["finish_reason"], answer["usage"]
    response = await client.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, _ = sse(response.raise_for_status().text)
    message, fragments, reason = {"role": "assistant", "content": ""}, [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta, reason = choice["delta"], choice["finish_reason"]
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
                fragments.append(part["function"]["arguments"])
    return message, fragments, reason, usage["usage"]


@pytest.mark.parametrize(("stream", "turns"), [(True, TURNS), (False, 3)], ids=["streamed", "whole"])
def test_a_loop_of_calls_computes_nothing_twice(tokenizer, shape, stream, turns):
    answers = [*(said(shape, turn) for turn in range(turns)), final(shape)]

    async def scenario(client, engine):
        messages = [{"role": "user", "content": "How is the weather in Oslo, day by day?"}]
        for turn in range(turns):
            message, fragments, reason, usage = await ask(client, messages, stream=stream)
            assert (message["content"] or "", reason) == ("", "tool_calls")
            (called,) = message["tool_calls"]
            assert called["function"]["name"] == "get-weather"
            assert json.loads(called["function"]["arguments"]) == {"days": turn, "city": f"Oslo é {turn}"}
            assert len(fragments) > 1 or not stream
            assert usage["completion_tokens_details"]["reasoning_tokens"] > 5
            cached = usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
            assert cached >= 0.95 or turn < 10  # a short conversation's next message is more than a twentieth of it
            messages += [without_reasoning(message), result_of(message)]
        message, _, reason, _ = await ask(client, messages, stream=stream)
        assert (message["content"], reason) == ("Fine.", "stop")
        prompts = [sent.request.prompt for sent in engine.received]
        for earlier, answer, later in zip(prompts, answers, prompts[1:], strict=False):
            assert begins(later, [*earlier, *tokenizer.encode(answer, add_special_tokens=False)])

    run(tokenizer, answers, scenario)


def without_reasoning(message):
    return {name: value for name, value in message.items() if "reasoning" not in name}


def result_of(message, text="rain"):
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def begins(tokens, start):
    return tokens[: len(start)] == start


ASK = {"role": "user", "content": "How is the weather?"}


@pytest.mark.parametrize("ending", ["whole", "without an end"])
def test_text_beside_a_call_and_one_call_only(tokenizer, shape, ending):
    """`parallel_tool_calls` false ends the answer with its first call; what the model wrote is found again."""
    if shape == "openai":
        pytest.skip("an answer on channels ends with its call")
    text = f"I shall ask.{call(shape, 1).removesuffix('<|im_end|>')}"
    answers = [text + ("<|im_end|>" if ending == "whole" else call(shape, 2)), final(shape)]

    async def scenario(client, engine):
        message, _, reason, _ = await ask(client, [ASK], stream=True, parallel_tool_calls=False)
        assert (message["content"].strip(), reason, len(message["tool_calls"])) == ("I shall ask.", "tool_calls", 1)
        await ask(client, [ASK, message, result_of(message)], stream=False)
        first, second = (sent.request.prompt for sent in engine.received if hasattr(sent, "request"))
        assert begins(second, [*first, *tokenizer.encode(text, add_special_tokens=False)])
        assert tokenizer.decode(second, skip_special_tokens=False).count("<|im_end|>") == 4

    run(tokenizer, answers, scenario)


def changed_call(message):
    function = {**message["tool_calls"][0]["function"], "arguments": '{"days": 7}'}
    return {**message, "tool_calls": [{**message["tool_calls"][0], "function": function}]}


CHANGES = {
    "arguments": lambda messages: [messages[0], changed_call(messages[1]), messages[2]],
    "text": lambda messages: [messages[0], {**messages[1], "content": "Other words."}, messages[2]],
    "reasoning": lambda messages: [ASK, {**without_reasoning(messages[1]), "reasoning": "Other words."}, messages[2]],
    "question": lambda messages: [{**ASK, "content": "How is the wind?"}, *messages[1:]],
    "a further message": lambda messages: [ASK, *messages],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_history_that_was_changed_is_rendered_as_it_is(tokenizer, shape, change):
    async def scenario(client, engine):
        message, *_ = await ask(client, [ASK], stream=False)
        history = CHANGES[change]([ASK, message, result_of(message)])
        await ask(client, history, stream=False)
        first, second = (sent.request.prompt for sent in engine.received)
        assert not begins(second, [*first, *tokenizer.encode(said(shape, 1), add_special_tokens=False)])
        text = tokenizer.decode(second, skip_special_tokens=False)
        assert "days" in text and "rain" in text

    run(tokenizer, [said(shape, 1), final(shape)], scenario)


def test_a_new_question_drops_older_reasoning_where_the_template_does(tokenizer, shape):
    async def scenario(client, engine):
        message, *_ = await ask(client, [ASK], stream=False)
        history = [ASK, without_reasoning(message), result_of(message)]
        answer, *_ = await ask(client, history, stream=False)
        await ask(client, [*history, answer, {**ASK, "content": "And the wind?"}], stream=False)
        within, after = (
            tokenizer.decode(sent.request.prompt, skip_special_tokens=False) for sent in engine.received[1:]
        )
        assert "Let us ask  for day 1." in within
        assert "Let us ask" not in after and "Oslo" in after

    run(tokenizer, [said(shape, 1), final(shape), final(shape)], scenario)


def test_without_reasoning_a_new_question_goes_on_from_the_calls(tokenizer, shape):
    first_answer = call(shape, 1).removeprefix("<|start|>assistant")

    async def scenario(client, engine):
        message, *_ = await ask(client, [ASK], stream=False)
        history = [ASK, message, result_of(message)]
        answer, *_ = await ask(client, history, stream=False)
        await ask(client, [*history, answer, {**ASK, "content": "And the wind?"}], stream=False)
        first, _, third = (sent.request.prompt for sent in engine.received)
        assert begins(third, [*first, *tokenizer.encode(first_answer, add_special_tokens=False)])

    run(tokenizer, [first_answer, final(shape), final(shape)], scenario)


def test_answers_of_one_key_are_not_another_ones(tokenizer, shape):
    config = replace(CONFIG, api_key=("one", "two"))

    async def scenario(client, engine):
        headers = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
        body = {"messages": [ASK], "tools": TOOLS}
        answer = (await client.post(URL, json=body, headers=headers[0])).raise_for_status().json()
        message = without_reasoning(answer["choices"][0]["message"])
        for theirs in (1, 0):
            again = {**body, "messages": [ASK, message, result_of(message)]}
            (await client.post(URL, json=again, headers=headers[theirs])).raise_for_status()
        first, of_two, of_one = (sent.request.prompt for sent in engine.received)
        whole = [*first, *tokenizer.encode(said(shape, 1), add_special_tokens=False)]
        assert begins(of_one, whole) and not begins(of_two, whole)

    run(tokenizer, [said(shape, 1), final(shape), final(shape)], scenario, config)
