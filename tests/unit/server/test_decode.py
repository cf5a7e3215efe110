"""Tokens to text: stop strings, split characters, stop tokens, clipping."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from phalanx.server.answers.choice_decoder import ChoiceDecoder
from phalanx.server.answers.deltas import Usage
from phalanx.server.answers.generation import join
from phalanx.server.dialects.openai.openai_objects import usage_json
from phalanx.server.fields.openai_bodies import CompletionBody
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults
from phalanx.server.requests.validate import parse_completion, plan_sequences
from phalanx.server.sequences.output_queue import StreamEnd, Timings
from phalanx.supervision.fake_engine import FAKE_INFO
from phalanx.text.tokenizer import StopAutomaton
from phalanx.types import Finished, FinishReason, PromptScored, Timing, TokenLogprobs, Tokens

EOS_ID = 0
SERVED = ApiModel(
    names=("tiny",),
    max_n=4,
    max_prompts=4,
    clamp_max_tokens=True,
    defaults=GenerationDefaults(),
    eos_ids=frozenset({EOS_ID}),
    template_kwargs={},
)


def decoder_for(tokenizer, **fields) -> ChoiceDecoder:
    parsed = parse_completion(msgspec.convert({"prompt": "the", **fields}, CompletionBody), SERVED)
    (request,) = plan_sequences(
        parsed.options,
        [tokenizer.encode("the")],
        field="prompt",
        group="g",
        seed=1,
        eos_ids=SERVED.eos_ids,
        info=replace(FAKE_INFO, vocab_size=300),
        echo=parsed.echo,
    )
    stops = StopAutomaton(parsed.options.stop_strings) if parsed.options.stop_strings else None
    return ChoiceDecoder(tokenizer, parsed.options, request, 0, "the" if parsed.echo else None, stops)


def scored(tokens):
    return [TokenLogprobs(token, -1.0, 0, [(token, -1.0), (5, -2.0)]) for token in tokens]


def play(decoder: ChoiceDecoder, tokens, reason: FinishReason = "length", *, chunk: int = 1, logprobs: bool = False):
    """OutputQueue tokens in chunks and end; the whole choice."""
    deltas = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        deltas += decoder.tokens(Tokens("g/0", start, part, scored(part) if logprobs else None))
    deltas.append(decoder.end(StreamEnd(Finished("g/0", reason, len(tokens)), Timings(0.0, 1.0, 3.0))))
    return join(deltas)


@pytest.mark.parametrize("chunk", [1, 2, 50])
@pytest.mark.parametrize("text", ["hello world", "naïve 🦊 – fox", "日本語"])
def test_text_survives_split_characters(tokenizer, text, chunk):
    choice = play(decoder_for(tokenizer), tokenizer.encode(text), chunk=chunk)
    assert (choice.text, choice.ending.reason) == (text, "length")


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("fox", False, "hello world, the quick brown "),
        ("fox", True, "hello world, the quick brown fox"),
        (["zebra", "o w"], False, "hell"),
        ("never", False, "hello world, the quick brown fox says hello"),
    ],
)
def test_stop_strings(tokenizer, stop, include, expected, chunk):
    tokens = tokenizer.encode("hello world, the quick brown fox says hello")
    decoder = decoder_for(tokenizer, stop=stop, include_stop_str_in_output=include)
    choice = play(decoder, tokens, chunk=chunk)
    assert choice.text == expected
    assert choice.ending.reason == ("stop" if decoder.stopped_at else "length")


def test_everything_is_clipped_to_the_stop(tokenizer):
    tokens = tokenizer.encode("hello world, the quick brown fox says hello")
    n = next(i for i in range(1, 50) if "quick" in tokenizer.decode(tokens[:i]))
    decoder = decoder_for(tokenizer, stop="quick", logprobs=1)
    choice = play(decoder, tokens, chunk=50, logprobs=True)
    assert decoder.stopped_at == n
    assert choice.ending.n_tokens == n < len(tokens)
    assert len(choice.scored) == n


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["fox says", "wörld, th", "ö", "hello w", "rld", "x", "s hello", "never"])
def test_log_probabilities_end_where_the_text_ends(tokenizer, stop, include, chunk):
    whole = "hello wörld, the quick brown fox says hello"
    tokens = tokenizer.encode(whole)
    everything = play(decoder_for(tokenizer, logprobs=1), tokens, logprobs=True).scored
    decoder = decoder_for(tokenizer, stop=[stop, "never"], include_stop_str_in_output=include, logprobs=1)
    choice = play(decoder, tokens, chunk=chunk, logprobs=True)
    assert choice.text == (whole if stop == "never" else whole.partition(stop)[0] + (stop if include else ""))
    assert list(choice.scored) == [entry for entry in everything if entry.offset < len(choice.text)]


def test_no_log_probability_is_sent_before_its_text(tokenizer):
    """Else the text of a stop string could be read from them."""
    tokens = tokenizer.encode("hello wörld, the quick brown fox")
    decoder = decoder_for(tokenizer, stop=["wörld, the slow", "quick brown fish"], logprobs=1)
    n_chars = 0
    for start, token in enumerate(tokens):
        for delta in decoder.tokens(Tokens("g/0", start, [token], scored([token]))):
            n_chars += len(delta.text)
            assert all(entry.offset < n_chars for entry in delta.scored)


@pytest.mark.parametrize("stop", [None, "never"])
def test_a_stop_tokens_log_probability_is_sent(tokenizer, stop):
    word = tokenizer.encode("hello")
    choice = play(decoder_for(tokenizer, stop=stop, logprobs=0), [*word, EOS_ID], "stop", logprobs=True)
    assert (choice.text, len(choice.scored)) == ("hello", len(word) + 1)


def test_a_held_back_beginning_of_a_stop_string_is_shown_at_the_end(tokenizer):
    decoder = decoder_for(tokenizer, stop="world!")
    choice = play(decoder, tokenizer.encode("hello world"))
    assert (choice.text, choice.ending.reason) == ("hello world", "length")


def test_min_tokens_keeps_stop_strings_away(tokenizer):
    tokens = tokenizer.encode("fox fox fox fox")
    decoder = decoder_for(tokenizer, stop="fox", min_tokens=3)
    choice = play(decoder, tokens)
    assert decoder.stopped_at is not None and decoder.stopped_at > 3
    assert choice.text.startswith("fox")


def test_a_stop_token_counts_but_is_not_shown(tokenizer):
    word = tokenizer.encode("hello")
    choice = play(decoder_for(tokenizer, logprobs=0), [*word, EOS_ID], "stop", logprobs=True)
    assert (choice.text, choice.ending.n_tokens, len(choice.scored)) == ("hello", len(word) + 1, len(word) + 1)
    visible = tokenizer.encode("fox")[-1]
    choice = play(decoder_for(tokenizer, stop_token_ids=[visible]), [*word, visible], "stop")
    assert choice.text == "hello"


def test_special_tokens(tokenizer):
    word = tokenizer.encode("hello")
    tokens = [*word, EOS_ID, *word]
    assert play(decoder_for(tokenizer, ignore_eos=True), tokens).text == "hellohello"
    shown = play(decoder_for(tokenizer, ignore_eos=True, skip_special_tokens=False), tokens)
    assert shown.text == "hello<eos>hello"


def test_nothing_generated_counts_with_max_tokens_0(tokenizer):
    choice = play(decoder_for(tokenizer, echo=True, max_tokens=0, logprobs=1), tokenizer.encode("x"), logprobs=True)
    assert (choice.text, choice.ending.n_tokens, choice.ending.reason, choice.scored) == ("", 0, "length", ())


def test_echo(tokenizer):
    assert decoder_for(tokenizer, echo=True).opening().text == "the"
    decoder = decoder_for(tokenizer, echo=True, logprobs=1)
    assert decoder.opening() is None
    prompt = tokenizer.encode("the")
    delta = decoder.scored_prompt(PromptScored("g/0", [None, *scored(prompt[1:])]))
    assert delta.text == "the"
    assert [entry.logprob for entry in delta.scored] == [None, *[-1.0] * (len(prompt) - 1)]
    choice = play(decoder, tokenizer.encode("fox"), logprobs=True)
    assert choice.scored[0].offset == 3


def test_a_lowered_max_tokens_is_said_where_it_ended_the_answer(tokenizer):
    decoder = decoder_for(tokenizer, max_tokens=32_000)
    room = FAKE_INFO.max_model_len - len(tokenizer.encode("the"))
    said = f"max_tokens was 32000; the context had room for {room} tokens after the prompt."
    assert play(decoder, tokenizer.encode("hello"), "length").ending.detail == said
    assert play(decoder_for(tokenizer, max_tokens=32_000), tokenizer.encode("hello"), "stop").ending.detail == ""
    assert play(decoder_for(tokenizer, max_tokens=room), tokenizer.encode("hello"), "length").ending.detail == ""


def test_timeout_is_length_with_a_detail(tokenizer):
    choice = play(decoder_for(tokenizer, timeout=2), tokenizer.encode("hello"), "timeout")
    assert choice.ending.reason == "length"
    assert "timeout of 2 s" in choice.ending.detail


def test_offsets_are_positions_in_the_text(tokenizer):
    text = "hello wörld"
    choice = play(decoder_for(tokenizer, logprobs=1), tokenizer.encode(text), logprobs=True)
    for entry in choice.scored:
        assert text[entry.offset :].startswith(entry.token.data.decode(errors="ignore"))
    assert [entry.offset for entry in choice.scored] == sorted(entry.offset for entry in choice.scored)


def test_time_per_token(tokenizer):
    ending = play(decoder_for(tokenizer), tokenizer.encode("hello world")).ending
    assert ending.ttft_s == 1.0
    assert ending.tpot_s == pytest.approx(2.0 / (ending.n_tokens - 1))


@pytest.mark.parametrize(("engine_s", "wanted_s"), [(6.0, 6.0), (0.5, 2.0)])
def test_time_per_token_of_a_burst_and_of_a_stream_that_was_resumed(tokenizer, engine_s, wanted_s):
    finished = Finished("g/0", "stop", 5, timing=Timing(decode_s=engine_s))
    ending = decoder_for(tokenizer).ending(StreamEnd(finished, Timings(0.0, 1.0, 3.0)))
    assert ending.tpot_s == pytest.approx(wanted_s / 4)


def test_figures_of_speculation_reach_the_ending(tokenizer):
    decoder = decoder_for(tokenizer, speculation=True)
    ending = decoder.ending(
        StreamEnd(Finished("g/0", "length", 9, drafted_tokens=8, accepted_tokens=5), Timings(0.0, 1.0, 3.0))
    )
    assert (ending.drafted_tokens, ending.accepted_tokens) == (8, 5)
    assert usage_json(Usage(9, 1, 8, from_disk=5))["prompt_tokens_details"] == {
        "cached_tokens": 8,
        "cached_tokens_details": {"memory": 3, "disk": 5},
    }
    assert usage_json(Usage(1, 9, 0, (5, 3)))["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 3,
    }
