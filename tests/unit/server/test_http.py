"""The endpoints on the fake engine: answers, streams, errors, limits, health."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace
from support.connection import FEW_BYTES, Connection, status_of_endless
from support.openapi_check import check_openapi
from support.serving import CHAT, CONFIG, MODEL, fake_engine, served, serving, sse

from phalanx.config import MIB
from phalanx.server.requests.parsed import GenerationDefaults
from phalanx.server.server_app import COUNTING, GENERATE_ROUTES, create_app
from phalanx.supervision.fake_engine import replying
from phalanx.types import Cancel, Submit

TEXT = "hello world, the quick brown fox"
URL = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


def run(tokenizer, scenario, *, config=CONFIG, reply=TEXT, engine=None, **options):
    """Run `await scenario(client, engine)` against a server whose engine always answers `reply`."""

    async def main():
        fake = engine or fake_engine(tokenizer, replying([*tokenizer.encode(reply), *tokenizer.eos_ids]))
        async with asyncio.timeout(60), serving(tokenizer, fake, config, **options) as client:
            await scenario(client, fake)

    asyncio.run(main())


def test_chat(tokenizer):
    async def scenario(client, engine):
        answer = (await client.post(URL["chat"], json=CHAT)).raise_for_status().json()
        assert answer["object"] == "chat.completion" and answer["model"] == MODEL
        assert answer["id"].startswith("chatcmpl-")
        message = {"role": "assistant", "content": TEXT, "refusal": None}
        assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
        n_prompt = len(engine.received[0].request.prompt)
        n_output = len(tokenizer.encode(TEXT)) + 1
        assert answer["usage"] == {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "total_tokens": n_prompt + n_output,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert tokenizer.decode(engine.received[0].request.prompt).startswith("<user>hello")

    run(tokenizer, scenario)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_figures_of_speculation_are_in_usage_when_asked_for(tokenizer, kind):
    body = {"chat": CHAT, "text": {"model": MODEL, "prompt": "the"}}[kind]
    wanted = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}

    async def scenario(client, engine):
        plain = (await client.post(URL[kind], json=body)).json()["usage"]
        assert "completion_tokens_details" not in plain
        asked = {**body, "speculation": True}
        whole = (await client.post(URL[kind], json=asked)).json()["usage"]
        assert whole["completion_tokens_details"] == wanted
        streamed = sse((await client.post(URL[kind], json={**asked, "stream": True})).text)
        assert streamed[-2]["usage"]["completion_tokens_details"] == wanted

    run(tokenizer, scenario)


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("most", [None, 0, 3])
def test_a_request_says_how_many_drafts_it_wants(tokenizer, kind, most):
    body = {"chat": CHAT, "text": {"model": MODEL, "prompt": "the"}}[kind]

    async def scenario(client, engine):
        response = await client.post(URL[kind], json={**body, "num_speculative_tokens": most})
        assert response.status_code == 200
        assert engine.received[0].request.max_drafts == most

    run(tokenizer, scenario)


@pytest.mark.parametrize("usage", [True, False])
def test_chat_stream(tokenizer, usage):
    async def scenario(client, engine):
        body = {**CHAT, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
        response = await client.post(URL["chat"], json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = sse(response.text)
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        if usage:
            total = chunks.pop()
            assert total["choices"] == [] and total["usage"]["completion_tokens"] > 1
            assert all(chunk["usage"] is None for chunk in chunks)
        else:
            assert all("usage" not in chunk for chunk in chunks)
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert None not in [value for choice in choices for value in choice["delta"].values()]
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]

    run(tokenizer, scenario)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_and_a_whole_answer_have_the_same_content(tokenizer, kind):
    async def scenario(client, engine):
        body = {"n": 3, "seed": 11, "max_tokens": 20, "temperature": 1, "logprobs": True if kind == "chat" else 2}
        body |= {"messages": CHAT["messages"]} if kind == "chat" else {"prompt": "the fox", "echo": True}
        whole = (await client.post(URL[kind], json=body)).raise_for_status().json()
        streamed = await client.post(
            URL[kind], json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        texts, logprobs, ends = {}, {}, {}
        for chunk in sse(streamed.text)[:-1]:
            for choice in chunk["choices"]:
                i = choice["index"]
                text = choice["delta"].get("content", "") if kind == "chat" else choice["text"]
                texts[i] = texts.get(i, "") + text
                for key, entries in (choice["logprobs"] or {}).items():
                    logprobs.setdefault(i, {}).setdefault(key, []).extend(entries or [])
                ends[i] = choice["finish_reason"] or ends.get(i)
        assert len({choice["index"] for choice in whole["choices"]}) == 3
        for choice in whole["choices"]:
            i = choice["index"]
            assert texts[i] == (choice["message"]["content"] if kind == "chat" else choice["text"])
            assert ends[i] == choice["finish_reason"] == "length"
            expected = {key: entries for key, entries in choice["logprobs"].items() if entries}
            assert {key: entries for key, entries in logprobs[i].items() if entries} == expected
        assert sse(streamed.text)[-2]["usage"] == whole["usage"]
        assert len(set(texts.values())) == 3

    run(tokenizer, scenario, engine=fake_engine(tokenizer))


def test_the_same_seed_gives_the_same_text_and_none_gives_another(tokenizer):
    async def scenario(client, engine):
        texts = []
        for seed in (5, 5, 5 + 2**64, 6, None, None):
            body = {"prompt": "the", "max_tokens": 24, "seed": seed, "temperature": 1}
            texts.append((await client.post(URL["text"], json=body)).json()["choices"][0]["text"])
        assert texts[0] == texts[1] == texts[2]
        assert len(set(texts[2:])) == 4

    run(tokenizer, scenario, engine=fake_engine(tokenizer))


def test_stop_string_ends_the_sequence_in_the_engine(tokenizer):
    async def scenario(client, engine):
        answer = (await client.post(URL["chat"], json={**CHAT, "stop": ["quick"], "logprobs": True})).json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == "hello world, the " and choice["finish_reason"] == "stop"
        n = answer["usage"]["completion_tokens"]
        assert len(choice["logprobs"]["content"]) == n < len(tokenizer.encode(TEXT))
        assert any(type(m).__name__ == "Finish" and m.n_tokens == n for m in engine.received)

    run(tokenizer, scenario)


def test_completion_forms_and_echo(tokenizer):
    async def scenario(client, engine):
        async def texts(**body):
            answer = (await client.post(URL["text"], json=body)).raise_for_status().json()
            return [choice["text"] for choice in answer["choices"]], answer["usage"]

        ids = tokenizer.encode("the fox")
        assert (await texts(prompt="the fox"))[0] == [TEXT]
        assert (await texts(prompt=["a", "b"], n=2))[0] == [TEXT] * 4
        assert (await texts(prompt=ids, echo=True))[0] == ["the fox" + TEXT]
        assert (await texts(prompt=[ids, ids]))[0] == [TEXT] * 2
        echoed, usage = await texts(prompt=["the fox", "é"], echo=True, max_tokens=0)
        assert echoed == ["the fox", "é"]
        assert (usage["completion_tokens"], usage["prompt_tokens"]) == (0, len(ids) + len(tokenizer.encode("é")))

    run(tokenizer, scenario)


def test_echoed_prompts_are_bounded_together(tokenizer, monkeypatch):
    """n times 8 MiB of prompts were one write, and held the event loop for as long."""
    monkeypatch.setattr("phalanx.server.requests.validate.MAX_ECHOED", 14)

    async def scenario(client, _):
        body = {"prompt": "the fox", "echo": True, "n": 2, "stream": True}
        answer = await client.post(URL["text"], json=body)
        assert answer.text.count("the fox") >= 2
        for prompt in ("the fox!", ["the fox", "a"], tokenizer.encode("the fox!")):
            refusal = (await client.post(URL["text"], json={**body, "prompt": prompt})).json()["error"]
            assert refusal["param"] == "echo"

    run(tokenizer, scenario)


def test_echoed_logprobs_line_up(tokenizer):
    """What lm-evaluation-harness reads: one entry per prompt token, the first null, offsets into the text."""

    async def scenario(client, engine):
        body = {"prompt": "the fox é", "echo": True, "logprobs": 1, "max_tokens": 1}
        (choice,) = (await client.post(URL["text"], json=body)).raise_for_status().json()["choices"]
        logprobs, n_prompt = choice["logprobs"], len(tokenizer.encode("the fox é"))
        assert {len(values) for values in logprobs.values()} == {n_prompt + 1}
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
            assert token == max(top, key=lambda name: top[name])
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
        assert logprobs["tokens"][-3:-1] == ["bytes:\\xc3", "bytes:\\xa9"]

    run(tokenizer, scenario)


def test_timing_only_on_request(tokenizer):
    async def scenario(client, engine):
        assert "timing" not in (await client.post(URL["chat"], json=CHAT)).json()
        timing = (await client.post(URL["chat"], json={**CHAT, "timing": True})).json()["timing"]
        assert set(timing) == {"queue", "prefill", "ttft", "tpot"}
        stream = await client.post(URL["chat"], json={**CHAT, "timing": True, "stream": True})
        timing = sse(stream.text)[-2]["timing"]
        assert 0 < timing["ttft"] <= timing["first_byte"]

    run(tokenizer, scenario)


def test_defaults_of_the_model(tokenizer):
    async def scenario(client, engine):
        await client.post(URL["chat"], json=CHAT)
        await client.post(URL["chat"], json={**CHAT, "temperature": 0.5})
        assert [m.request.sampling.temperature for m in engine.received] == [0.25, 0.5]

    run(tokenizer, scenario, defaults=GenerationDefaults(temperature=0.25))


def test_tokenize_and_back(tokenizer):
    async def scenario(client, engine):
        answer = (await client.post("/tokenize", json={"prompt": TEXT})).json()
        assert answer == {"tokens": tokenizer.encode(TEXT), "count": len(answer["tokens"]), "max_model_len": 512}
        assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": TEXT}
        chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert tokenizer.decode(chat["tokens"]).endswith("<assistant>")
        refused = await client.post("/detokenize", json={"tokens": [10**6]})
        assert refused.status_code == 400

    run(tokenizer, scenario)


def test_models(tokenizer):
    async def scenario(client, engine):
        answer = (await client.get("/v1/models")).json()
        assert [card["id"] for card in answer["data"]] == ["org/a", "b"]
        assert {card["max_model_len"] for card in answer["data"]} == {512}
        assert (await client.get("/v1/models/org/a")).json()["id"] == "org/a"
        assert (await client.get("/v1/models/c")).status_code == 404
        assert (await client.post(URL["chat"], json={**CHAT, "model": "b"})).json()["model"] == "b"
        refused = await client.post(URL["chat"], json={**CHAT, "model": "c"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")

    run(tokenizer, scenario, config=replace(CONFIG, served_model_name=("org/a", "b")))


def test_a_models_name_has_ollamas_tag_or_another_case_in_every_dialect(tokenizer):
    asked = {"max_tokens": 3, "stream": False}
    user = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/chat/completions": {**asked, "messages": user},
        "/v1/completions": {**asked, "prompt": "hello"},
        "/v1/messages": {**asked, "messages": user},
        "/v1/responses": {"input": "hello", "max_output_tokens": 16},
        "/api/chat": {"messages": user, "stream": False},
        "/api/generate": {"prompt": "hello", "stream": False},
        "/v1/messages/count_tokens": {"messages": user},
        "/tokenize": {"prompt": "hello"},
        "/api/show": {},
    }

    async def scenario(client, engine):
        for path, body in bodies.items():
            for name, meant in (("org/A:latest", "org/a"), ("B", "b"), ("B:Latest", "b"), ("b:latest", "b")):
                answer = await client.post(path, json={**body, "model": name})
                assert answer.status_code == 200, (path, name, answer.text)
                assert answer.json().get("model", meant) == meant
            assert (await client.post(path, json={**body, "model": "b:7b"})).status_code == 404, path
        for root in ("/v1/models", "/api/v0/models"):
            assert (await client.get(f"{root}/ORG/a:latest")).json()["id"] == "org/a"
            assert (await client.get(f"{root}/b:7b")).status_code == 404

    run(tokenizer, scenario, config=replace(CONFIG, served_model_name=("org/a", "b")))


def test_model_lists_are_those_of_the_client_that_asks(tokenizer):
    async def scenario(client, engine):
        listed = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert listed["has_more"] is False and listed["data"][0]["display_name"] == "tiny"
        card = (await client.get("/v1/models/tiny", headers={"user-agent": "mistral-client-python/3.7.0"})).json()
        assert card["type"] == "base" and card["max_context_length"] == 512
        (card,) = (await client.get("/api/v0/models")).json()["data"]
        assert (card["id"], card["state"], card["loaded_context_length"]) == ("tiny", "loaded", 512)
        assert (await client.get("/api/v0/models/tiny")).json() == card

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b'"x"', {}, 400),
        (b'{"messages": "\xff"}', {}, 400),
        (b'{"messages": NaN}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"max_tokens": 1' + b"0" * 5000 + b"}", {}, 400),
        (b'{"temperature": 1e999}', {}, 400),
        (b"[" * 200_000, {}, 400),
        (b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "", "origin": "null"}, 415),
        (b" " * 5000, {}, 413),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_bodies(tokenizer, content, headers, status):
    async def scenario(client, engine):
        limit = 5000 if status == 413 else 1 << 20
        assert limit
        for url in URL.values():
            response = await client.post(url, content=content, headers={"content-type": "application/json", **headers})
            assert response.status_code == status, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run(tokenizer, scenario, config=replace(CONFIG, max_body_mb=4096 / MIB if status == 413 else 1.0))


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_prompt_that_is_much_too_long_is_not_tokenised_whole(tokenizer, kind):
    async def scenario(client, engine):
        for length, found in [(1_000, "20"), (4_000, "has more"), (3_000_000, "has more")]:  # two tokens each
            text = "é" * length
            body = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
            response = await client.post(URL[kind], json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert found in error["message"] and "512" in error["message"]
        assert max(longest) < 2_000

    longest = []
    encode = tokenizer.encode

    class Watched:
        """The tokenizer, noting how long its texts are."""

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **options):
            longest.append(len(text))
            return encode(text, **options)

    run(Watched(), scenario, engine=fake_engine(tokenizer))


def test_a_chunked_body_is_cut_off_while_it_is_read(tokenizer):
    async def scenario(client, engine):
        assert await status_of_endless(client, URL["chat"], [b" " * 1000] * 10) == 413

    run(tokenizer, scenario, config=replace(CONFIG, max_body_mb=4096 / MIB))


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/nope", 404), ("GET", "/v1/chat/completions", 405), ("PUT", "/health", 405)],
)
def test_routes_that_are_not(tokenizer, method, url, status):
    async def scenario(client, engine):
        response = await client.request(method, url)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run(tokenizer, scenario)


def test_keys(tokenizer):
    async def scenario(client, engine):
        async def get(url, header=None):
            headers = {} if header is None else {"Authorization": header.encode()}
            return (await client.get(url, headers=headers)).status_code

        assert [await get(url) for url in ("/health", "/version", "/metrics")] == [200, 200, 401]
        assert await get("/metrics", "Bearer one") == 200
        assert [await get("/v1/models", f"Bearer {key}") for key in ("one", "zwei-ö")] == [200] * 2
        for wrong in (None, "one", "Basic one", "Bearer", "Bearer one2", "Bearer \xff", "Bearer one two"):
            assert await get("/v1/models", wrong) == 401
        for url in (*URL.values(), "/tokenize", "/detokenize", "/reset_prefix_cache"):
            refused = await client.post(url, json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), url
        for key in ("one", "zwei-ö"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            await client.post(URL["chat"], json=CHAT, headers=headers)
        salts = [m.request.owner for m in engine.received if isinstance(m, Submit)]
        assert len(set(salts)) == 2 and "" not in salts and not any("one" in salt for salt in salts)

    run(tokenizer, scenario, config=replace(CONFIG, api_key=("one", "zwei-ö")))


def test_metrics_can_be_open_where_the_rest_needs_a_key(tokenizer):
    async def scenario(client, engine):
        found = [(await client.get(url)).status_code for url in ("/metrics", "/v1/models")]
        assert found == [200, 401]

    run(tokenizer, scenario, config=replace(CONFIG, api_key=("one",), metrics_open=True))


def test_a_full_queue_is_429_with_both_retry_headers(tokenizer):
    async def scenario(client, engine):
        running = [asyncio.create_task(client.post(URL["chat"], json=CHAT)) for _ in range(3)]
        while len(engine.received) < 3:
            await asyncio.sleep(0)
        refused = await client.post(URL["chat"], json=CHAT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) * 1000 >= int(refused.headers["retry-after-ms"]) >= 1
        while not all(task.done() for task in running):
            engine.step()
            await asyncio.sleep(0)
        assert [task.result().status_code for task in running] == [200] * 3
        engine.crash()  # a different refusal
        assert (await client.post(URL["chat"], json=CHAT)).status_code == 503

    config = replace(CONFIG, engine=replace(CONFIG.engine, max_num_seqs=2), queue=1)
    engine = fake_engine(tokenizer, replying([5, 0]), manual=True)
    run(tokenizer, scenario, config=config, engine=engine)


def test_health_gives_the_reason(tokenizer):
    async def scenario(client, engine):
        async def health():
            response = await client.get("/health")
            return response.status_code, response.json()

        async def pinged():
            while "ranks" not in (found := await health())[1]:
                pass
            return found

        assert (await health())[0] == 503
        assert (await client.get("/v1/models")).status_code == 503
        engine.loading(3, 10)
        status, body = await health()
        assert (status, body["status"]) == (503, "loading")
        assert body["progress"] == {"phase": "weights", "done": 3, "total": 10}
        refused = await client.post(URL["chat"], json=CHAT)
        assert refused.status_code == 503 and "loading" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        engine.down_since(1_000_000_000)
        assert (await health())[1]["since"] == "2001-09-09T01:46:40+00:00"
        engine.become_ready()
        status, ready = await pinged()
        idle = {"running": 0, "waiting": 0, "limit": CONFIG.engine.max_num_seqs}
        assert (status, ready) == (
            200,
            {"status": "ok", "restarts": 0, "determinism_key": ready["determinism_key"], "requests": idle, "ranks": []},
        )
        engine.crash("killed by signal 9")
        assert (await health()) == (503, {"status": "restarting", "reason": "killed by signal 9", "restarts": 0})
        assert (await client.get("/v1/models")).status_code == 200
        engine.recover()
        assert (await pinged()) == (200, {**ready, "restarts": 1})
        now[0] += 100
        status, body = await health()
        assert (status, body["status"]) == (503, "stalled")
        engine.crash("bad", will_restart=False)
        assert (await health()) == (503, {"status": "failed", "reason": "bad", "restarts": 1})

    now = [0.0]
    run(tokenizer, scenario, engine=fake_engine(tokenizer, autostart=False, clock=lambda: now[0]))


@pytest.mark.parametrize("stream", [True, False])
def test_a_crash_does_not_break_an_answer(tokenizer, stream):
    async def scenario(client, engine):
        connection = Connection(client, URL["chat"], {**CHAT, "stream": stream})
        while not engine.received:
            await asyncio.sleep(0)
        engine.step()
        if stream:
            await connection.expect('"content":"h')
        engine.crash()
        if stream:
            await connection.expect(": keep-alive")
        await asyncio.sleep(0.05)
        assert not connection.task.done()
        engine.recover()
        while not connection.task.done():
            engine.step()
            await asyncio.sleep(0)
        if stream:
            chunks = sse(connection.text)[:-1]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        else:
            text = json.loads(connection.text)["choices"][0]["message"]["content"]
        assert text == TEXT

    engine = fake_engine(tokenizer, replying([*tokenizer.encode(TEXT), 0]), manual=True)
    run(tokenizer, scenario, engine=engine, config=replace(CONFIG, keepalive_seconds=0.01))


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_is_gone_is_an_error(tokenizer, stream):
    async def scenario(client, engine):
        task = asyncio.create_task(client.post(URL["chat"], json={**CHAT, "stream": stream}))
        while not engine.received:
            await asyncio.sleep(0)
        engine.step()
        await asyncio.sleep(0)
        engine.crash("no more memory", will_restart=False)
        response = await task
        if stream:
            *_, error, done = sse(response.text)
            assert done == "[DONE]"
        else:
            assert response.status_code == 500
            error = response.json()
        assert "no more memory" in error["error"]["message"]

    run(tokenizer, scenario, engine=fake_engine(tokenizer, manual=True))


LEAVING = {  # path -> a request of this dialect, and how many sequences it makes
    URL["chat"]: ({"messages": CHAT["messages"], "n": 2}, 2),
    URL["text"]: ({"prompt": "x", "n": 2}, 2),
    "/v1/messages": ({"messages": CHAT["messages"], "max_tokens": 99}, 1),
}


@pytest.mark.parametrize("path", LEAVING)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_client_that_leaves_is_cancelled_at_once(tokenizer, path, stream, steps):
    async def scenario(client, engine):
        body, n_sequences = LEAVING[path]
        connection = Connection(client, path, {**body, "stream": stream})
        while len(engine.received) < n_sequences:
            await asyncio.sleep(0)
        for _ in range(steps):
            engine.step()
            await asyncio.sleep(0)
        connection.left.set()
        await connection.task
        while client.app.journal.unfinished:
            await asyncio.sleep(0)
        cancelled = {m.id for m in engine.received if isinstance(m, Cancel)}
        assert cancelled == {m.request.id for m in engine.received if isinstance(m, Submit)}

    run(tokenizer, scenario, engine=fake_engine(tokenizer, manual=True))


def test_a_client_that_does_not_read_is_cancelled(tokenizer):
    async def scenario(client, engine):
        connection = Connection(client, URL["text"], {"prompt": "x", "stream": True, "max_tokens": 9000})
        while not engine.received:
            await asyncio.sleep(0)
        other = asyncio.create_task(client.post(URL["text"], json={"prompt": "x", "max_tokens": 5000}))
        while len(engine.received) < 2:
            await asyncio.sleep(0)
        connection.reading.clear()
        while not other.done():
            engine.step()
            await asyncio.sleep(0)
        assert [m.id for m in engine.received if isinstance(m, Cancel)] == [engine.received[0].request.id]
        assert other.result().status_code == 200
        connection.reading.set()
        await connection.task
        assert "reader" in sse(connection.text)[-2]["error"]["message"]

    engine = fake_engine(tokenizer, replying([5]), manual=True, info={"max_model_len": 10_000})

    async def main():
        app = create_app(CONFIG, engine, tokenizer)
        async with asyncio.timeout(60), served(app, send_buffer=FEW_BYTES) as client:
            await scenario(client, engine)

    asyncio.run(main())


def test_metrics(tokenizer):
    async def scenario(client, engine):
        await client.post(URL["chat"], json={**CHAT, "max_tokens": 3})
        text = (await client.get("/metrics")).text
        label = f'{{model_name="{MODEL}"}}'
        assert f"phalanx:generation_tokens_total{label} 3.0" in text
        assert f"phalanx:time_to_first_token_seconds_count{label} 1.0" in text
        assert f"phalanx:inter_token_latency_seconds_count{label} 2.0" in text
        assert f'phalanx:request_success_total{{finished_reason="length",model_name="{MODEL}"}} 1.0' in text
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prompt_tokens_total",
            "num_preemptions_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "e2e_request_latency_seconds_bucket",
            "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum",
            "request_decode_time_seconds_sum",
            "request_inference_time_seconds_sum",
            "request_prompt_tokens_sum",
            "request_generation_tokens_sum",
        ):
            assert f"phalanx:{name}{{" in text

    run(tokenizer, scenario)


def test_openapi_describes_the_bodies(tokenizer):
    async def scenario(client, engine):
        document = (await client.get("/openapi.json")).json()
        for path, kind in [("/v1/chat/completions", "ChatBody"), ("/tokenize", "TokenizeBody")]:
            body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body == {"$ref": f"#/components/schemas/{kind}"}
            assert "messages" in document["components"]["schemas"][kind]["properties"]
        assert not any(
            "422" in operation["responses"] for path in document["paths"].values() for operation in path.values()
        )
        routes = {(route.method, route.path) for route in client.app.application.router.routes}
        assert check_openapi(document) == routes
        assert {("POST", path) for path in (*GENERATE_ROUTES, *COUNTING)} | {("DELETE", "/api/delete")} <= routes

    run(tokenizer, scenario)
