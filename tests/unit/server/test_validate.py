"""Bodies to requests: what is accepted becomes exactly this, what is refused is refused by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from phalanx.errors import InvalidRequest, UnknownModel
from phalanx.server.parsed import GenerationDefaults, Served
from phalanx.server.schema import ChatBody, CompletionBody, TokenizeBody
from phalanx.server.validate import parse_chat, parse_completion, parse_tokenize, plan_sequences
from phalanx.supervision.client import FAKE_INFO
from phalanx.types import Sampling, StopRule

SERVED = Served(
    names=("tiny", "alias"),
    max_n=16,
    defaults=GenerationDefaults(temperature=0.6, top_k=20),
    eos_ids=frozenset({0}),
    template_kwargs={"enable_thinking": False},
)
MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields):
    return parse_chat(ChatBody.model_validate({"messages": MESSAGES, **fields}), SERVED)


def completion(**fields):
    return parse_completion(CompletionBody.model_validate({"prompt": "hello", **fields}), SERVED)


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
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": None}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
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
    with pytest.raises(ValidationError):
        ChatBody.model_validate({"messages": MESSAGES, "max_tokens": value})


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
    nothing = {name: None for name in ChatBody.model_fields if name != "messages"} | {"unheard_of": None}
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
    sequences = plan(request, [[1, 2], [3]], echo=True, cache_salt="s")
    assert [s.id for s in sequences] == ["g/0", "g/1", "g/2", "g/3"]
    assert [s.prompt for s in sequences] == [[1, 2], [1, 2], [3], [3]]
    assert [s.sampling.choice for s in sequences] == [0, 1, 0, 1]
    assert {s.sampling.seed for s in sequences} == {5}
    assert {s.stop for s in sequences} == {StopRule(max_tokens=4, stop_ids=frozenset({0, 9}))}
    assert {(s.group, s.prompt_logprobs, s.timeout_s, s.cache_salt) for s in sequences} == {("g", 1, 3, "s")}


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
    for request, n_prompt, number in [(completion(max_tokens=4), limit - 3, "513"), (completion(), limit, "512")]:
        with pytest.raises(InvalidRequest, match=number) as caught:
            plan(request, [[1] * n_prompt])
        assert caught.value.code == "context_length_exceeded"


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


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "a", "add_generation_prompt": True}],
)
def test_tokenize_takes_one_source(fields):
    with pytest.raises(InvalidRequest):
        parse_tokenize(TokenizeBody.model_validate(fields), SERVED)
