"""The events and the object of a response: every stream obeys the grammar, and says what its deltas say."""

from __future__ import annotations

import json
from random import Random

import pytest
from msgspec.structs import replace
from support.responses_events import StreamGrammar, check_stream, parse_stream, text_of

from phalanx.http.error_responses import Failure
from phalanx.server.answers.deltas import (
    CallDelta,
    ChoiceEnding,
    Delta,
    ResponseHead,
    ScoredToken,
    TokenText,
    Usage,
)
from phalanx.server.answers.generation import join
from phalanx.server.dialects.responses.responses_format import ResponseOptions, ResponsesFormat
from phalanx.server.dialects.responses.responses_items import ToolItem, seal, unseal
from phalanx.server.fields.json_pieces import to_json
from phalanx.types import Timing

HEAD = ResponseHead(id="resp_0", created=7, model="tiny", logprobs=False)
OPTIONS = ResponseOptions(echoed={"store": False}, tools={"note": ToolItem(name="note", custom=True)})
USAGE = Usage(prompt=5, completion=9, cached=3, reasoning=2)
STOP = ChoiceEnding(reason="stop", n_tokens=9, cached_tokens=3, timing=Timing(), ttft_s=None, tpot_s=None)
LENGTH = replace(STOP, reason="length")


def text(value, **fields):
    return Delta(index=0, text=value, **fields)


def thought(value):
    return Delta(index=0, reasoning=value)


def call(number, arguments="", name="", **fields):
    part = CallDelta(index=number, id=f"id{number}" if name else "", name=name, arguments=arguments, **fields)
    return Delta(index=0, calls=(part,))


def end(ending=STOP):
    return Delta(index=0, ending=ending)


def streamed(deltas, *, options=OPTIONS, head=HEAD):
    form = ResponsesFormat(head, options)
    parts = [form.opening(1, None)]
    for delta in deltas:
        parts.append(form.events([delta], None))
    return b"".join([*parts, form.closing(USAGE, None)])


def whole(deltas, options=OPTIONS, head=HEAD):
    return json.loads(to_json(ResponsesFormat(head, options).whole([join(deltas)], USAGE, None)))


def said(items):
    return [(item["type"], text_of(item)) for item in items]


# Sequences of events ------------------------------------------------------------------------------------------------


def test_all_events_of_reasoning_a_text_and_a_call():
    deltas = [thought("Hm"), thought("."), text("I "), text("look."), call(0, "", "now"), call(0, "{}"), end()]
    names = [event["type"].removeprefix("response.") for event in parse_stream(streamed(deltas))]
    part = ["content_part.added", "{0}.delta", "{0}.delta", "{0}.done", "content_part.done"]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", *(name.format("reasoning_text") for name in part), "output_item.done"),
        *("output_item.added", *(name.format("output_text") for name in part), "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_the_end_has_output_and_usage():
    deltas = [thought("Hm."), text("I look."), call(0, '{"a":', "now"), call(0, "1}"), call(1, "{}", "then"), end()]
    response = check_stream(streamed(deltas)).finish()
    assert said(response["output"]) == [
        ("reasoning", "Hm."),
        ("message", "I look."),
        ("function_call", '{"a":1}'),
        ("function_call", "{}"),
    ]
    assert [item.get("call_id") for item in response["output"]] == [None, None, "id0", "id1"]
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    assert response["store"] is False and response["created_at"] == 7 and response["model"] == "tiny"


@pytest.mark.parametrize("deltas", [[text("Hel"), text("lo")], [thought("Hm"), thought(".")]])
def test_an_answer_that_is_cut_is_incomplete(deltas):
    response = check_stream(streamed([*deltas, end(LENGTH)])).finish()
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"


def test_a_whole_call_at_the_limit_is_whole():
    response = check_stream(streamed([call(0, "{}", "now"), end(LENGTH)])).finish()
    assert response["status"] == "incomplete" and response["output"][0]["status"] == "completed"


def test_a_broken_call_is_no_output_and_its_text_is():
    broken = Delta(index=0, text='{"a"', calls=(CallDelta(index=0, broken=True),), ending=LENGTH)
    grammar = check_stream(streamed([call(0, '{"a"', "now"), broken]))
    assert [item["status"] for item in grammar.done] == ["incomplete", "incomplete"]
    assert said(grammar.finish()["output"]) == [("message", '{"a"')]
    assert said(whole([call(0, '{"a"', "now"), broken])["output"]) == [("message", '{"a"')]


def test_an_answer_without_text_is_an_empty_message():
    for deltas in ([end()], [thought("Hm."), end()]):
        assert said(check_stream(streamed(deltas)).finish()["output"])[-1] == ("message", "")
    assert check_stream(streamed([end(LENGTH)])).finish()["output"] == []


def test_a_failure_ends_the_stream_and_keeps_what_is_done():
    form = ResponsesFormat(HEAD, OPTIONS)
    data = form.opening(1, None) + form.events([call(0, "{}", "now")], None) + form.events([text("It r")], None)
    data += form.failure(Failure(status=503, type="x", message="gone"))
    response = check_stream(data).finish()
    assert response["status"] == "failed" and response["error"] == {"code": "server_error", "message": "gone"}
    assert said(response["output"]) == [("function_call", "{}")]  # a half text is none


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure(status=400, type="x", message="m", code="context_length_exceeded"), "context_length_exceeded"),
        (Failure(status=429, type="x", message="m", code="rate_limit_exceeded"), "rate_limit_exceeded"),
        (Failure(status=400, type="x", message="m"), "invalid_prompt"),
        (Failure(status=500, type="x", message="m"), "server_error"),
    ],
)
def test_codes_of_failures(failure, code):
    form = ResponsesFormat(HEAD, OPTIONS)
    assert check_stream(form.opening(1, None) + form.failure(failure)).finish()["error"]["code"] == code


