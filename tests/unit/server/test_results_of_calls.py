"""Results of tools in any order, and calls without arguments, as clients of each dialect send them back.

The template of the tests pairs results with calls by their order alone: it writes neither ids nor names of results.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.conversations import run
from support.scripted_model import tokenizer_of

from phalanx.text.tokenizer import Tokenizer

ASK = "How is the weather?"
CITIES = ("Oslo", "Bergen", "Tromso")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Ask.", "parameters": SCHEMA}
Body = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))


class Chat:
    """Histories of one dialect: turns of calls, each for cities by their index, and results by index."""

    path = "/v1/chat/completions"

    def body(self, items: Sequence[Any]) -> Body:
        messages = [{"role": "user", "content": ASK}, *items]
        return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}

    def calls(self, *ids: int, arguments: Any = None) -> Any:
        texts = {id: json.dumps({"city": CITIES[id]}) if arguments is None else arguments for id in ids}
        return {
            "role": "assistant",
            "tool_calls": [
                {"id": f"c{id}", "type": "function", "function": {"name": "weather", "arguments": texts[id]}}
                for id in ids
            ],
        }

    def result(self, id: int, text: str) -> Any:
        return {"role": "tool", "tool_call_id": f"c{id}", "content": text}

    def said(self, text: str, role: str = "assistant") -> Any:
        return {"role": role, "content": text}

    def place(self, index: int) -> str:
        return f"messages[{1 + index}].tool_call_id"


class Tokenize(Chat):
    path = "/tokenize"


class Messages(Chat):
    """Results of calls are a user's message each; they may stand in one with others, too."""

    path = "/v1/messages"

    def body(self, items: Sequence[Any]) -> Body:
        tool = {"name": "weather", "description": "Ask.", "input_schema": SCHEMA}
        return {"messages": [{"role": "user", "content": ASK}, *items], "tools": [tool], "max_tokens": 5}

    def calls(self, *ids: int, arguments: Any = None) -> Any:
        blocks = [{"type": "tool_use", "id": f"c{id}", "name": "weather", "input": {"city": CITIES[id]}} for id in ids]
        return {"role": "assistant", "content": blocks}

    def result(self, id: int, text: str) -> Any:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{id}", "content": text}]}

    def place(self, index: int) -> str:
        return f"messages[{1 + index}].content[0].tool_use_id"


class Responses(Chat):
    path = "/v1/responses"

    def body(self, items: Sequence[Any]) -> Body:
        flat = [part for item in items for part in (item if isinstance(item, list) else [item])]
        return {"input": [{"role": "user", "content": ASK}, *flat], "tools": [{"type": "function", **FUNCTION}]}

    def calls(self, *ids: int, arguments: Any = None) -> Any:
        texts = {id: json.dumps({"city": CITIES[id]}) if arguments is None else arguments for id in ids}
        return [{"type": "function_call", "call_id": f"c{id}", "name": "weather", "arguments": texts[id]} for id in ids]

    def result(self, id: int, text: str) -> Any:
        return {"type": "function_call_output", "call_id": f"c{id}", "output": text}

    def place(self, index: int) -> str:
        return f"input[{2 + index}].call_id"  # behind two calls, which are two items


class Ollama(Chat):
    path = "/api/chat"

    def body(self, items: Sequence[Any]) -> Body:
        return {**super().body(items), "model": "tiny", "stream": False}

    def calls(self, *ids: int, arguments: Any = None) -> Any:
        made = [{"id": f"c{id}", "function": {"name": "weather", "arguments": {"city": CITIES[id]}}} for id in ids]
        return {"role": "assistant", "tool_calls": made}


OPENAIS = [Chat(), Tokenize(), Responses()]
STRICT = [*OPENAIS, Messages()]
ALL = [*STRICT, Ollama()]


def named(dialect: Chat) -> str:
    return type(dialect).__name__


def prompts_of(tokenizer: Tokenizer, dialect: Chat, *histories: Sequence[Any]) -> list[str]:
    """What the model reads of these histories."""
    found: list[str] = []

    async def scenario(client, engine):
        for items in histories:
            response = await client.post(dialect.path, json=dialect.body(items))
            assert response.status_code == 200, response.text
            tokens = response.json()["tokens"] if dialect.path == "/tokenize" else engine.received[-1].request.prompt
            found.append(tokenizer.decode(tokens, skip_special_tokens=False))

    run(tokenizer, ["Fine.<|im_end|>"] * len(histories), scenario)
    return found


