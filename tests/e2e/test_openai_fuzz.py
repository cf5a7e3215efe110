"""Malformed and hostile requests: never a 500, and a stream that runs beside them loses nothing.

Requests come from three places: the OpenAPI description (schemathesis), values of wrong kinds in right places
(hypothesis), and bytes nobody should send.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.dialects import MESSAGES, OLLAMA, RESPONSES
from support.examples import SOAK
from support.serving import MODEL, Running, sse

EXAMPLES = 2000 if SOAK else 200  # per test
ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
OTHERS = {  # path -> its dialect, and what limits an answer there
    "/v1/responses": (RESPONSES, {"max_output_tokens": 2}),
    "/v1/responses/input_tokens": (RESPONSES, {}),
    "/v1/messages": (MESSAGES, {"max_tokens": 2}),
    "/v1/messages/count_tokens": (MESSAGES, {}),
    "/api/chat": (OLLAMA, {"options": {"num_predict": 2}}),
    "/api/generate": (OLLAMA, {"options": {"num_predict": 2}}),
    "/api/show": (OLLAMA, {}),
}
JSON = {"content-type": "application/json"}
pytestmark = pytest.mark.grows
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 1, 16, 2**31, 2**63, 2**64, 10**40, 1e308, 1e-320])
)
text = st.one_of(st.text(max_size=30), st.sampled_from(["", "\x00", "\u202e", "<eos>", "{{ 7*7 }}", "a" * 5000]))
scalars = st.one_of(st.none(), st.booleans(), numbers, text)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)),
    max_leaves=8,
)
FIELDS = [
    *("model messages prompt max_tokens max_completion_tokens n stream stream_options seed temperature top_p").split(),
    *("top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias stop stop_token_ids").split(),
    *("ignore_eos min_tokens skip_special_tokens include_stop_str_in_output timeout timing logprobs").split(),
    *("top_logprobs echo suffix best_of tools tool_choice response_format chat_template_kwargs tokens").split(),
    *("structured_outputs guided_json guided_regex guided_choice guided_grammar").split(),
    *("add_generation_prompt continue_final_message reasoning_effort metadata user modalities").split(),
    *("thinking reasoning enable_thinking thinking_budget usage prediction safe_prompt").split(),
]
hostile = st.sampled_from(
    [
        b"",
        b"null",
        b"{",
        b'{"messages":' * 1000,
        b"[" * 50_000,
        b"\xff\xfe",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\\u0000"}',
        b'{"n":1e999}',
        b'{"n":' + b"9" * 5000 + b"}",
        b'{"a":NaN}',
        b'{"":{"":{"":[]}}}',
        b'{"prompt":"a","prompt":["b"]}',
    ]
)


@pytest.fixture
def http(fake_server: Running):
    with httpx.Client(base_url=fake_server.origin, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def stream_beside(fake_server: Running):
    """A stream that runs while the others are sent, and must arrive whole."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}
    url = f"{fake_server.base_url}/chat/completions"
    with httpx.stream("POST", url, json={**body, "ignore_eos": True}, timeout=120) as response:
        lines = response.iter_text()
        first = next(lines)
        yield
        events = sse(first + "".join(lines))
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    assert httpx.get(f"{fake_server.origin}/health", timeout=60).status_code == 200


def check(response: httpx.Response) -> None:
    """An answer, or the client's own mistake in OpenAI's words."""
    assert response.status_code < 500, (response.request.content[:2000], response.text)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert sse(response.text)[-1] == "[DONE]"


def small(body: dict[str, Any]) -> dict[str, Any]:
    """Bodies that are valid by chance must not generate for long."""
    return {**body, "max_tokens": 2} if body.get("max_tokens") is None else body


@pytest.mark.soak  # one wrong field at a time is below, several in `test_dialect_fuzz.py`, other routes by description
def test_values_of_any_kind(http):
    base = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}

    @FUZZ
    @given(st.sampled_from(ROUTES), st.dictionaries(st.sampled_from(FIELDS), values, max_size=4), st.booleans())
    def send(route, fields, complete):
        body = small({**(base if complete else {}), **fields})
        if route.startswith("/v1/"):
            body.pop("prompt" if "chat" in route else "messages", None) if complete else None
        content = json.dumps(body, allow_nan=True).encode("utf-8", "replace")
        check(http.post(route, content=content, headers=JSON))

    send()


def test_one_wrong_field_at_a_time(http):
    @FUZZ
    @given(st.sampled_from(ROUTES[:2]), st.sampled_from(FIELDS), values)
    def send(route, field, value):
        base = {"messages": [{"role": "user", "content": "x"}]} if "chat" in route else {"prompt": "x"}
        content = json.dumps(small({**base, field: value})).encode("utf-8", "replace")
        check(http.post(route, content=content, headers=JSON))

    send()


def test_bytes_headers_and_methods(http):
    media = st.sampled_from(["application/json", "application/json; charset=latin-1", "text/plain", "", "a/b/c"])
    headers = st.dictionaries(
        st.sampled_from(["authorization", "accept", "x-request-id", "expect", "cookie"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30),
        max_size=2,
    )
    paths = st.one_of(
        st.sampled_from([*ROUTES, "/v1/models", "/v1/models/x", "/health", "/metrics", "/version", "/openapi.json"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#\\"), max_size=20).map(
            lambda path: "/" + path.lstrip("/")
        ),
    )

    @FUZZ
    @given(st.sampled_from(["POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS"]), paths, media, headers, st.data())
    def send(method, path, kind, more, data):
        content = data.draw(st.one_of(hostile, st.binary(max_size=60)))
        response = http.request(method, path, content=content, headers={"content-type": kind, **more})
        if "openapi" not in path and "docs" not in path:
            check_any(response)

    def check_any(response: httpx.Response) -> None:
        assert response.status_code < 500, (response.request, response.text)
        if response.status_code >= 400 and response.headers.get("content-type") == "application/json":
            assert "error" in response.json()

    send()


@pytest.mark.parametrize("route", [*ROUTES, *OTHERS])
def test_the_openapi_description(fake_server, http, route):
    """What the description allows, and what it forbids (schemathesis makes both)."""
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    operation = schema[route]["POST"]

    @settings(FUZZ, max_examples=EXAMPLES // (20 if route in OTHERS else 10))
    @given(operation.as_strategy())
    def allowed(case):
        if route in OTHERS:
            spoken, limit = OTHERS[route]
            body = {**case.body, **limit} if isinstance(case.body, dict) else case.body
            spoken.check(route, http.post(route, content=json.dumps(body).encode("utf-8", "replace"), headers=JSON))
            return
        body = small(case.body) if isinstance(case.body, dict) else case.body
        check(http.post(route, content=json.dumps(body).encode("utf-8", "replace"), headers=JSON))

    allowed()


def test_many_hostile_requests_at_once(fake_server):
    """Big and slow to refuse, together: the loop must stay responsive."""

    async def main() -> None:
        bodies = [
            b'{"prompt":"' + b"a" * 300_000 + b'"}',
            b'{"prompt":[' + b"1," * 100_000 + b"1]}",
            json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(20_000)}}).encode(),
            json.dumps({"messages": [{"role": "user", "content": "x"}] * 5000}).encode(),
        ]
        async with httpx.AsyncClient(base_url=fake_server.origin, timeout=120) as client:
            sends = [client.post(route, content=body, headers=JSON) for body in bodies for route in ROUTES[:2]]
            for response in await asyncio.gather(*sends):
                check(response)

    asyncio.run(main())
