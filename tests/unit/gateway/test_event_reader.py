"""Streams as they pass: the same however they are cut; where they break off, only whole events have passed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.errors import ReplicaFailed
from phalanx.gateway.relay.api_kinds import dialect_of, error_event
from phalanx.gateway.relay.body_peek import tokens_of
from phalanx.gateway.relay.event_reader import MAX_EVENT, MAX_LINES, EventReader
from phalanx.gateway.relay.transcript import Transcript
from phalanx.http.error_responses import error_body, public_failure
from phalanx.http.stream_records import RecordedChoice, Start, StreamRecord, framed


def named(*kinds: str) -> bytes:
    """Events as the Responses and Messages APIs have them."""
    events = [
        f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': n})}\n\n" for n, kind in enumerate(kinds)
    ]
    return "".join(events).encode()


CHAT = (
    b': keep-alive\n\ndata: {"choices":[{"delta":{"content":"a\\n\\n"}}]}\n\n'
    b'data: {"choices":[],"usage":{"total_tokens":7},"timing":{"queue":0.1,"first_byte":0.25}}\n\ndata: [DONE]\n\n'
)
STREAMS = {
    "chat": CHAT,
    "responses": named("response.created", "response.output_text.delta", "response.completed"),
    "messages": named("message_start", "ping", "message_stop"),
    "ollama": b'{"message":{"content":"a"},"done":false}\n{"done":true,"eval_count":2}\n',
}
DIALECTS = sorted(STREAMS)
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}


def written(dialect: str, event: dict[str, Any]) -> bytes:
    text = json.dumps(event).encode()
    return text + b"\n" if dialect == "ollama" else b"data: " + text + b"\n\n"


def reader(dialect: str) -> EventReader:
    return EventReader(dialect, lines=dialect == "ollama")


def read(dialect: str, pieces: list[bytes]) -> tuple[EventReader, bytes]:
    found = reader(dialect)
    return found, b"".join(found.feed(piece) for piece in pieces)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@examples(40, soak=2000)
@given(data=st.data())
def test_cut_into_any_pieces_a_stream_passes_as_it_came(dialect, newline, data):
    if dialect == "ollama" and newline != b"\n":
        return
    text = STREAMS[dialect].replace(b"\n", newline)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, passed = read(dialect, pieces)
    assert passed == text and found.ended and found.finish() == ""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_broken_off_anywhere_it_is_noticed_and_whole_events_alone_have_passed(dialect):
    text = STREAMS[dialect]
    separator = b"\n" if dialect == "ollama" else b"\n\n"
    for end in range(len(text)):
        found, passed = read(dialect, [text[:end]])
        assert passed == b"" or passed.endswith(separator)
        assert text.startswith(passed)
        if not found.ended:
            assert found.finish() != ""


@pytest.mark.parametrize(
    ("dialect", "text", "why"),
    [
        ("chat", b"<html>gateway time-out</html>\n\n", "not part of an event"),
        ("chat", b'data: {"choices": [\n\n', "not JSON"),
        ("chat", b"data: hello\n\n", "not JSON"),
        ("chat", b"data: [1]\n\n", "not JSON"),
        ("messages", b"event: message_stop\nnonsense\n\n", "not part of an event"),
        ("ollama", b'{"done": tru\n', "not JSON"),
    ],
)
def test_what_is_no_event_is_a_fault_and_what_came_before_passes(dialect, text, why):
    good = STREAMS[dialect].partition(b"\n\n")[0] + b"\n\n" if dialect != "ollama" else b'{"done":false}\n'
    found, passed = read(dialect, [good + text])
    assert passed == good and why in found.fault and found.finish() == found.fault


def test_an_event_without_end_is_a_fault():
    found = reader("chat")
    piece = b"x" * (1 << 20)
    found.feed(b"data: ")
    for _ in range(MAX_EVENT >> 20):
        found.feed(piece)
        assert not found.fault or "longer" in found.fault
    assert "16 MiB" in found.fault


@pytest.mark.parametrize("line", [b":\n", b"data:\n", b":\r"])
def test_an_event_of_too_many_lines_is_malformed(line):
    """16 MiB of them kept the loop for four seconds."""
    found = reader("chat")
    found.feed(line * MAX_LINES + line[-1:])
    assert "more than 16384 lines" not in found.fault
    found = reader("chat")
    found.feed(line * (MAX_LINES + 2) + line[-1:])
    assert "more than 16384 lines" in found.fault


def test_usage_and_numbers_are_seen():
    found, _ = read("chat", [CHAT])
    assert (found.usage, found.n_events) == (b'{"total_tokens":7}', 2)
    found, _ = read("responses", [named("response.created", "response.in_progress")])
    assert found.next_number == 2
    found, _ = read("ollama", [b'{"response":"abc"}\n{"done":true,"prompt_eval_count":3,"eval_count":300}\n'])
    assert tokens_of(found.usage) == 303
    whole = {"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 9}}}
    found, _ = read("responses", [written("responses", {**whole, "type": "response.created"})])
    assert tokens_of(found.usage) is None, "it is of the last event alone"
    found, _ = read("responses", [written("responses", whole)])
    assert tokens_of(found.usage) == 12


def test_of_an_unknown_api_the_connection_decides():
    found, passed = read("other", [b"data: anything\n\nda"])
    assert passed == b"data: anything\n\n" and "middle" in found.finish()
    assert read("other", [b"data: anything\n\n"])[0].finish() == ""
    pulled = EventReader("ollama_more", lines=True)
    assert pulled.feed(b'{"status":"success"}\n') and pulled.finish() == ""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_error_ends_a_stream_of_every_dialect(dialect):
    """What the gateway writes when a replica breaks off is an end by the same rules."""
    begun = STREAMS[dialect].partition(b"\n\n")[0] + b"\n\n" if dialect != "ollama" else b'{"done":false}\n'
    found = reader(dialect)
    found.feed(begun)
    assert not found.ended
    body = error_body(public_failure(ReplicaFailed("The replica b broke off.")), PATHS[dialect])
    text = error_event(dialect, body, number=found.next_number)
    assert found.feed(text) == text and found.ended and found.finish() == ""
    assert b"The replica b broke off." in text


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", "chat"), ("/v1/completions", "chat"), ("/v1/responses", "responses"),
        ("/v1/messages", "messages"), ("/v1/messages/count_tokens", "messages"), ("/api/chat", "ollama"),
        ("/v1/embeddings", "other"), ("/tokenize", "other"),
    ],
)  # fmt: skip
def test_the_path_says_the_dialect(path, dialect):
    assert dialect_of(path) == dialect


SHOWN = {
    "chat": [
        {"choices": [{"text": "a"}]},
        {"choices": [{"delta": {}}, {"delta": {"role": "assistant", "content": "a"}}]},
        {"choices": [{"delta": {"content": None, "reasoning_content": "a"}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]},
    ],
    "responses": [
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.reasoning_text.delta", "delta": "a"},
        {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
    ],
    "messages": [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "a"}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f", "input": {}}},
    ],
    "ollama": [
        {"response": "a"},
        {"message": {"role": "assistant", "content": "", "thinking": "a"}},
        {"message": {"content": "", "tool_calls": [{"function": {"name": "f"}}]}},
    ],
}
NOT_SHOWN = {
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "content": "", "reasoning_content": None}}]},
        {"choices": [], "usage": {"total_tokens": 1}},
        {"choices": {"content": "a"}, "content": "a"},
        {"choices": ["content", {"delta": "content"}]},
    ],
    "responses": [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
        {"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}},
    ],
    "messages": [
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "a"}},
        {"type": "ping"},
    ],
    "ollama": [{"message": {"role": "assistant", "content": ""}}, {"response": "", "done": False}],
}


@pytest.mark.parametrize("dialect", SHOWN)
def test_the_first_text_is_seen_and_not_what_comes_before_any_token(dialect):
    for event in SHOWN[dialect]:
        found = EventReader(dialect, lines=dialect == "ollama")
        for before in NOT_SHOWN[dialect]:
            assert found.feed(written(dialect, before))
        assert not found.has_text
        assert found.feed(written(dialect, event))
        assert found.has_text


# Streams with records --------------------------------------------------------------------------------------------

START = Start(id="x", created=1, seed=2, determinism_key="n", prompts=3)


def test_tokens_that_no_text_shows_are_counted():
    """Of special tokens, or before a stop string that may come, a client sees nothing; its key pays for them."""
    found = EventReader("chat", transcript=Transcript(4))
    for record in (StreamRecord(start=START), *(said(tokens) for tokens in ([1, 2], [3, 4, 5], [6]))):
        found.feed(framed(record, lines=False))
    assert (found.n_events, found.n_tokens) == (0, 6) and not found.can_go_on, "also of what is kept no longer"
    found = EventReader("chat", transcript=Transcript(4))
    found.feed(b"data: {}\n\ndata: {}\n\n" + framed(StreamRecord(start=START), lines=False))
    assert found.n_tokens == 2


def said(tokens: list[int]) -> StreamRecord:
    return StreamRecord(choices=[RecordedChoice(index=0, tokens=tokens)])


def pieces_of(dialect: str, n: int = 4) -> list[bytes]:
    """A stream as a server writes it, piece by piece: some have several events, one keeps the client waiting."""
    if dialect == "chat":
        chunks = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % i for i in range(n)]
        return [*chunks, b": keep-alive\n\n", b'data: {"usage":{"total_tokens":7}}\n\ndata: [DONE]\n\n']
    if dialect == "ollama":
        return [b" ", *(b'{"response":"%d"}\n' % i for i in range(n)), b" ", b'{"done":true}\n']
    kinds = {
        "responses": ["response.created", *["response.output_text.delta"] * n, "response.completed"],
        "messages": ["message_start", *["content_block_delta"] * n, "message_stop"],
    }
    events = named(*kinds[dialect]).split(b"\n\n")[:-1]
    both, *rest = [event + b"\n\n" for event in events]
    return [both + rest[0], *rest[1:]]


def record_of(number: int, *, lines: bool, **more: Any) -> bytes:
    start = START if number == 0 else None
    return framed(StreamRecord(start=start, choices=[RecordedChoice(index=0, tokens=[number])], **more), lines=lines)


def with_records(dialect: str, begin: int = 0) -> bytes:
    """Each piece is made of one token, its number."""
    lines = dialect == "ollama"
    pieces = pieces_of(dialect)
    return b"".join(pieces[i] + record_of(i, lines=lines) for i in range(begin, len(pieces)))


def recorded(dialect: str) -> EventReader:
    return EventReader(dialect, lines=dialect == "ollama", transcript=Transcript(1000))


def n_kept(found: EventReader) -> int:
    """How many tokens the client has, as the records say."""
    assert found.transcript is not None
    if found.transcript.start is None:
        return 0
    choices = found.transcript.resume(next_number=0, timeout_s=1, moves=1).choices
    return len(choices[0].tokens) if choices else 0


def cut(data: st.DataObject, text: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("dialect", DIALECTS)
@examples(40, soak=2000)
@given(data=st.data())
def test_records_are_taken_out_and_at_any_time_say_what_has_passed(dialect, data):
    found, passed = recorded(dialect), b""
    pieces = pieces_of(dialect)
    for part in cut(data, with_records(dialect)):
        passed += found.feed(part)
        assert passed == b"".join(pieces[: n_kept(found)])
    assert found.close() == b"" and found.ended and found.finish() == "" and passed == b"".join(pieces)
    assert n_kept(found) == len(pieces)


@pytest.mark.parametrize("dialect", DIALECTS)
@examples(40, soak=2000)
@given(data=st.data())
def test_broken_anywhere_and_continued_from_its_records_a_stream_is_what_it_would_have_been(dialect, data):
    """Servers that know no more than the transcript, again and again, each breaking off at any byte."""
    found, passed = recorded(dialect), b""
    for _ in range(data.draw(st.integers(0, 4))):
        found.begin_again()
        text = with_records(dialect, begin=n_kept(found))
        for part in cut(data, text[: data.draw(st.integers(0, len(text)))]):
            passed += found.feed(part)
    found.begin_again()
    for part in cut(data, with_records(dialect, begin=n_kept(found))):
        passed += found.feed(part)
    assert passed == b"".join(pieces_of(dialect)) and found.ended and found.finish() == ""
    whole, _ = read(dialect, pieces_of(dialect))
    assert (found.n_events, found.usage, found.next_number) == (whole.n_events, whole.usage, whole.next_number)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_pause_is_what_the_last_record_says(dialect):
    found, lines = recorded(dialect), dialect == "ollama"
    pieces = pieces_of(dialect)
    first = pieces[0] + record_of(0, lines=lines)
    assert found.feed(first + framed(StreamRecord(paused=True), lines=lines)) == pieces[0] and found.is_paused
    assert found.feed(pieces[1] + record_of(1, lines=lines)) == pieces[1] and not found.is_paused
    found.feed(framed(StreamRecord(paused=True), lines=lines))
    found.begin_again()
    assert not found.is_paused and n_kept(found) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_its_record_has_not_followed_is_not_the_clients(dialect):
    """Not even a whole last event, nor what an event says: number and end are those of the events that passed."""
    found, pieces = recorded(dialect), pieces_of(dialect)
    lines = dialect == "ollama"
    passed = found.feed(b"".join(pieces[i] + record_of(i, lines=lines) for i in range(len(pieces) - 1)))
    before = (found.n_events, found.next_number, found.usage)
    assert found.feed(pieces[-1]) == b"" and not found.ended
    assert (found.n_events, found.next_number, found.usage) == before
    assert passed == b"".join(pieces[:-1]) and "last record" in found.finish() and found.can_go_on
    found.begin_again()
    assert found.feed(with_records(dialect, begin=len(pieces) - 1)) == pieces[-1] and found.ended


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "a record of its stream cannot be read"),
        (b'{"choices":[{"index":"0"}]}', "a record of its stream cannot be read"),
        (b'{"choices":[{"index":0,"tokens":[-1]}]}', "not token ids"),
        (b'{"x":' + b"[" * 100_000 + b"}", "a record of its stream cannot be read"),
        (b'{"failed":"\xff"}', "a record of its stream cannot be read"),
        (b'{"failed":"The engine is gone."}', "The engine is gone"),
    ],
)
def test_with_a_bad_record_its_piece_does_not_pass(dialect, bad, why):
    """So it is with one that says the piece is an error that another server may not have."""
    lines, pieces = dialect == "ollama", pieces_of(dialect)
    found = recorded(dialect)
    record = b'{"phalanx":' + bad + b"}\n" if lines else b": phalanx " + bad + b"\n\n"
    good = pieces[0] + record_of(0, lines=lines) + pieces[1] + record_of(1, lines=lines)
    assert found.feed(good + pieces[2] + record) == pieces[0] + pieces[1]
    assert why in found.fault and found.finish() == found.fault and found.close() == b"" and found.can_go_on
    found.begin_again()
    assert found.feed(with_records(dialect, begin=2)) == b"".join(pieces[2:]) and found.finish() == ""


@pytest.mark.parametrize("dialect", DIALECTS)
def test_of_a_bad_piece_no_event_passes(dialect):
    lines = dialect == "ollama"
    found, pieces = recorded(dialect), pieces_of(dialect)
    good = pieces[0] + record_of(0, lines=lines)
    bad = pieces[1] + (b"{\n" if lines else b"data: {\n\n") + record_of(1, lines=lines)
    assert found.feed(good + bad) == pieces[0] and "not JSON" in found.fault and n_kept(found) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_tells_no_records_is_passed_on_at_its_end(dialect):
    text = b"".join(pieces_of(dialect))
    found = recorded(dialect)
    assert found.feed(text) == b"" and not found.can_go_on
    assert found.close() == text and found.ended and found.finish() == ""


def test_an_endless_piece_is_a_fault():
    found = recorded("ollama")
    piece = b'{"x":"%s"}\n' % (b"x" * (1 << 20))
    while not found.fault:
        assert found.feed(piece) == b""
    assert "no record came for 32 MiB" in found.fault


def test_a_stream_without_a_transcript_cannot_go_on_elsewhere():
    found, _ = read("chat", pieces_of("chat")[:2])
    assert not found.can_go_on
    assert not recorded("chat").can_go_on  # nor one whose first record has not come


def test_of_a_long_reason_the_client_is_told_the_beginning():
    found = EventReader("chat", transcript=Transcript(100))
    found.feed(CHAT[:-14] + framed(StreamRecord(start=START, failed="x" * 10_000), lines=False))
    assert set(found.fault) == {"x"} and len(found.fault) < 1000