def test_keep_alives_are_numbered_events():
    form = ResponsesFormat(HEAD, OPTIONS)
    assert form.events([text("")], None) == b""  # the caller waits a while, and then sends `keep_alive`
    data = form.opening(1, None) + form.keep_alive + form.keep_alive
    assert [event["sequence_number"] for event in parse_stream(data)] == [0, 1, 2, 3]
    assert [event["type"] for event in parse_stream(data)][2:] == ["keepalive"] * 2


# Forms of items -----------------------------------------------------------------------------------------------------


def test_reasoning_as_a_summary_and_sealed():
    wish = replace(OPTIONS, summary=True, sealed=True)
    grammar = check_stream(streamed([thought("Hm"), thought("."), text("A"), end()], options=wish))
    (item, _) = grammar.finish()["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm."}] and "content" not in item
    assert unseal(item["encrypted_content"]) == "Hm."


@pytest.mark.parametrize("value", ["", "gAAAAA", "phalanx-1:", "phalanx-1:!", "phalanx-1:/w=="])
def test_what_this_server_did_not_seal_is_not_read(value):
    assert not unseal(value)
    assert unseal(seal("é\ud7ff")) == "é\ud7ff"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 1}', '{"input": 1}'),
        ('{"input": "a\\ud800", "timeout": 1e999}', "a?"),
    ],
)
def test_a_custom_call_has_its_input_in_one_piece(arguments, given):
    deltas = [call(0, arguments[:5], "note"), call(0, arguments[5:]), end()]
    grammar = check_stream(streamed(deltas))
    (item,) = grammar.finish()["output"]
    assert (item["type"], item["name"], item["call_id"], item["input"]) == ("custom_tool_call", "note", "id0", given)
    assert whole(deltas)["output"] == grammar.finish()["output"]


def test_a_call_of_a_namespace_is_named_as_the_client_does():
    wish = replace(OPTIONS, tools={"agents__close": ToolItem(name="close", namespace="agents")})
    (item,) = check_stream(streamed([call(0, "{}", "agents__close"), end()], options=wish)).finish()["output"]
    assert (item["name"], item["namespace"]) == ("close", "agents")


def scored(value, logprob):
    return ScoredToken(TokenText(value, value.encode(), logprob), logprob, (TokenText("b", b"b", -1.0),), 0)


