"""Ollama's lines follow their grammar and join to the whole answer, whatever that is and however it is cut."""

from __future__ import annotations

import json
import random
import sys

import pytest
from support.ollama_lines import read_lines

from phalanx.http.error_responses import Failure
from phalanx.server.answers.deltas import CallDelta, ChoiceEnding, Delta, ResponseHead, ScoredToken, TokenText, Usage
from phalanx.server.answers.generation import join, merge
from phalanx.server.dialects.ollama.ollama_format import CHAT_ANSWER, GENERATE_ANSWER, OllamaFormat
from phalanx.types import Timing

ENDING = ChoiceEnding(
    reason="stop",
    n_tokens=7,
    cached_tokens=2,
    timing=Timing(queue_s=0.001, prefill_s=0.25, decode_s=1.5),
    ttft_s=0.3,
    tpot_s=0.2,
)
USAGE = Usage(prompt=11, completion=7)
TEXTS = ["a", "Oslo\n", "\u2028", "\x85", '"', "é", "{}"]


def head(*, logprobs: bool = False) -> ResponseHead:
    return ResponseHead(id="x", created=60, model="tiny", logprobs=logprobs)


def answer_by_chance(rng: random.Random, *, chat: bool, logprobs: bool) -> list[Delta]:
    """The deltas of one choice: reasoning, text and calls in any order, some of them void."""
    parts: list[Delta] = []
    for _ in range(rng.randrange(4)):
        parts.append(Delta(index=0, reasoning=rng.choice(TEXTS)))
    n_calls = 0
    for _ in range(rng.randrange(8)):
        if chat and rng.random() < 0.4:
            parts += call_by_chance(rng, n_calls)
            n_calls += 1
        else:
            text = rng.choice(TEXTS)
            parts.append(Delta(index=0, text=text, scored=(scored(text),) if logprobs else ()))
    parts.append(Delta(index=0, text=rng.choice(["", "z"]), ending=ENDING))
    return parts


def call_by_chance(rng: random.Random, index: int) -> list[Delta]:
    arguments = json.dumps({"city": rng.choice(TEXTS), "days": rng.randrange(5)})
    cut = rng.randrange(len(arguments))
    parts = [CallDelta(index=index, id=f"id{index}", name="weather")]
    if rng.random() < 0.25:
        parts += [CallDelta(index=index, arguments=arguments[:cut]), CallDelta(index=index, broken=True)]
    elif rng.random() < 0.8:
        parts += [CallDelta(index=index, arguments=piece) for piece in (arguments[:cut], arguments[cut:])]
    return [Delta(index=0, calls=(part,)) for part in parts]


def scored(text: str) -> ScoredToken:
    token = TokenText(text, text.encode(), float("-inf"))
    return ScoredToken(token, -1.0, (token,), 0)


@pytest.mark.parametrize("chat", [True, False])
def test_answers_by_chance_cut_anywhere(chat):
    rng = random.Random(3)
    place = CHAT_ANSWER if chat else GENERATE_ANSWER
    n_calls = 0
    for _ in range(1000):
        logprobs = rng.random() < 0.3
        deltas = answer_by_chance(rng, chat=chat, logprobs=logprobs)
        form = OllamaFormat(head(logprobs=logprobs), place)
        stream, rest = form.opening(1, None) or form.keep_alive, list(deltas)
        while rest:
            n = rng.randrange(1, 4)
            stream += form.events(merge(rest[:n]), None) or form.keep_alive
            rest = rest[n:]
        answer = read_lines(stream + form.closing(USAGE, None), chat=chat)
        whole = OllamaFormat(head(logprobs=logprobs), place).whole([join(deltas)], USAGE, None)
        said = whole["message"] if chat else {**whole, "content": whole["response"]}
        assert (answer.text, answer.thinking) == (said["content"], said.get("thinking", ""))
        assert answer.calls == said.get("tool_calls", [])
        assert answer.logprobs == whole.get("logprobs", []) and ("logprobs" in whole) == logprobs
        assert {name: whole[name] for name in answer.last if name not in ("message", "response", "logprobs")} == {
            name: value for name, value in answer.last.items() if name not in ("message", "response", "logprobs")
        }
        n_calls += len(answer.calls)
    assert (n_calls > 500) == chat


def test_counts_and_durations():
    form = OllamaFormat(head(), CHAT_ANSWER)
    form.events([Delta(index=0, ending=ENDING)], None)
    last = json.loads(form.closing(USAGE, None))
    assert last == {
        "model": "tiny", "created_at": "1970-01-01T00:01:00Z", "message": {"role": "assistant", "content": ""},
        "done": True, "done_reason": "stop", "total_duration": 1_751_000_000, "load_duration": 1_000_000,
        "prompt_eval_count": 11, "prompt_eval_duration": 250_000_000, "eval_count": 7, "eval_duration": 1_500_000_000,
    }  # fmt: skip


@pytest.mark.parametrize(("reason", "done"), [("stop", "stop"), ("tool_calls", "stop"), ("length", "length")])
def test_why_an_answer_ended(reason, done):
    ending = ChoiceEnding(reason=reason, n_tokens=1, cached_tokens=0, timing=Timing(), ttft_s=None, tpot_s=None)
    whole = OllamaFormat(head(), CHAT_ANSWER).whole([Delta(index=0, text="a", ending=ending)], USAGE, None)
    assert whole["done_reason"] == done
    assert whole["eval_duration"] == 1, "clients divide by it"


def test_a_call_that_no_strict_parser_reads_is_sent():
    """Halves of characters and numbers beyond a computer's are JSON that a model may write."""
    arguments = '{"city": "\\ud800", "days": 1e999, "count": 1' + "0" * 4100 + "}"
    form = OllamaFormat(head(), CHAT_ANSWER)
    parts = (CallDelta(index=0, id="a", name="weather"), CallDelta(index=0, arguments=arguments))
    stream = form.events([Delta(index=0, calls=(part,)) for part in parts], None)
    stream += form.events([Delta(index=0, ending=ENDING)], None) + form.closing(USAGE, None)
    (call,) = read_lines(stream).calls
    largest = sys.float_info.max
    assert call["function"]["arguments"] == {"city": "?", "days": largest, "count": largest}


def test_an_error_ends_a_stream():
    form = OllamaFormat(head(), CHAT_ANSWER)
    stream = form.events([Delta(index=0, text="a")], None)
    stream += form.failure(Failure(status=503, type="service_unavailable_error", message="gone"))
    answer = read_lines(stream)
    assert (answer.text, answer.error) == ("a", "gone")
