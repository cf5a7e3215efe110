"""Anthropic's events: a grammar that every stream keeps, over answers cut anywhere."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import pytest
from support.messages_events import read_message

from phalanx.http.error_responses import Failure, messages_error
from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, Usage
from phalanx.server.answers.generation import join
from phalanx.server.dialects.messages.messages_format import MessagesFormat
from phalanx.types import Timing

HEAD = ResponseHead(id="msg_1", created=0, model="tiny", logprobs=False)
ANSWERS = 2000
BEFORE = Usage(prompt=10, completion=0)
AFTER = Usage(prompt=10, completion=7, cached=4)
FAILURE = Failure(status=503, type="service_unavailable_error", message="The engine is gone.")
OVERLOADED = {"type": "overloaded_error", "message": FAILURE.message}


def ending(reason="stop", **more) -> ChoiceEnding:
    return ChoiceEnding(reason=reason, n_tokens=7, cached_tokens=4, timing=Timing(), ttft_s=None, tpot_s=None, **more)


def parts(rng: random.Random) -> list[Delta]:
    """An answer in its smallest parts: blanks between them, several reasonings, calls of which some are void."""
    found, n_calls = [], 0
    for _ in range(rng.randrange(6)):
        kind = rng.choice(["text", "reasoning", "call", "blank"])
        if kind == "call":
            void = rng.random() < 0.3
            fragments = ['{"a', '": "\u2028', '"}'][: rng.randrange(4) if void else 3]
            found.append(Delta(index=0, calls=(CallDelta(index=n_calls, id=f"c{n_calls}", name="f"),)))
            found += [Delta(index=0, calls=(CallDelta(index=n_calls, arguments=text),)) for text in fragments]
            if void:
                found.append(Delta(index=0, calls=(CallDelta(index=n_calls, broken=True),), text="x"))
            n_calls += 1
        else:
            field = rng.choice(["text", "reasoning"]) if kind == "blank" else kind
            texts = ["\n", "  "] if kind == "blank" else ["one", " two ", "\n\nthree", "é\u2029"]
            found += [Delta(index=0, **{field: rng.choice(texts)}) for _ in range(rng.randrange(1, 4))]
    called = any(call.name for delta in found for call in delta.calls)
    return [*found, Delta(index=0, ending=ending("tool_calls" if called else rng.choice(["stop", "length"])))]


def cut(rng: random.Random, smallest: list[Delta]) -> list[Delta]:
    """The parts, some of them joined as for a client that reads slowly."""
    joined: list[list[Delta]] = [[]]
    for delta in smallest:
        joined[-1].append(delta)
        if rng.random() < 0.6:
            joined.append([])
    return [join(group) for group in joined if group]


def streamed(form: MessagesFormat, deltas: list[Delta], failure: Failure | None = None) -> bytes:
    events = form.opening(1, BEFORE) + b"".join(form.events([delta], BEFORE) or form.keep_alive for delta in deltas)
    return events + (form.closing(AFTER, None) if failure is None else form.failure(failure))


def texts(content, kind) -> str:
    return "".join(block[kind] for block in content if block["type"] == kind)


@pytest.mark.parametrize("thinking", ["shown", "omitted", "hidden"])
def test_every_stream_keeps_the_grammar_and_says_what_the_whole_answer_says(thinking):
    rng = random.Random(thinking)
    form = partial(MessagesFormat, HEAD, thinking)
    for _ in range(ANSWERS // 3 + 1):
        smallest = parts(rng)
        message = read_message(streamed(form(), cut(rng, smallest))).message
        whole = msgspec.json.decode(msgspec.json.encode(form().whole([join(smallest)], AFTER, None)))
        for kind in ("text", "thinking"):
            assert texts(message["content"], kind).strip() == texts(whole["content"], kind).strip()
        said = "".join(delta.reasoning for delta in smallest).strip()
        assert any(block["type"] == "thinking" for block in whole["content"]) == (thinking != "hidden" and said != "")
        assert (texts(whole["content"], "thinking").strip() == said) or thinking != "shown"
        calls = {block["id"]: block["input"] for block in message["content"] if block["type"] == "tool_use"}
        kept = {block["id"] for block in whole["content"] if block["type"] == "tool_use"}
        assert calls.keys() == kept  # a void call is never seen
        same = ("id", "model", "role", "stop_reason", "stop_sequence", "type", "usage")
        assert {name: message[name] for name in same} == {name: whole[name] for name in same}


def test_a_stream_that_fails_anywhere_ends_with_one_error():
    rng = random.Random(0)
    for _ in range(200):
        deltas = cut(rng, parts(rng))
        stream = streamed(MessagesFormat(HEAD, "shown"), deltas[: rng.randrange(len(deltas) + 1)], FAILURE)
        assert read_message(stream).error == OVERLOADED


def test_calls_of_a_stream_are_those_of_the_whole_answer():
    calls = [CallDelta(index=0, id="a", name="f"), CallDelta(index=0, arguments='{"x": 1}')]
    more = [CallDelta(index=1, id="b", name="g"), CallDelta(index=1, arguments="{}")]
    deltas = [Delta(index=0, calls=(call,)) for call in calls + more]
    deltas.append(Delta(index=0, ending=ending("tool_calls")))
    expected = [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    whole = MessagesFormat(HEAD, "shown").whole([join(deltas)], AFTER, None)
    assert msgspec.json.decode(msgspec.json.encode(whole))["content"] == expected
    for form in (deltas, [join(deltas)]):
        content = read_message(streamed(MessagesFormat(HEAD, "shown"), form)).message["content"]
        assert [{**block, "input": msgspec.json.decode(block["input"])} for block in content] == expected


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ending(), "end_turn", None),
        (ending("length"), "max_tokens", None),
        (ending("length", context_full=True), "model_context_window_exceeded", None),
        (ending("tool_calls"), "tool_use", None),
        (ending(stop_string="END"), "stop_sequence", "END"),
    ],
)
def test_why_an_answer_ended(end, reason, sequence):
    message = MessagesFormat(HEAD, "shown").whole([Delta(index=0, text="x", ending=end)], AFTER, None)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }


def test_a_signature_is_that_of_the_text_however_it_was_cut():
    signatures = set()
    for pieces in (["abc"], ["a", "bc"], ["a", "b", "c"]):
        deltas = [Delta(index=0, reasoning=piece) for piece in pieces] + [Delta(index=0, ending=ending())]
        (block,) = read_message(streamed(MessagesFormat(HEAD, "shown"), deltas)).message["content"]
        (whole,) = MessagesFormat(HEAD, "shown").whole([join(deltas)], AFTER, None)["content"]
        signatures |= {block["signature"], whole["signature"]}
    assert len(signatures) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_kinds_of_errors(status, kind):
    body = messages_error(Failure(status=status, type="x", message="Why."))
    assert body == {"type": "error", "error": {"type": kind, "message": "Why."}}
