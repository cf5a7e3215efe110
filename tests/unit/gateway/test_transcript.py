"""What a stream's records add up to, and what another replica gets of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples

from phalanx.errors import MalformedAnswer
from phalanx.gateway.relay.transcript import Transcript
from phalanx.http.stream_records import (
    MAX_ITEMS,
    RESUME_BYTES,
    ChoiceEnded,
    RecordedChoice,
    Resume,
    Start,
    StreamRecord,
    resume_body,
    split_body,
)
from phalanx.types import TokenLogprobs

START = Start(id="x", created=1, seed=2**64 - 1, determinism_key="n", prompts=5)
FIRST = StreamRecord(start=START)
SCORED = TokenLogprobs(7, -0.5, 0, [(7, -0.5), (8, -1.5)])
STOP = ChoiceEnded(reason="stop", n_tokens=2)


def transcript(*records: StreamRecord, most: int = 100) -> Transcript:
    found = Transcript(most)
    for record in records:
        found.note(record)
    return found


def resumed(found: Transcript) -> Resume:
    return found.resume(next_number=4, timeout_s=9.5, moves=2)


def test_records_add_up():
    found = transcript(
        FIRST,
        StreamRecord(choices=[RecordedChoice(index=1, tokens=[7], logprobs=[SCORED], echoed=True)]),
        StreamRecord(),
        StreamRecord(
            choices=[
                RecordedChoice(index=0, tokens=[2**32 - 1]),
                RecordedChoice(index=1, tokens=[8, 9], logprobs=[SCORED] * 2),
            ]
        ),
        StreamRecord(choices=[RecordedChoice(index=1, ended=STOP)]),
    )
    assert resumed(found) == Resume(
        start=START,
        choices=[
            RecordedChoice(index=0, tokens=[2**32 - 1]),
            RecordedChoice(index=1, tokens=[7, 8, 9], logprobs=[SCORED] * 3, echoed=True, ended=STOP),
        ],
        next_number=4,
        timeout_s=9.5,
        moves=2,
    )
    size, body = resume_body(resumed(found), b'{"model": "m"}')
    assert split_body(str(size), body) == (resumed(found), b'{"model": "m"}')


@examples(50, soak=3000)
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=6))
def test_however_tokens_are_told_they_are_the_same(parts):
    records = [StreamRecord(choices=[RecordedChoice(index=0, tokens=part)]) for part in parts]
    (*_, last) = [(), *resumed(transcript(FIRST, *records)).choices]
    assert (list(last.tokens) if last else []) == [token for part in parts for token in part]


def test_the_last_start_counts():
    inexact = Start(id="x", created=1, seed=3, determinism_key="other", prompts=6, exact=False)
    found = transcript(FIRST, StreamRecord(start=inexact))
    assert found.determinism_key == "other" and resumed(found).start == inexact


def test_a_prompt_is_kept_while_there_is_room_beside_the_tokens():
    told = replace(START, prompt=[7, 8, 9])
    found = transcript(StreamRecord(start=told), StreamRecord(choices=[RecordedChoice(index=0, tokens=[1])]), most=5)
    assert found.start == START and resumed(found).start == told
    found.note(StreamRecord(choices=[RecordedChoice(index=0, tokens=[1])]))
    assert found.is_kept and resumed(found).start == START


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (StreamRecord(start=replace(START, prompt=[-1])), "not token ids"),
        (StreamRecord(choices=[RecordedChoice(index=-1)]), "choice -1"),
        (
            StreamRecord(choices=[RecordedChoice(index=0, tokens=[5]), RecordedChoice(index=0, tokens=[6])]),
            "a choice twice",
        ),
        (
            StreamRecord(choices=[RecordedChoice(index=0, tokens=[5]), RecordedChoice(index=1, tokens=[-1])]),
            "not token ids",
        ),
        (StreamRecord(choices=[RecordedChoice(index=0, tokens=[2**32])]), "not token ids"),
        (
            StreamRecord(choices=[RecordedChoice(index=0, tokens=[5]), RecordedChoice(index=2, tokens=[5])]),
            "choice 2, which has ended",
        ),
    ],
)
def test_a_record_that_cannot_be_true_is_refused_whole(record, why):
    found = transcript(
        FIRST, StreamRecord(choices=[RecordedChoice(index=0, tokens=[4]), RecordedChoice(index=2, ended=STOP)])
    )
    before = resumed(found)
    with pytest.raises(MalformedAnswer, match=why):
        found.note(record)
    assert resumed(found) == before


def test_without_its_beginning_nothing_is_kept():
    found = transcript()
    with pytest.raises(MalformedAnswer, match="has no start"):
        found.note(StreamRecord(choices=[RecordedChoice(index=0, tokens=[1])]))
    assert not found.is_kept and found.determinism_key == ""


@pytest.mark.parametrize("n_top", [None, 0, 1, 20])
def test_the_longest_stream_that_is_kept_fits_into_what_a_server_takes(n_top):
    most, huge, least = 2000, 2**32 - 1, -1.7976931348623157e308
    logprobs = [] if n_top is None else [TokenLogprobs(huge, least, huge, [(huge, least)] * n_top)]
    n = most // (1 if n_top is None else 2 + n_top)
    record = StreamRecord(choices=[RecordedChoice(index=0, tokens=[huge] * (n - 1), logprobs=logprobs * (n - 1))])
    size, _ = resume_body(resumed(transcript(FIRST, record, most=most)), b"")
    assert size < RESUME_BYTES * most / MAX_ITEMS


@pytest.mark.parametrize(
    ("records", "most"),
    [
        ([StreamRecord(choices=[RecordedChoice(index=i, tokens=[1, 2])]) for i in range(3)], 6),
        (
            [
                StreamRecord(choices=[RecordedChoice(index=0, tokens=[7], logprobs=[SCORED])]),
                StreamRecord(choices=[RecordedChoice(index=0, tokens=[1])]),
            ],
            5,
        ),
        ([StreamRecord(choices=[RecordedChoice(index=i)]) for i in range(5)], 4),
    ],
)
def test_a_long_stream_is_kept_no_longer(records, most):
    """A log-probability counts like a token, each of the most likely tokens too, and a choice like one."""
    found = transcript(FIRST, *records[:-1], most=most)
    assert found.is_kept
    found.note(records[-1])
    assert not found.is_kept
    found.note(StreamRecord(choices=[RecordedChoice(index=9, tokens=[1])]))
    assert not found.is_kept and found._choices == {}
