"""Grammars are compiled beside the event loop, once each, and by turns between API keys."""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading

import httpx
import pytest
from support.serving import CHAT, fake_engine, serving

from phalanx.errors import GrammarRefused, InvalidRequest
from phalanx.server.prompts.grammar_checks import KEPT, GrammarChecks
from phalanx.server.requests.parsed import AnswerGrammar
from phalanx.text.grammar_process import GrammarTrial
from phalanx.types import Submit, ToEngine

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def regex(expression: str) -> AnswerGrammar:
    return AnswerGrammar(param="guided_regex", place="guided_regex", grammar={"lark_grammar": f"start: /{expression}/"})


class Recorded(GrammarTrial):
    """Lets everything pass but what has `bad` in it; what has `slow` in it waits for the test."""

    def __init__(self) -> None:
        super().__init__([])
        self.tried: list[str] = []
        self.go_on = threading.Event()

    def check(self, grammar: str) -> None:
        self.tried.append(json.loads(grammar)["grammars"][0]["lark_grammar"])
        if "slow" in grammar:
            assert self.go_on.wait(60)
        if "bad" in grammar:
            raise GrammarRefused("it is bad.")


@pytest.fixture
def trial() -> Recorded:
    return Recorded()


@pytest.fixture
def checks(tokenizer, trial):
    checks = GrammarChecks(tokenizer, trial)
    yield checks
    trial.go_on.set()
    checks.close()


def test_any_text_needs_no_grammar(checks):
    assert asyncio.run(checks.output_grammar(None, "key")) == ""


def test_a_grammar_is_tried_once_and_so_is_one_that_is_refused(checks, trial):
    async def main() -> None:
        for _ in range(3):
            assert json.loads(await checks.output_grammar(regex("a"), "key")) == {
                "grammars": [{"lark_grammar": "start: /a/"}]
            }
            with pytest.raises(InvalidRequest, match=r"^guided_regex cannot be compiled: it is bad\.$") as caught:
                await checks.output_grammar(regex("bad"), "key")
            assert caught.value.param == "guided_regex"

    asyncio.run(main())
    assert trial.tried == ["start: /a/", "start: /bad/"]


def test_the_same_grammar_at_once_is_tried_once(checks, trial):
    async def main() -> None:
        waiting = [asyncio.create_task(checks.output_grammar(regex("slow"), "key")) for _ in range(3)]
        await asyncio.sleep(0)
        trial.go_on.set()
        assert len(set(await asyncio.gather(*waiting))) == 1

    asyncio.run(main())
    assert trial.tried == ["start: /slow/"]


def test_the_first_grammar_waits_for_no_process_and_no_vocabulary(checks, tokenizer, trial, monkeypatch):
    started, read = threading.Event(), threading.Event()
    monkeypatch.setattr(trial, "start", started.set)
    prepare = checks._compiler.prepare
    monkeypatch.setattr(checks._compiler, "prepare", lambda: (prepare(), read.set()))
    checks.prepare()
    assert started.wait(60) and read.wait(60)

    def again(token: int) -> bytes:
        raise AssertionError("the vocabulary is read already")

    monkeypatch.setattr(tokenizer, "token_bytes", again)
    assert asyncio.run(checks.output_grammar(regex("a"), "key"))


def test_a_process_that_was_started_ahead_is_the_one_that_tries(monkeypatch):
    n_started = 0
    real = subprocess.Popen

    def count(*arguments, **options):
        nonlocal n_started
        n_started += 1
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", count)
    trial = GrammarTrial([])
    trial.start()
    assert n_started == 1
    trial.check_schema(PERSON)
    assert n_started == 1


def test_results_of_long_ago_are_forgotten(checks, trial):
    async def main() -> None:
        for i in [*range(KEPT + 1), 1, 0]:
            await checks.output_grammar(regex(f"a{i}"), "key")

    asyncio.run(main())
    assert len(trial.tried) == KEPT + 2