def test_log_probabilities_come_with_the_text_and_are_collected():
    first, second, last = scored("A", -0.5), scored("B", float("-inf")), scored("C", -0.25)
    deltas = [text("", scored=(first,)), text("AB", scored=(second,)), text("C", scored=(last,)), end()]
    head = replace(HEAD, logprobs=True)
    data = streamed(deltas, head=head)
    sent = [event["logprobs"] for event in parse_stream(data) if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in entries] for entries in sent] == [["A", "B"], ["C"]]
    (item,) = check_stream(data).finish()["output"]
    assert item["content"][0]["logprobs"] == [entry for entries in sent for entry in entries]
    assert item["content"][0]["logprobs"][1]["logprob"] == -9999.0
    assert sent[0][0]["top_logprobs"] == [{"token": "b", "logprob": -1.0, "bytes": [98]}]
    assert whole(deltas, head=head)["output"] == [item]


def test_extensions_are_beside_the_usage():
    form = ResponsesFormat(HEAD, OPTIONS)
    detail = replace(LENGTH, detail="The request's timeout passed.")
    response = form.whole([text("A", ending=detail)], USAGE, {"ttft": 0.5})
    assert response["timing"] == {"ttft": 0.5} and response["finish_detail"] == "The request's timeout passed."


# Any sequence -------------------------------------------------------------------------------------------------------


def by_chance(rnd):
    """Deltas as a generation makes them: calls one after the other, some of them broken, and whatever between."""
    deltas, n_calls, is_open = [], 0, False
    for _ in range(rnd.randint(0, 12)):
        parts, said, reasoning = [], "", ""
        if is_open:
            parts.append(CallDelta(index=n_calls - 1, arguments=rnd.choice(("1", '"x', "")), broken=rnd.random() < 0.3))
            is_open = rnd.random() < 0.5 and not parts[0].broken
        if not is_open:
            said, reasoning = rnd.choice(("", "", "a", "b\u2028")), rnd.choice(("", "", "r"))
            for _ in range(rnd.choice((0, 0, 1, 2))):
                name, broken = rnd.choice(("now", "note", "strange")), rnd.random() < 0.2
                parts.append(CallDelta(index=n_calls, id=f"id{n_calls}", name=name, arguments="{", broken=broken))
                n_calls, is_open = n_calls + 1, not broken
        deltas.append(Delta(index=0, text=said, reasoning=reasoning, calls=tuple(parts)))
    return [*deltas, end(rnd.choice((STOP, LENGTH)))]


def expected(deltas):
    """All texts, all reasoning, and the calls that were not broken."""
    broken = {part.index for delta in deltas for part in delta.calls if part.broken}
    parts = [part for delta in deltas for part in delta.calls if part.index not in broken]
    calls = {part.index: "" for part in parts}
    for part in parts:
        calls[part.index] += part.arguments
    return "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), list(calls.values())


def contents(items):
    texts = ["".join(text_of(item) for item in items if item["type"] == kind) for kind in ("message", "reasoning")]
    return (*texts, [text_of(item) for item in items if "call" in item["type"]])


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_obeys_the_grammar_and_loses_nothing(seed):
    rnd = Random(seed)
    kinds = set()
    for _ in range(500):
        deltas = by_chance(rnd)
        wish = replace(OPTIONS, summary=rnd.random() < 0.5)
        output = check_stream(streamed(deltas, options=wish)).finish()["output"]
        assert contents(output) == expected(deltas)
        assert contents(whole(deltas, wish)["output"]) == expected(deltas)
        kinds |= {(item["type"], item["status"]) for item in output}
    assert len(kinds) == 6  # texts and reasoning may be cut, calls are whole


def test_the_grammar_notices_what_is_missing():
    """The machine is no proof if it takes everything: without any one event, or with two of it, a stream is none."""
    events = parse_stream(streamed([thought("Hm."), text("A"), call(0, "{}", "now"), end()]))
    for i in range(len(events)):
        for changed in ([*events[:i], *events[i + 1 :]], [*events[: i + 1], events[i], *events[i + 1 :]]):
            grammar = StreamGrammar()
            with pytest.raises(AssertionError):
                for number, event in enumerate(changed):
                    grammar.take({**event, "sequence_number": number})
                grammar.finish()