def results_in(prompt: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_results_come_to_the_template_in_the_order_of_the_calls(tokenizer, dialect):
    def history(order: Sequence[int]) -> list[Any]:
        return [dialect.calls(0, 1, 2), *(dialect.result(id, CITIES[id]) for id in order)]

    prompts = prompts_of(tokenizer, dialect, *map(history, itertools.permutations(range(3))))
    assert results_in(prompts[0]) == list(CITIES)
    assert set(prompts) == {prompts[0]}


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_an_id_of_two_calls_has_its_results_in_the_order_in_which_they_came(tokenizer, dialect):
    results = [dialect.result(1, "b"), dialect.result(0, "a"), dialect.result(0, "c")]
    (prompt,) = prompts_of(tokenizer, dialect, [dialect.calls(0, 1, 0), *results])
    assert results_in(prompt) == ["a", "b", "c"]


@pytest.mark.parametrize("dialect", ALL, ids=named)
def test_only_results_change_places_and_only_within_one_answers(tokenizer, dialect):
    """Kimi's ids repeat from turn to turn."""
    (prompt,) = prompts_of(
        tokenizer,
        dialect,
        [
            dialect.calls(0, 1),
            dialect.result(1, "second of turn one"),
            dialect.said("Hurry.", "user"),
            dialect.result(0, "first of turn one"),
            dialect.said("Fine."),
            dialect.said("And now?", "user"),
            dialect.calls(1, 0),
            dialect.result(0, "second of turn two"),
            dialect.result(1, "first of turn two"),
        ],
    )
    first, second = (
        [f"first of turn {turn}" for turn in ("one", "two")],
        [f"second of turn {n}" for n in ("one", "two")],
    )
    assert results_in(prompt) == [first[0], second[0], first[1], second[1]]
    assert prompt.index(first[0]) < prompt.index("Hurry.") < prompt.index(second[0]) < prompt.index("Fine.")


@pytest.mark.parametrize("dialect", STRICT, ids=named)
def test_results_without_calls_in_the_history_pass_as_they_are(tokenizer, dialect):
    """A client that shortens its conversation cuts the first answers off. A late result passes as well."""
    cut, late = prompts_of(
        tokenizer,
        dialect,
        [dialect.result(2, "b"), dialect.result(1, "a"), dialect.said("Fine."), dialect.result(0, "c")],
        [dialect.calls(0, 1), dialect.result(1, "y"), dialect.calls(2), dialect.result(2, "z"), dialect.result(0, "x")],
    )
    assert results_in(cut) == ["b", "a", "c"]
    assert results_in(late) == ["y", "z", "x"]


@pytest.mark.parametrize("second", ["twice", "unknown"])
@pytest.mark.parametrize("dialect", STRICT, ids=named)
def test_a_result_that_can_be_no_calls_is_refused_by_name(tokenizer, dialect, second):
    items = [dialect.calls(0, 1), dialect.result(0, "a"), dialect.result(0 if second == "twice" else 2, "b")]
    why = (
        "'c0' has a result already" if second == "twice" else "is 'c2', but the calls of the answer before it are 'c0'"
    )

    async def scenario(client, engine):
        response = await client.post(dialect.path, json=dialect.body(items))
        error = response.json()["error"]
        assert response.status_code == 400 and dialect.place(2) in error["message"] and why in error["message"]
        assert error.get("param", dialect.place(2)) == dialect.place(2)
        assert not engine.received

    run(tokenizer, [], scenario)


def test_an_error_repeats_few_ids(tokenizer):
    chat = Chat()
    calls = chat.calls(0)["tool_calls"][0]
    answer = {"role": "assistant", "tool_calls": [{**calls, "id": f"{i}" * 100} for i in range(9)]}

    async def scenario(client, engine):
        response = await client.post(chat.path, json=chat.body([answer, chat.result(0, "a")]))
        assert response.status_code == 400 and len(response.json()["error"]["message"]) < 400

    run(tokenizer, [], scenario)


@pytest.mark.parametrize("dialect", OPENAIS, ids=named)
def test_a_call_whose_arguments_are_the_text_null_has_none(tokenizer, dialect):
    texts = ["{}", "null", " null\n", ""]
    prompts = prompts_of(tokenizer, dialect, *([dialect.calls(0, arguments=text)] for text in texts))
    assert '"arguments": {}' in prompts[0] and set(prompts) == {prompts[0]}