def test_what_stands_before_the_answer_is_a_part_of_the_grammar(checks, trial):
    def whole(grammar) -> str:
        return json.dumps({"grammars": [{"lark_grammar": "start: @answer"}, {**grammar, "name": "answer"}]})

    text = asyncio.run(checks.output_grammar(regex("a"), "key", whole))
    assert json.loads(text)["grammars"][1]["lark_grammar"] == "start: /a/"
    assert trial.tried == ["start: @answer"]


def test_a_key_with_many_slow_grammars_keeps_no_other_key_waiting(checks, trial):
    async def main() -> None:
        hostile = [asyncio.create_task(checks.output_grammar(regex(f"slow{i}"), "hostile")) for i in range(20)]
        await asyncio.sleep(0)
        for i in range(5):
            await checks.output_grammar(regex(f"a{i}"), "other")
        assert not any(task.done() for task in hostile)
        trial.go_on.set()
        await asyncio.gather(*hostile)

    asyncio.run(main())


def test_a_client_that_leaves_does_not_hold_its_keys_turn(checks, trial):
    async def main() -> None:
        tasks = [asyncio.create_task(checks.output_grammar(regex(text), "key")) for text in ("slow", "b", "c")]
        first, second, third = tasks
        await asyncio.sleep(0)
        second.cancel()
        trial.go_on.set()
        await asyncio.gather(first, third)

    asyncio.run(main())
    assert trial.tried == ["start: /slow/", "start: /c/"]


def test_a_client_that_leaves_does_not_begin_another_turn_of_its_key(checks, trial):
    """Else many clients that come and go would take all threads."""

    async def main() -> None:
        first = asyncio.create_task(checks.output_grammar(regex("slow"), "key"))
        while not trial.tried:
            await asyncio.sleep(0.001)
        first.cancel()
        second = asyncio.create_task(checks.output_grammar(regex("b"), "key"))
        await checks.output_grammar(regex("c"), "other")
        assert trial.tried == ["start: /slow/", "start: /c/"]
        trial.go_on.set()
        await second

    asyncio.run(main())


def test_over_http(tokenizer, monkeypatch):
    """Refusals name field, place and reason; what is let pass reaches the engine."""
    engine = fake_engine(tokenizer)
    sent: list[ToEngine] = []
    send = engine.send
    monkeypatch.setattr(engine, "send", lambda message: (sent.append(message), send(message)))

    async def main() -> None:
        async with serving(tokenizer, engine) as client:

            async def ask(route: str = "/v1/chat/completions", **fields) -> httpx.Response:
                body = CHAT if "chat" in route else {"model": CHAT["model"], "prompt": "x"}
                return await client.post(route, json={**body, "max_tokens": 1, **fields})

            schema = {"type": "object", "properties": {"a": {"not": {}}}}
            named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            for fields, param, place in [
                ({"response_format": named}, "response_format", "response_format.json_schema.schema.properties.a"),
                (
                    {"response_format": {"type": "json_object", "value": schema}},
                    "response_format",
                    "response_format.value.properties.a",
                ),
                ({"guided_json": schema}, "guided_json", "guided_json.properties.a"),
                (
                    {"structured_outputs": {"json": schema}},
                    "structured_outputs",
                    "structured_outputs.json.properties.a",
                ),
            ]:
                for route in ("/v1/chat/completions", "/v1/completions"):
                    for stream in (False, True):
                        response = await ask(route, stream=stream, **fields)
                        error = response.json()["error"]
                        assert response.status_code == 400 and error["param"] == param
                        assert error["message"] == f'{place} cannot be compiled: Unimplemented keys: ["not"].'
            response = await ask(guided_grammar='root ::= "a" | x')
            assert response.status_code == 400 and "Rule 'x' not found" in response.json()["error"]["message"]
            assert (await ask(guided_grammar='root ::= "a"', n=2)).status_code == 200
            assert (await ask("/v1/completions", guided_json=PERSON)).status_code == 200
            assert (await ask()).status_code == 200

    asyncio.run(main())
    requests = [message.request for message in sent if isinstance(message, Submit)]
    kinds = [request.grammar[:30] for request in requests]
    assert kinds == ['{"grammars":[{"lark_grammar":"'] * 2 + ['{"grammars":[{"json_schema":{"'] + [""]
