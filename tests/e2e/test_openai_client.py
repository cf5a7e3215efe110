"""The real `openai` client against a real server: chat, streams, completions, logprobs, n, stop, errors, cancelling."""

from __future__ import annotations

import time
from contextlib import suppress

import httpx
import openai
import pytest
from support.serving import MODEL, Running

MESSAGES = [{"role": "user", "content": "hello there"}]
LONG = {"model": MODEL, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
SHORT = {**LONG, "max_tokens": 24, "seed": 3}


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert model.max_model_len >= 512


def test_chat(client):
    answer = client.chat.completions.create(**SHORT)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_stream_is_the_same_text(client):
    whole = client.chat.completions.create(**SHORT).choices[0].message.content
    stream = list(client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}))
    assert text_of(stream) == whole
    assert stream[0].choices[0].delta.role == "assistant"
    assert stream[-1].choices == [] and stream[-1].usage.completion_tokens == 24
    assert stream[-2].choices[0].finish_reason == "length"


def test_the_streaming_helper(client):
    """The SDK's own accumulator is strict about the order of chunks."""
    text = client.chat.completions.create(**SHORT).choices[0].message.content
    with client.chat.completions.stream(**SHORT, stop=text[-2:]) as stream:  # it raises on finish_reason "length"
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[-2:])]


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["hello", "the fox"], max_tokens=5, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = {}
    for chunk in client.completions.create(model=MODEL, prompt="hello", max_tokens=9, seed=1, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=9, seed=1, n=2)
    assert streamed == {choice.index: choice.text for choice in whole.choices}


def test_token_ids_and_echo(client, server):
    ids = httpx.post(f"{server.origin}/tokenize", json={"prompt": "hello there"}, timeout=60).json()["tokens"]
    by_text = client.completions.create(model=MODEL, prompt="hello there", max_tokens=6, temperature=0, echo=True)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, temperature=0, echo=True)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_text.choices[0].text.startswith("hello there")


def test_echoed_logprobs(client):
    answer = client.completions.create(model=MODEL, prompt="hello there", max_tokens=1, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:])
    scored = client.completions.create(model=MODEL, prompt="hello there", max_tokens=0, echo=True, logprobs=2)
    assert scored.choices[0].text == "hello there"
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]


def test_a_prompt_of_one_token_is_echoed_with_its_place(client):
    """It has nothing to score: the model predicts no first token."""
    answer = client.completions.create(model=MODEL, prompt=[5], max_tokens=1, echo=True, logprobs=1, temperature=0)
    only = client.completions.create(model=MODEL, prompt=[5], max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].logprobs.token_logprobs[0] is None and len(answer.choices[0].logprobs.tokens) == 2
    assert only.choices[0].text and answer.choices[0].text.startswith(only.choices[0].text)
    assert only.choices[0].logprobs.token_logprobs == [None]


def test_logprobs(client):
    answer = client.chat.completions.create(**SHORT, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 24
    data = b"".join(bytes(entry.bytes) for entry in content)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )


def test_n(client):
    answer = client.chat.completions.create(**SHORT, n=3)
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 3
    assert texts[0] == client.chat.completions.create(**SHORT).choices[0].message.content


def test_stop(client):
    text = client.chat.completions.create(**SHORT).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    stopped = client.chat.completions.create(**SHORT, stop=[stop, "never"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.usage.completion_tokens < 24
    assert text_of(client.chat.completions.create(**SHORT, stop=stop, stream=True)) == text[: text.index(stop)]


def test_logit_bias_forces_a_token(real_server):
    client = openai.OpenAI(base_url=real_server.base_url, api_key="none", max_retries=0, timeout=120)
    token = httpx.post(f"{real_server.origin}/tokenize", json={"prompt": "h"}, timeout=60).json()["tokens"][0]
    answer = client.chat.completions.create(**{**SHORT, "max_tokens": 3}, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "hhh"


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "fox " * 20_000}]}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (openai.BadRequestError, {"extra_body": {"frobnicate": True}}),
    ],
    ids=["model", "range", "empty", "context", "tools", "unknown"],
)
def test_errors(client, error, fields):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**SHORT, **fields})
    assert caught.value.body["message"]


def test_cancelling_frees_the_row(client, server):
    stream = client.chat.completions.create(**LONG, stream=True)
    next(stream)
    stream.close()
    wait_until_idle(server)


def test_leaving_before_the_answer_frees_the_row(server):
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "n": 16}
    for _ in range(20):  # a busy machine may see the answer before it can leave
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{server.base_url}/completions", json=body, timeout=httpx.Timeout(120, read=0.05))
            continue
        break
    else:
        pytest.fail("the answer always came in time")
    wait_until_idle(server)


def wait_until_idle(server: Running) -> None:
    """Nothing holds a seat, neither in the journal nor in the engine."""
    label = f'{{model_name="{MODEL}"}} 0.0'
    for _ in range(600):
        text = httpx.get(f"{server.origin}/metrics", timeout=60).text
        gauges = all(f"phalanx:num_requests_{name}{label}" in text for name in ("running", "waiting"))
        if server.call(lambda: server.server.app.journal.unfinished) == 0 and gauges:
            return
        time.sleep(0.1)
    pytest.fail(text)
