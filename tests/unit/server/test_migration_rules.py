"""Who is told what a stream is made of, what it may go on from, and what is said of one that goes on inexactly."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace
from support.connection import Connection
from support.migrating import KEY, PacedEngine, paced, pieces_of, request_of, resume_after, shown, stream
from support.serving import CHAT, CONFIG, EOS, MODEL, fake_engine, serving, sse

from phalanx.http.stream_records import (
    MIGRATION,
    RESUME,
    RESUME_BYTES,
    ChoiceEnded,
    RecordedChoice,
    StreamRecord,
    record_in,
    resume_body,
)
from phalanx.server.answers.answer_parts import call_id
from phalanx.supervision.fake_engine import replying
from phalanx.types import Submit, TokenLogprobs

URL = "/v1/chat/completions"
KEYED = replace(CONFIG, admin_key=KEY, keepalive_seconds=1e6)
TEXT = "hello world, the quick brown fox"


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    with paced(monkeypatch):
        yield


def run(tokenizer, scenario, *, config=KEYED, other=None, said=TEXT):
    """`scenario` with a client and the engine of each of two servers.

    Args:
        other: facts of the second one's model that differ.
    """

    async def main():
        async with asyncio.timeout(120), AsyncExitStack() as stack:
            engines = [PacedEngine(tokenizer, lambda request: said + EOS, **facts) for facts in ({}, other or {})]
            served = [serving(tokenizer, engine, config) for engine in engines]
            clients = [await stack.enter_async_context(one) for one in served]
            return await scenario(*clients, *engines)

    return asyncio.run(main())


# Headers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admin_key", "headers", "says"),
    [
        (None, {MIGRATION: "x"}, "no --admin-key"),
        (None, {RESUME: "0"}, "no --admin-key"),
        (KEY, {MIGRATION: ""}, "must have this server's --admin-key"),
        (KEY, {MIGRATION: "api"}, "must have this server's --admin-key"),
        (KEY, {RESUME: "0"}, "must have this server's --admin-key"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_without_the_admin_key(tokenizer, admin_key, headers, says, streamed, caplog):
    async def scenario(client, *_):
        own = {"authorization": "Bearer api"}
        refused = await client.post(URL, json={**CHAT, "stream": streamed}, headers={**own, **headers})
        assert refused.status_code == 403 and MIGRATION in refused.json()["error"]["message"]
        assert says in refused.json()["error"]["message"]

    run(tokenizer, scenario, config=replace(KEYED, admin_key=admin_key, api_key=("api",)))
    assert [record.message for record in caplog.records] == ["A wrong admin key came from 127.0.0.1"]


def test_the_admin_key_is_no_api_key(tokenizer):
    async def scenario(client, *_):
        assert (await client.post(URL, json=CHAT, headers={MIGRATION: KEY})).status_code == 401

    run(tokenizer, scenario, config=replace(KEYED, api_key=("api",)))


def test_clients_see_no_records(tokenizer):
    async def scenario(client, *_):
        plain = (await client.post(URL, json={**CHAT, "stream": True})).content
        recorded = await stream(client, URL, CHAT)
        assert b"phalanx" not in plain + shown(recorded)
        assert len(sse(plain.decode())) == len(sse(shown(recorded).decode())) > 5
        whole = await client.post(URL, json=CHAT, headers={MIGRATION: KEY})
        assert whole.json()["choices"][0]["message"]["content"] == TEXT

    run(tokenizer, scenario)


ASKS = {
    URL: {**CHAT, "n": 2, "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 4},
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/api/chat": {**CHAT, "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("path", ASKS)
def test_records_say_at_once_that_the_engine_is_gone_or_back(tokenizer, path, key):
    """Clients see nothing of it."""

    async def main():
        engine = fake_engine(tokenizer, replying(tokenizer.encode("hello")), manual=True)
        async with asyncio.timeout(60), serving(tokenizer, engine, KEYED) as client:
            headers = {} if key is None else {MIGRATION: key}
            connection = Connection(client, path, {**ASKS[path], "stream": True}, headers)
            while not engine.received:
                await asyncio.sleep(0.001)
            engine.step()
            await connection.expect("hel")
            engine.crash()
            if key is not None:
                await connection.expect('"paused":true')
            engine.recover()
            if key is not None:
                await connection.expect("phalanx")
            while not connection.task.done():
                engine.step()
                await asyncio.sleep(0.001)
            return connection.text.encode()

    said = asyncio.run(main())
    if key is None:
        assert b"phalanx" not in said and b"paused" not in said
        return
    pieces = pieces_of(said, lines=path == "/api/chat")
    assert [i for i, piece in enumerate(pieces) if piece == (b"", StreamRecord(paused=True))] == [2]
    assert pieces[3] == (b"", StreamRecord()) and not any(record.paused for _, record in pieces[3:])


# What a stream may go on from ---------------------------------------------------------------------------------------


def changed(resume, **fields):
    return replace(resume, **fields)


def choice(resume, **fields):
    return replace(resume, choices=[replace(resume.choices[0], **fields)])


SCORE = TokenLogprobs(5, -1.0, 0, [(5, -1.0)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: changed(it, timeout_s=0.0), "timeout_s is 0"),
        (lambda it: changed(it, moves=0), "out of range"),
        (lambda it: changed(it, next_number=-1), "out of range"),
        (lambda it: changed(it, start=replace(it.start, seed=1 << 64)), "out of range"),
        (lambda it: changed(it, next_number=1 << 53), "out of range"),
        (lambda it: changed(it, start=replace(it.start, created=1 << 37)), "id or created"),
        (lambda it: changed(it, start=replace(it.start, created=-1)), "id or created"),
        (lambda it: changed(it, start=replace(it.start, id="x" * 101)), "id or created"),
        (lambda it: changed(it, start=replace(it.start, id="")), "id or created"),
        (lambda it: changed(it, choices=it.choices * 2), "indices [0, 0]; the request has 1"),
        (lambda it: choice(it, index=1), "indices [1]; the request has 1"),
        (lambda it: choice(it, index=-1), "indices [-1]"),
        (lambda it: choice(it, tokens=[5] * 21), "has 21 tokens; it may have 20 here"),
        (lambda it: choice(it, tokens=[5, 300]), "choices[0].tokens has the token id 300"),
        (lambda it: choice(it, tokens=[-1, 5]), "the token id -1"),
        (lambda it: choice(it, tokens=[5, 0, 5]), "tokens after the one that ended it"),
        (lambda it: choice(it, logprobs=[SCORE]), "and 1 log-probabilities"),
        (lambda it: choice(it, ended=ChoiceEnded(reason="stop", n_tokens=7)), "ended after 7"),
        (lambda it: choice(it, echoed=True), "choice 0 has the prompt"),
    ],
)
def test_what_no_server_can_have_said(tokenizer, change, says):
    async def scenario(first, second, *_):
        body = {**CHAT, "max_tokens": 20}
        resume = change(resume_after((await stream(first, URL, body))[:4]))
        content, headers = request_of(body, resume)
        refused = await second.post(URL, content=content, headers=headers)
        assert refused.status_code == 400, refused.text
        assert RESUME in refused.json()["error"]["message"] and says in refused.json()["error"]["message"]
        assert await stream(second, URL, body)  # nothing is left of it

    run(tokenizer, scenario)


def test_log_probabilities_are_checked(tokenizer):
    async def scenario(first, second, *_):
        body = {**CHAT, "logprobs": True, "max_tokens": 20}
        resume = resume_after((await stream(first, URL, body))[:2])
        for logprobs, says in (([], "0 log-prob"), ([replace(SCORE, top=[(300, -1.0)])], "the token id 300")):
            content, headers = request_of(body, choice(resume, logprobs=logprobs))
            refused = await second.post(URL, content=content, headers=headers)
            assert refused.status_code == 400 and says in refused.json()["error"]["message"]

    run(tokenizer, scenario)


@pytest.mark.parametrize("value", ["x", "-1", "99999", "1e2", "²", "7"])
def test_a_first_part_that_is_none(tokenizer, value):
    async def scenario(client, *_):
        headers = {MIGRATION: KEY, RESUME: value.encode(), "content-type": "application/json"}
        refused = await client.post(URL, content=json.dumps(CHAT), headers=headers)
        assert refused.status_code == 400 and RESUME in refused.json()["error"]["message"]

    run(tokenizer, scenario)


def test_a_whole_answer_goes_on_from_nothing(tokenizer):
    async def scenario(first, second, *_):
        resume = resume_after((await stream(first, URL, CHAT))[:4])
        length, content = resume_body(resume, json.dumps(CHAT).encode())
        headers = {MIGRATION: KEY, RESUME: str(length), "content-type": "application/json"}
        refused = await second.post(URL, content=content, headers=headers)
        assert refused.status_code == 400 and "not streamed" in refused.json()["error"]["message"]

    run(tokenizer, scenario)


def test_what_is_known_of_a_stream_is_no_part_of_the_largest_body(tokenizer):
    """So a request that was taken once is taken again, however long its answer is by now."""
    most, body = 1 << 10, {**CHAT, "metadata": {"x": ""}, "stream": True}
    largest = {**body, "metadata": {"x": "y" * (most - len(json.dumps(body)))}}

    async def scenario(first, second, *_):
        whole = await stream(first, URL, largest)
        resume = resume_after(whole[:4])
        content, headers = request_of(largest, resume)
        assert len(content) > most + 100
        assert shown(whole[:4] + await stream(second, URL, largest, resume)) == shown(whole)
        (refused, *others) = [
            await second.post(URL, content=sent, headers={**headers, **changed})
            for sent, changed in (
                (content + b" ", {}),
                (content[int(headers[RESUME]) :] + b" ", {RESUME: "0"}),
                (content + b" ", {RESUME: str(int(headers[RESUME]) + 1)}),
                (content, {RESUME: str(RESUME_BYTES + 1)}),
                (content, {MIGRATION: "api"}),
            )
        ]
        assert refused.status_code == 413 and [other.status_code for other in others] == [413, 400, 413, 403]
        assert f"{RESUME}: the body's first part has {RESUME_BYTES + 1} bytes" in others[2].json()["error"]["message"]

    run(tokenizer, scenario, config=replace(KEYED, max_body_mb=most / (1 << 20)))


# What is computed ---------------------------------------------------------------------------------------------------


def submitted(engine):
    return [message.request for message in engine.received if isinstance(message, Submit)]


def test_known_tokens_are_given_to_the_engine_with_the_time_that_is_left(tokenizer):
    async def scenario(first, second, _, engine):
        body = {**CHAT, "n": 2, "timeout": 50}
        whole = await stream(first, URL, body)
        for left, expected in ((20.0, 20.0), (1e6, 50.0)):
            resume = resume_after(whole[:6], timeout_s=left)
            await stream(second, URL, body, resume)
            sent = submitted(engine)[-2:]
            assert [request.committed for request in sent] == [choice.tokens for choice in resume.choices]
            assert {request.sampling.seed for request in sent} == {resume.start.seed}
            assert {request.timeout_s for request in sent} == {expected}
            assert all(request.group != resume.start.id for request in sent)  # the first server may be this one

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 6}, {"stop": "quick", "include_stop_str_in_output": True}, {"stop_token_ids": [75]}]
)
def test_a_choice_that_needs_no_further_token_is_not_computed(tokenizer, fields):
    """Its last token is known, but not that it was the last one."""

    async def scenario(first, second, _, engine):
        whole = await stream(first, URL, {**CHAT, **fields})
        ended = next(i for i, (_, record) in enumerate(whole) if any(choice.ended for choice in record.choices))
        pieces = whole[: ended + 1]
        resume = resume_after(pieces)
        (known,) = resume.choices
        rest = await stream(second, URL, {**CHAT, **fields}, replace(resume, choices=[replace(known, ended=None)]))
        assert not submitted(engine)
        assert sse(shown(rest).decode())[0]["choices"][0]["finish_reason"] == known.ended.reason
        assert rest[0][1] == StreamRecord(choices=[RecordedChoice(index=0, ended=known.ended)])

    run(tokenizer, scenario)


def test_a_restarted_engine_goes_on_with_a_stream_that_has_moved(tokenizer):
    async def scenario(first, second, _, engine):
        whole = await stream(first, URL, CHAT)
        step, n_steps = engine.step, 0

        def stumble():
            nonlocal n_steps
            n_steps += 1
            if n_steps == 3:
                engine.crash()
                engine.recover()
            step()

        engine.step = stumble
        assert shown(whole[:4] + await stream(second, URL, CHAT, resume_after(whole[:4]))) == shown(whole)
        assert [len(request.committed) for request in submitted(engine)] == [3, 5]

    run(tokenizer, scenario)


def test_an_engine_that_fails_for_good_is_a_failure_that_another_server_may_not_have(tokenizer):
    async def scenario(first, second, engine, _):
        whole = await stream(second, URL, CHAT)
        step = engine.step

        def fail():
            step()
            engine.crash("out of memory", will_restart=False)

        engine.step = fail
        *_, (piece, record) = await stream(first, URL, CHAT)
        assert "out of memory" in record.failed and b"out of memory" in piece and not record.choices
        assert shown(whole).endswith(b"[DONE]\n\n")

    run(tokenizer, scenario)


def test_what_is_held_back_is_told_while_the_client_waits(tokenizer):
    """The record of a keep-alive has the tokens whose text may begin a stop string."""

    async def main():
        engine = PacedEngine(tokenizer, lambda request: TEXT + EOS)
        config = replace(KEYED, keepalive_seconds=0.1)
        step, n_steps = engine.step, 0
        silent, said = asyncio.Event(), b""

        def pause():
            nonlocal n_steps
            if n_steps < 3 or silent.is_set():
                n_steps += 1
                step()

        engine.step = pause
        content, headers = request_of({**CHAT, "stop": TEXT + "es"})
        async with asyncio.timeout(60), serving(tokenizer, engine, config) as client:
            while engine.info is None:
                await asyncio.sleep(0)
            async with client.stream("POST", URL, content=content, headers=headers) as response:
                async for piece in response.aiter_raw():
                    said += piece
                    if b'"tokens":' in said:
                        silent.set()
        pieces = pieces_of(said, lines=False)
        told = next((piece, record) for piece, record in pieces if record.choices)
        assert told[0] == b": keep-alive\n\n" and len(told[1].choices[0].tokens) == 3

    asyncio.run(main())


def test_a_client_whose_text_is_held_back_is_kept_waiting(tokenizer):
    """Tokens come all the time, but with each of them a stop string may still be on its way."""

    async def main():
        now = 0.0
        engine = PacedEngine(tokenizer, lambda request: TEXT + EOS)
        step = engine.step

        def slow():
            nonlocal now
            now += KEYED.keepalive_seconds / 2
            step()

        engine.step = slow
        async with asyncio.timeout(60), serving(tokenizer, engine, KEYED, clock=lambda: now) as client:
            answer = await client.post(URL, json={**CHAT, "stream": True, "stop": TEXT + "es"})
        assert answer.text.count(": keep-alive\n\n") == 3  # eight steps; the last one shows all
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in sse(answer.text)[:-1]) == TEXT

    asyncio.run(main())


def test_ids_of_calls_follow_from_the_answers():
    ids = {call_id(answer, choice, number) for answer in ("a", "b") for choice in (0, 1) for number in (0, 1)}
    assert len(ids) == 8 and all(len(id) == 9 and id.isalnum() for id in ids)
    assert call_id("a", 0, 1) in ids


# Where the same tokens are not certain ------------------------------------------------------------------------------

DIALECTS = {
    URL: CHAT,
    "/v1/completions": {"prompt": "hello", "max_tokens": 9},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"input": "hello"},
    "/api/chat": CHAT,
    "/api/generate": {"model": "tiny", "prompt": "hello"},
}


def notes(pieces):
    """What a stream's JSON objects say of moves."""
    lines = shown(pieces).decode().replace("data: ", "").splitlines()
    return [json.loads(line).get("phalanx") for line in lines if line.startswith("{")]


