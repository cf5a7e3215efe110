"""Bodies to requests: what is accepted becomes exactly this, what is refused is refused by name."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import fields as fields_of
from msgspec.structs import replace

from phalanx.errors import InvalidRequest, UnknownModel
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody, TokenizeBody
from phalanx.server.requests.body_parsing import parse_body
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults
from phalanx.server.requests.sampling_fields import NEUTRAL
from phalanx.server.requests.validate import parse_chat, parse_completion, parse_tokenize, plan_sequences
from phalanx.supervision.fake_engine import FAKE_INFO
from phalanx.types import Sampling, StopRule

SERVED = ApiModel(
    names=("tiny", "alias"),
    max_n=16,
    max_prompts=4,
    default_max_tokens=16,
    clamp_max_tokens=True,
    defaults=GenerationDefaults(temperature=0.6, top_k=20),
    eos_ids=frozenset({0}),
    template_kwargs={"enable_thinking": False},
)
OFFLINE = replace(SERVED, default_max_tokens=None)
MESSAGES = [{"role": "user", "content": "hello"}]


def body_of(kind, fields):
    return parse_body(json.dumps(fields).encode(), kind, FAKE_INFO.max_model_len)


def chat(**fields):
    return parse_chat(body_of(ChatBody, {"messages": MESSAGES, **fields}), SERVED)


def completion(**fields):
    return parse_completion(body_of(CompletionBody, {"prompt": "hello", **fields}), SERVED)


def refusing(request):
    """The request to a server with --no-clamp-max-tokens."""
    return replace(request, options=replace(request.options, clamp_max_tokens=False))


def plan(request, prompts, **more):
    arguments = {"field": "prompt", "group": "g", "seed": 5, "eos_ids": frozenset({0}), "info": FAKE_INFO, **more}
    return plan_sequences(request.options, prompts, **arguments)


REFUSED = [
    ({"frobnicate": 1}, "frobnicate"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": None}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "file": {"file_id": "1"}}]}, "messages[0].file"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a" * 2048, "b" * 2049]}, "stop"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"frob": 1}}, "stream_options.frob"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"timeout": 0}, "timeout"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.rpartition(".")[2].split("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2}, "prompt"),
    ],
)
def test_completion_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("value", ["5", 5.5, True, [5], {}])
def test_types_are_strict(value):
    with pytest.raises(InvalidRequest, match="Invalid type for 'max_tokens'"):
        chat(max_tokens=value)


def test_inert_and_null_fields_are_accepted():
    inert = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    assert chat(**inert) == chat()
    nothing = {field.name: None for field in fields_of(ChatBody) if field.name != "messages"} | {"unheard_of": None}
    assert chat(**nothing) == chat()


def test_defaults_come_from_the_model_and_the_request_wins():
    assert chat().options.sampling == Sampling(temperature=0.6, top_k=20)
    assert chat(temperature=1, top_k=-1).options.sampling == Sampling(temperature=1.0, top_k=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": 2**70 + 3}, {"seed": 3}),
        ({"logit_bias": {"7": -100, "8": 0.5}}, {"logit_bias": {7: -100.0, 8: 0.5}}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"logit_bias": {str(i): 1 for i in range(1024)}}, {"logit_bias": dict.fromkeys(range(1024), 1.0)}),
    ],
)
def test_sampling(fields, expected):
    sampling = chat(**fields).options.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "x", "reasoning_content": "r", "refusal": None},
    ]
    conversation = chat(messages=messages, reasoning_effort="low", chat_template_kwargs={"a": 1}).conversation
    assert conversation.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "x", "reasoning_content": "r"},
    ]
    assert conversation.template_kwargs == {"enable_thinking": False, "a": 1, "reasoning_effort": "low"}
    assert conversation.add_generation_prompt and not conversation.continue_final_message
    continued = chat(messages=messages, continue_final_message=True).conversation
    assert continued.continue_final_message and not continued.add_generation_prompt


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_prompt_forms(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


def test_names():
    assert chat(model="alias").options.model == "alias"
    assert chat().options.model == "tiny"
    with pytest.raises(UnknownModel) as caught:
        chat(model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_sequences_of_a_group():
    request = completion(prompt=[[1, 2], [3]], n=2, max_tokens=4, logprobs=1, stop_token_ids=[9], timeout=3)
    sequences = plan(request, [[1, 2], [3]], echo=True, owner="s")
    assert [s.id for s in sequences] == ["g/0", "g/1", "g/2", "g/3"]
    assert [s.prompt for s in sequences] == [[1, 2], [1, 2], [3], [3]]
    assert [s.sampling.choice for s in sequences] == [0, 1, 0, 1]
    assert {s.sampling.seed for s in sequences} == {5}
    assert {s.stop for s in sequences} == {StopRule(max_tokens=4, stop_ids=frozenset({0, 9}))}
    assert {(s.group, s.prompt_logprobs, s.timeout_s, s.owner) for s in sequences} == {("g", 1, 3, "s")}


def test_eos_is_ignored_on_request():
    (sequence,) = plan(completion(ignore_eos=True, stop_token_ids=[7]), [[1]])
    assert sequence.stop.stop_ids == {7}


def test_room_in_the_context():
    limit = FAKE_INFO.max_model_len
    (sequence,) = plan(completion(), [[1] * (limit - 3)])
    assert sequence.stop.max_tokens == 3
    (sequence,) = plan(completion(max_tokens=3), [[1] * (limit - 3)])
    assert sequence.stop.max_tokens == 3
    (sequence,) = plan(completion(max_tokens=0, echo=True), [[1] * (limit - 3)], echo=True)
    assert sequence.stop.max_tokens == 1
    for request, n_prompt, number in [
        (refusing(completion(max_tokens=4)), limit - 3, "513"),
        (completion(), limit, "512"),
        (chat(max_tokens=4), limit, "512"),
    ]:
        with pytest.raises(InvalidRequest, match=number) as caught:
            plan(request, [[1] * n_prompt])
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("request_", [chat(max_tokens=32_000), chat(max_completion_tokens=4), completion(max_tokens=4)])
def test_more_tokens_than_there_is_room_for_are_lowered_to_it(request_):
    (sequence,) = plan(request_, [[1] * (FAKE_INFO.max_model_len - 3)])
    assert sequence.stop.max_tokens == 3


def test_output_tokens_of_a_request_that_does_not_name_them():
    assert [plan(request, [[1]])[0].stop.max_tokens for request in (completion(), chat())] == [16, 511]
    assert plan(completion(min_tokens=20), [[1]])[0].stop.max_tokens == 20
    assert parse_completion(body_of(CompletionBody, {"prompt": "x"}), OFFLINE).options.max_tokens is None


def test_prompts_and_choices_are_limited_apart():
    request = completion(prompt=["x"] * 4, n=16)
    assert (len(request.prompts), request.options.n) == (4, 16)
    with pytest.raises(InvalidRequest, match=r"5 prompts .* takes 4 \(--max-prompts\)") as caught:
        completion(prompt=["x"] * 5)
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match=r"from 1 to 16 \(--max-n\)") as caught:
        completion(n=17)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("fields", "prompt", "param"),
    [
        ({}, [256], "prompt"),
        ({}, [-1], "prompt"),
        ({}, [], "prompt"),
        ({"stop_token_ids": [256]}, [1], "stop_token_ids"),
        ({"logit_bias": {"256": 1}}, [1], "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary(fields, prompt, param):
    with pytest.raises(InvalidRequest) as caught:
        plan(completion(**fields), [prompt])
    assert caught.value.param == param


def test_a_grammar_goes_into_every_sequence_and_only_the_end_token_ends_it():
    request = completion(ignore_eos=True, stop_token_ids=[7], n=2)
    assert [(p.grammar, p.stop.stop_ids) for p in plan(request, [[1]], grammar="g")] == [("g", {0, 7})] * 2
    assert [(p.grammar, p.stop.stop_ids) for p in plan(request, [[1]])] == [("", {7})] * 2


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "a", "add_generation_prompt": True}],
)
def test_tokenize_takes_one_source(fields):
    with pytest.raises(InvalidRequest):
        parse_tokenize(body_of(TokenizeBody, fields), SERVED)


AT_THE_CAP = {
    "n": (16, 17),
    "logprobs": (20, 21),
    "stop": (["a" * 256 + chr(0x100 + i) for i in range(15)] + ["b" * 241], ["a" * 4097]),
    "stop_token_ids": ([*range(1024)], [*range(1025)]),
    "logit_bias": ({str(i): 1 for i in range(1024)}, {str(i): 1 for i in range(1025)}),
    "min_tokens": (2**31 - 1, 2**31),
    "max_tokens": (2**31 - 1, 2**31),
    "num_speculative_tokens": (2**31 - 1, 2**31),
    "temperature": (100, 101),
    "top_p": (1, 1.1),
    "top_k": (2**31, 2**31 + 1),
    "min_p": (1, 1.1),
    "repetition_penalty": (100, 101),
    "presence_penalty": (2, 2.1),
    "frequency_penalty": (2, 2.1),
}
"""Fields that cost the engine or the server something with every token: the most that is accepted, and more."""

FREE = {
    *(
        "model prompt echo best_of suffix stream stream_options usage seed timeout timing speculation user metadata"
    ).split(),
    *("store service_tier safety_identifier prompt_cache_key ignore_eos skip_special_tokens").split(),
    *("include_stop_str_in_output prompt_cache_retention cache_salt").split(),
    *("response_format structured_outputs guided_json guided_regex guided_choice guided_grammar").split(),
    *NEUTRAL,
}
"""Fields that cost nothing, or something once; what a grammar costs with each token is bounded where it is compiled."""


def test_every_field_that_costs_something_with_each_token_has_a_cap():
    assert {field.name for field in fields_of(CompletionBody)} == {*AT_THE_CAP, *FREE}
    largest = {name: most for name, (most, _) in AT_THE_CAP.items()}
    parsed = completion(**largest)
    info = replace(FAKE_INFO, vocab_size=1024, max_model_len=2**31)
    for sequence in plan(parsed, [[1]] * 1, info=info):
        # What the sampler changes for a row in a step: two arrays, made once.
        assert len(sequence.sampling.logit_bias) + len(sequence.stop.stop_ids) <= 2048
        assert sequence.sampling.logprobs == 20
    assert sum(map(len, parsed.options.stop_strings)) == 4096
    for name, (_, more) in AT_THE_CAP.items():
        with pytest.raises(InvalidRequest) as caught:
            completion(**{name: more})
        assert caught.value.param == name


def test_echoed_logprobs_are_bounded():
    request = completion(prompt=[[1, 2], [3]], n=3, max_tokens=1, logprobs=20, echo=True)
    info = replace(FAKE_INFO, max_model_len=1 << 20)
    one, all_ = (1 << 16) // 21, (1 << 18) // 21 // 3
    assert len(plan(request, [[1] * one, [1] * (all_ - one)], echo=True, info=info)) == 6
    for lengths, what in [((one + 1,), "of one prompt"), ((one, all_ - one + 1), "of all prompts")]:
        with pytest.raises(InvalidRequest, match=f"log-probabilities {what}") as caught:
            plan(request, [[1] * length for length in lengths], echo=True, info=info)
        assert caught.value.param == "logprobs"
    assert plan(completion(echo=True), [[1] * 300_000], echo=True, info=info)


def test_effort_none_turns_thinking_off_unless_the_request_says_otherwise():
    served = replace(SERVED, template_kwargs={})

    def variables(**fields):
        body = body_of(ChatBody, {"messages": MESSAGES, **fields})
        return parse_chat(body, served).conversation.template_kwargs

    assert variables(reasoning_effort="high") == {"reasoning_effort": "high"}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    own = variables(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert own == {"reasoning_effort": "none", "enable_thinking": True}
