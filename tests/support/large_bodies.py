"""The largest bodies a client may send, of sixty kinds: the attacks of `unit/server/test_bodies.py` and `e2e`.

Each is about as long as asked for and costs a careless server much more than its bytes: an error, an object or a copy
per element, one call that holds the interpreter's lock, or work that grows with the square of a length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
BLOCKS, RESPONSES = "/v1/messages", "/v1/responses"
LINES, RAW = "/api/chat", "/api/generate"


class Attack(NamedTuple):
    """A body and what the server answers."""

    name: str
    route: str
    body: bytes
    status: int
    said: str
    """A part of the error's message."""


def attacks(size: int) -> Iterator[Attack]:
    """The attacks, one after the other, so that only one of them is in memory."""
    for name, route, make, status, said in KINDS:
        yield Attack(name, route, make(size), status, said)


def _filled(before: bytes, item: bytes, after: bytes) -> Callable[[int], bytes]:
    """As many of `item` as fit."""
    return lambda size: before + item * ((size - len(before) - len(after)) // len(item)) + after


def _numbered(before: bytes, item: str, after: bytes) -> Callable[[int], bytes]:
    """Items with a number each."""

    def make(size: int) -> bytes:
        n = (size - len(before) - len(after)) // (len(item.format(0)) + 6)
        return before + ",".join(item.format(i) for i in range(n)).encode() + after

    return make


def _closed(before: bytes, opening: bytes, closing: bytes, after: bytes) -> Callable[[int], bytes]:
    """Items inside each other."""

    def make(size: int) -> bytes:
        n = (size - len(before) - len(after)) // (len(opening) + len(closing))
        return before + opening * n + closing * n + after

    return make


def _text_of(text: str) -> Callable[[int], bytes]:
    """A prompt that repeats a text."""
    return _filled(b'{"prompt":"', json.dumps(text, ensure_ascii=False)[1:-1].encode(), b'"}')


M, U = b'{"messages":[', b'{"role":"user","content":"a"}'
IMAGE = b'{"type":"image_url","image_url":"'
X = b'{"role":"user","content":"a","x":'
P = b'{"prompt":"a","max_tokens":1,'
RESULT = b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":['
INPUT = b'{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{'
IN, OF = b'{"input":[', b'{"input":"a","tools":['
CALLED = b'{"model":"tiny","messages":[{"role":"assistant","tool_calls":['
OUTPUT = b'{"type":"function_call_output","output":['
ITEMS, PARSE, LONG = "more than 4096 items", "could not parse", "maximum context length"
BYTES, NAMES, DEEP = "bytes; at most", "unknown or there more than once", "nested too deeply"
KINDS: list[tuple[str, str, Callable[[int], bytes], int, str]] = [
    ("numbers for messages", TOKENIZE, _filled(M, b"1,", b"1]}"), 400, ITEMS),
    ("empty messages", CHAT, _filled(M, b"{},", b"{}]}"), 400, ITEMS),
    ("valid messages", CHAT, _filled(M, U + b",", U + b"]}"), 400, ITEMS),
    ("messages of wrong roles", CHAT, _filled(M, b'{"role":1},', b"1]}"), 400, ITEMS),
    ("parts", CHAT, _filled(M + b'{"role":"user","content":[', b'{"type":"text"},', b"1]}]}"), 400, ITEMS),
    ("strings for parts", CHAT, _filled(M + b'{"role":"user","content":[', b'"",', b'""]}]}'), 400, ITEMS),
    ("tool calls", CHAT, _filled(M + b'{"role":"user","tool_calls":[', b"[],", b"1]}]}"), 400, "tool_calls"),
    ("an image", CHAT, _filled(M + b'{"role":"user","content":[' + IMAGE, b"A", b'"}]}]}'), 400, "image_url"),
    ("an unknown text", CHAT, _filled(M + X + b'"', b"a: ", b'"}],"n":0}'), 400, "n must be"),
    ("an image in an unknown field", CHAT, _filled(M + X + b"[" + IMAGE, b"A", b'"}]}]}'), 400, "image_url"),
    ("names of content", CHAT, _filled(M + X + b"[", b'"file",', b'1]}],"n":0}'), 400, "n must be"),
    ("content that is null", CHAT, _filled(M + X + b"[", b'{"file":null},', b"1]}]}"), 400, NAMES),
    ("tools", CHAT, _filled(M + U + b'],"tools":[', b"{},", b"{}]}"), 400, BYTES),
    ("template variables", CHAT, _filled(M + U + b'],"chat_template_kwargs":{"a":[', b"[],", b"1]}}"), 400, BYTES),
    ("a long role", CHAT, _filled(M + b'{"content":"a","role":"', b"x", b'"}]}'), 400, BYTES),
    ("floats for ids", TEXT, _filled(b'{"prompt":[', b"1.5,", b"1]}"), 400, LONG),
    ("ids", TEXT, _filled(b'{"prompt":[', b"123,", b"1]}"), 400, LONG),
    ("ids, the last one wrong", TEXT, _filled(b'{"prompt":[', b"7,", b'"x"]}'), 400, LONG),
    ("ids with spaces", TEXT, _filled(b'{"prompt":[', b"7 ,  ", b"1]}"), 400, LONG),
    ("negative ids", TEXT, _filled(b'{"prompt":[', b"-1,", b"1]}"), 400, LONG),
    ("texts", TEXT, _filled(b'{"prompt":[', b'"a",', b'"a"]}'), 400, "more than 1024 items"),
    ("lists of ids", TEXT, _filled(b'{"prompt":[', b"[1],", b"[1]]}"), 400, "more than 1024 items"),
    ("one list of ids in a list", TEXT, _filled(b'{"prompt":[[', b"1,", b"1]]}"), 400, LONG),
    ("objects for texts", TEXT, _filled(b'{"prompt":[', b"{},", b"{}]}"), 400, LONG),
    ("nested", TEXT, _filled(b'{"prompt":', b"[", b""), 400, DEEP),
    ("nested, closed", TEXT, lambda size: b'{"user":' + b"[" * (size // 2 - 9) + b"]" * (size // 2 - 9), 400, DEEP),
    ("objects in objects", TEXT, _filled(b"", b'{"prompt":', b""), 400, DEEP),
    ("spaces", TEXT, _filled(b'{"prompt":"a"', b" ", b""), 400, PARSE),
    ("a number of millions of digits", TEXT, _filled(P + b'"seed":', b"7", b"}"), 400, BYTES),
    ("an id of millions of digits", TEXT, _filled(b'{"prompt":[', b"7", b"]}"), 400, "between two commas"),
    ("unknown fields", TEXT, _numbered(P, '"x{}":1', b"}"), 400, NAMES),
    ("unknown fields that are null", TEXT, _numbered(P, '"x{}":null', b"}"), 400, NAMES),
    ("the same field again and again", TEXT, _filled(P, b'"n":1,', b'"n":1}'), 400, NAMES),
    ("biases", TEXT, _numbered(P + b'"logit_bias":{', '"{}":1', b"}}"), 400, BYTES),
    ("stop strings", TEXT, _filled(P + b'"stop":[', b'"a",', b'"a"]}'), 400, BYTES),
    ("one stop string", TEXT, _filled(P + b'"stop":"', b"a", b'"}'), 400, BYTES),
    ("stop ids", TEXT, _filled(P + b'"stop_token_ids":[', b"1,", b"1]}"), 400, BYTES),
    ("metadata", TEXT, _numbered(P + b'"metadata":{', '"{}":[[]]', b"}}"), 400, BYTES),
    ("bytes that are no text", TEXT, _filled(b'{"prompt":"', b"\xff", b'"}'), 400, PARSE),
    ("halves of characters", TEXT, _filled(b'{"prompt":"', b"\\ud800 ", b'"}'), 400, PARSE),
    ("letters", TEXT, _text_of("é"), 400, LONG),
    ("escaped letters", TEXT, _filled(b'{"prompt":"', b"\\u00e9", b'"}'), 400, LONG),
    ("words", TOKENIZE, _text_of("hello world 12, "), 400, LONG),
    ("colons", TEXT, _text_of('":"'), 400, LONG),
    ("a long message", CHAT, _filled(M + b'{"role":"user","content":"', b"a 1", b'"}]}'), 400, LONG),
    ("ids to text", DETOKENIZE, _filled(b'{"tokens":[', b"1,", b"1]}"), 400, LONG),
    ("empty blocks", BLOCKS, _filled(M + b'{"role":"user","content":[', b"{},", b"{}]}]}"), 400, ITEMS),
    ("blocks of results", BLOCKS, _filled(M + RESULT, b'{"type":"text"},', b"{}]}]}]}"), 400, ITEMS),
    ("blocks in blocks", BLOCKS, _filled(M + RESULT, b'{"type":"text","content":[', b""), 400, DEEP),
    ("blocks in blocks, closed", BLOCKS, _closed(M + RESULT, b'{"content":[', b"]}", b"]}]}]}"), 400, DEEP),
    ("names that no dialect knows", BLOCKS, _numbered(M + U + b"],", '"x{}":1', b"}"), 400, "max_tokens"),
    ("a known one, again and again", BLOCKS, _filled(M + U + b"],", b'"top_k":1,', b'"top_k":1}'), 400, "max_tokens"),
    ("unknown values", BLOCKS, _numbered(M + U + b'],"x":{', '"{}":[[]]', b"}}"), 400, "max_tokens"),
    ("unknown values in a block", BLOCKS, _numbered(M + RESULT + b'{"x":{', '"{}":[]', b"}}]}]}]}"), 400, "type"),
    ("the input of a call", BLOCKS, _numbered(M + INPUT, '"{}":[]', b"}}]}]}"), 400, BYTES),
    ("tools with blocks", BLOCKS, _filled(M + U + b'],"tools":[', b"{},", b"{}]}"), 400, BYTES),
    ("empty items", RESPONSES, _filled(IN, b"{},", b"{}]}"), 400, ITEMS),
    ("parts of an output", RESPONSES, _filled(IN + OUTPUT, b'{"type":"input_text"},', b"{}]}]}"), 400, ITEMS),
    ("items in items, closed", RESPONSES, _closed(IN, b'{"content":[', b"]}", b"]}"), 400, DEEP),
    ("unknown values in an item", RESPONSES, _numbered(IN + b'{"x":{', '"{}":[]', b"}}]}"), 400, "input[0].type"),
    ("namespaces in namespaces", RESPONSES, _closed(OF, b'{"tools":[', b"]}", b"]}"), 400, DEEP),
    ("metadata of a client", RESPONSES, _numbered(OF[:-9] + b'"client_metadata":{', '"{}":[]', b'},"n":1}'), 400, "n"),
    ("messages of lines", LINES, _filled(b'{"model":"tiny","messages":[', b"{},", b"{}]}"), 400, ITEMS),
    ("calls of a message", LINES, _filled(CALLED, b"{},", b"{}]}]}"), 400, "more than 256 items"),
    ("unknown options", LINES, _numbered(b'{"options":{', '"x{}":1', b'},"model":5}'), 400, "model"),
    ("how long a model is kept", LINES, _numbered(b'{"keep_alive":{', '"{}":[]', b'},"model":5}'), 400, "model"),
    ("a format", LINES, _numbered(b'{"model":"tiny","format":{', '"{}":[]', b"}}"), 400, BYTES),
    ("a context of tokens", RAW, _filled(b'{"model":"tiny","prompt":"a","context":[', b"1,", b"1]}"), 400, "context"),
    ("arguments in the history", RESPONSES, _filled(IN + b'{"arguments":"', b"a", b'"}]}'), 400, "characters; at most"),
    ("one byte too many", TEXT, lambda size: _text_of("a")(size) + b" " * (size + 1), 413, "larger than"),
]  # fmt: skip


def valid(size: int) -> Iterator[Attack]:
    """Large requests that are answered: `size` bytes of prompt, or a field at its cap."""
    few = size // 40
    fields = {
        "biases": {"logit_bias": {str(i): 1 for i in range(256)}},
        "stop strings": {"stop": ["ab" * 127 + str(i) for i in range(15)], "n": 16, "seed": 1},
        "stop ids": {"stop_token_ids": list(range(1, 256)), "min_tokens": 1},
        "log-probabilities": {"logprobs": 20, "n": 16, "echo": True},
    }
    for name, more in fields.items():
        yield _valid(name, TEXT, {"prompt": "hello world", "max_tokens": 2, **more})
    yield _valid("a long prompt", TEXT, {"prompt": "hello world " * (size // 12), "max_tokens": 2})
    yield _valid("a long prompt of one word", TEXT, {"prompt": "helloworld" * (size // 20), "max_tokens": 2})
    yield _valid("ids", TEXT, {"prompt": [7] * (size // 4), "max_tokens": 2})
    yield _valid("an echo", TEXT, {"prompt": [7] * few, "max_tokens": 0, "echo": True, "logprobs": 1})
    yield _valid("an echoed stream", TEXT, {"prompt": [7] * few, "max_tokens": 1, "echo": True, "logprobs": 1,
                                            "stream": True})  # fmt: skip
    message, part = {"role": "user", "content": "hello world"}, {"type": "text", "text": "hello"}
    yield _valid("messages", CHAT, {"messages": [message] * 4096, "max_tokens": 2})
    yield _valid("parts", CHAT, {"messages": [{"role": "user", "content": [part] * 4096}], "max_tokens": 2})
    yield _valid(
        "a long message", CHAT, {"messages": [{**message, "content": "hello " * (size // 6)}], "max_tokens": 2}
    )
    block = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "novel": [1] * (size // 50_000)}
    message = {"role": "user", "content": [block] * 4096}
    yield _valid("blocks", BLOCKS, {"messages": [message], "max_tokens": 2, "novel": {"a": "x" * size}})
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "hello", "novel": [1] * (size // 50_000)}] * 4096,
    }
    yield _valid("parts", RESPONSES, {"input": [item], "max_output_tokens": 2, "client_metadata": {"a": "x" * size}})
    yield _valid("texts of tokens", TOKENIZE, {"prompt": "hello world " * (size // 12), "return_token_strs": True})
    yield _valid("ids to text", DETOKENIZE, {"tokens": [7] * (size // 4)})


def _valid(name: str, route: str, fields: dict[str, object]) -> Attack:
    return Attack(f"valid: {name}", route, json.dumps(fields).encode(), 200, "")