@pytest.mark.parametrize("path", DIALECTS)
def test_the_end_says_so(tokenizer, path):
    async def scenario(first, second, *_):
        body = DIALECTS[path]
        whole = await stream(first, path, body)
        rest = await stream(second, path, body, resume_after(whole[:4], moves=2))
        said = [note for note in notes(rest) if note is not None]
        assert said == [{"moves": 2, "exact": False}] and not any(notes(whole))
        (told,) = [record.start for _, record in rest if record.start is not None]
        assert told == replace(resume_after(whole).start, exact=False)
        back = await stream(first, path, body, resume_after(whole[:4] + rest[:2], moves=3))
        assert [note for note in notes(back) if note] == [{"moves": 3, "exact": False}]
        assert all(record.start is None for _, record in back)

    run(tokenizer, scenario, other={"identity": "another model"})


def test_other_prompts_are_told(tokenizer):
    async def scenario(first, second, *_):
        whole = await stream(first, URL, CHAT)
        resume = resume_after(whole[:4])
        other = replace(resume, start=replace(resume.start, prompts=resume.start.prompts ^ 1))
        assert any(notes(await stream(second, URL, CHAT, other)))
        assert not any(notes(await stream(second, URL, CHAT, resume)))

    run(tokenizer, scenario)


def test_records_of_lines_may_follow_blanks():
    assert record_in(b'  {"phalanx":{"failed":"x"}}', lines=True) == StreamRecord(failed="x")
    assert record_in(b'{"model":"x"}', lines=True) is None
