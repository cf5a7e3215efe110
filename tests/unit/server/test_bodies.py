"""Bodies of the largest size: refused by name, after work and memory that are in proportion to their bytes."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from support.large_bodies import BLOCKS, CHAT, DETOKENIZE, LINES, RAW, RESPONSES, TEXT, TOKENIZE, attacks

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.messages.messages_dialect import MESSAGES as ANTHROPIC
from phalanx.server.dialects.ollama import ollama_dialect
from phalanx.server.dialects.responses.responses_dialect import RESPONSES as OPENAI_RESPONSES
from phalanx.server.fields.json_fields import FIELD_BYTES
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from phalanx.server.fields.refusals import MAX_DEPTH
from phalanx.server.requests.body_parsing import IDS_BYTES, parse_body

SIZE = 1 << 20
MAX_IDS = 1 << 19
KIND = {CHAT: ChatBody, TEXT: CompletionBody, TOKENIZE: TokenizeBody, DETOKENIZE: DetokenizeBody}
DIALECT = {BLOCKS: ANTHROPIC, RESPONSES: OPENAI_RESPONSES, LINES: ollama_dialect.CHAT, RAW: ollama_dialect.GENERATE}
MESSAGES = [{"role": "user", "content": "x"}]
NESTED = json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
VIDEO = {"type": "video_url", "video_url": {"url": "x"}}
CUSTOM = {"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}


def test_no_body_takes_memory_out_of_proportion():
    """An error per element took 600 times the bytes, an object per element takes 50 times."""
    refused = 0
    for attack in attacks(SIZE):
        tracemalloc.start()
        try:
            if (dialect := DIALECT.get(attack.route)) is not None:
                parse_body(attack.body, dialect.body, SIZE, dialect.readers)
            else:
                parse_body(attack.body, KIND[attack.route], SIZE)
        except InvalidRequest:
            refused += 1
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 * SIZE, attack.name
    assert refused > 25


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {}, "messages"),
        (ChatBody, {"messages": None}, "messages"),
        (ChatBody, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (ChatBody, {"messages": 7}, "messages"),
        (ChatBody, {"messages": [*MESSAGES, 7]}, "messages[1]"),
        (ChatBody, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": 7}]}]}, "messages[0].content[0].type"),
        (ChatBody, {"messages": MESSAGES, "stop": ["a", 7]}, "stop[1]"),
        (ChatBody, {"messages": MESSAGES, "stream_options": {"x": 1}}, "stream_options.x"),
        (ChatBody, {"messages": MESSAGES, "user": "u" * FIELD_BYTES}, "user"),
        (ChatBody, {"messages": MESSAGES, "tools": 7}, "tools"),
        (ChatBody, {"messages": MESSAGES, "metadata": {"a": NESTED}}, "metadata"),
        (ChatBody, {"messages": MESSAGES, "chat_template_kwargs": {"a": NESTED}}, "chat_template_kwargs"),
        (ChatBody, {"messages": MESSAGES, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        (ChatBody, {"messages": MESSAGES, "tools": [{"type": "function", "custom": {}}]}, "tools[0].function"),
        (ChatBody, {"messages": [{"role": "user", "content": [VIDEO]}]}, "messages[0].content[0].type"),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [CUSTOM]}]}, "messages[0].tool_calls[0].type"),
        (ChatBody, {"messages": MESSAGES, "response_format": {"type": "regex", "x": "a+"}}, "response_format.type"),
        (CompletionBody, {"prompt": ["a", 7]}, "prompt[1]"),
        (CompletionBody, {"prompt": [7, "a"]}, "prompt[1]"),
        (CompletionBody, {"prompt": [7] * IDS_BYTES + ["a"]}, f"prompt[{IDS_BYTES}]"),
        (CompletionBody, {"prompt": [[7], ["a"]]}, "prompt[1][0]"),
        (CompletionBody, {"prompt": [[7], "a"]}, "prompt[1]"),
        (DetokenizeBody, {"tokens": "x"}, "tokens"),
    ],
)
def test_the_wrong_field_is_named(kind, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps(fields).encode(), kind, MAX_IDS)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_field_that_is_there_twice_is_refused():
    for body in (b'{"prompt":"a","prompt":["b"]}', b'{"prompt":"a","x":null,"x":null}'):
        with pytest.raises(InvalidRequest, match="a field twice"):
            parse_body(body, CompletionBody, MAX_IDS)
    with pytest.raises(InvalidRequest, match=r"messages\[0\] has a field twice"):
        parse_body(b'{"messages":[{"role":"user","role":"user"}]}', ChatBody, MAX_IDS)


def test_null_and_colons_are_no_fields():
    fields = {
        "prompt": 'a: "b": {c:d}',
        "x": None,
        "stop": [":"],
        "stream_options": {"y": None},
        "metadata": {":": ":"},
    }
    assert parse_body(json.dumps(fields).encode(), CompletionBody, MAX_IDS) == CompletionBody(
        prompt=fields["prompt"], stop=[":"], stream_options=StreamOptions(), metadata={":": ":"}
    )


@pytest.mark.parametrize("n", [0, 1, 100_000])
@pytest.mark.parametrize("separators", [(",", ":"), (" , \n", " : ")])
def test_ids_in_pieces_are_the_ids(n, separators):
    ids = [i % 100_000 for i in range(n)]
    for fields in ({"prompt": ids}, {"prompt": [ids, [1]]}):
        body = json.dumps(fields, separators=separators).encode()
        assert parse_body(body, CompletionBody, MAX_IDS).prompt == fields["prompt"]


def test_ids_that_do_not_fit_are_counted_and_not_converted():
    """4 million ids as numbers took 50 ms in one call, and 10 times their bytes."""
    for fields in ({"prompt": [7] * 101}, {"prompt": [[7], [7] * 101]}, {"prompt": [7] * 100 + ["x"]}):
        with pytest.raises(InvalidRequest, match="maximum context length is 100 tokens") as caught:
            parse_body(json.dumps(fields).encode(), CompletionBody, 100)
        assert caught.value.code == "context_length_exceeded"
    assert parse_body(b'{"tokens":[' + b"7," * 99 + b"7]}", DetokenizeBody, 100).tokens == [7] * 100


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_a_request_without_a_body_is_told_so(body):
    with pytest.raises(InvalidRequest, match=r"The body is empty; send a JSON object\."):
        parse_body(body, ChatBody, SIZE)
