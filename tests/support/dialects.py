"""Each dialect as its clients see it: bodies that they send, a plain question, and what an answer has to look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from support import claude_code, codex
from support.histories import ANTHROPIC_TOOL, BLOCKS, CALL, FLAT, FUNCTION, HISTORY, OLLAMA_HISTORY, SCHEMA, TOOL, USER
from support.messages_events import read_message
from support.ollama_lines import read_lines
from support.responses_events import check_stream
from support.serving import sse

QUESTION = "What do you say to a plain question?"
REPLY = "A plain answer."
LONGEST_ERROR = 2000  # bytes
PARAM = "param: "
WHOLE_BODY = (PARAM, "JSON body", "gzip body", "Content-", "The body ")
"""What an error may name that is about no single field."""


@dataclass(frozen=True)
class Spoken:
    """A dialect.

    Args:
        samples: path and body of what its clients send.
        fields: one of which an error of a body names.
        error: the message of an error, whose shape it checks.
        stream: checks the whole of a stream.
        whole: checks an answer that is not streamed.
        plain: path and body of a question, and how its answer is read.
        ends: what a stream ends with, and no part of it before.
    """

    samples: list[tuple[str, dict[str, Any]]]
    fields: tuple[str, ...]
    error: Callable[[Any], str]
    stream: Callable[[str, str], object]
    whole: Callable[[str, Any], object]
    plain: tuple[str, dict[str, Any], Callable[[Any], str]]

    def check(self, path: str, response: httpx.Response) -> None:
        """Fails unless the response is one that this dialect's clients understand."""
        kind = response.headers.get("content-type", "")
        assert response.status_code < 500, response.text
        if response.status_code == 415 and "the gateway reads" in response.text:
            return  # before it knows the path, and with it the dialect
        if response.status_code != 200:
            message = self.error(response.json())
            assert len(response.content) < LONGEST_ERROR, "an error repeats what was sent"
            named = re.compile("|".join(map(re.escape, (*self.fields, *WHOLE_BODY))))
            assert response.status_code != 400 or named.search(message), message
        elif kind.startswith(("text/event-stream", "application/x-ndjson")):
            self.stream(path, response.text)
        else:
            self.whole(path, response.json())


def short(value: Any) -> Any:
    """A body with all its fields, whose texts are cut."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [short(item) for item in value]
    return value[:60] if isinstance(value, str) else value


# OpenAI: chat and text completions ---------------------------------------------------------------------------------


def _chat_stream(path: str, text: str) -> None:
    *chunks, done = sse(text)
    assert done == "[DONE]"
    ended: dict[int, str] = {}
    calls: dict[int, int] = {}
    for chunk in chunks:
        if "error" in chunk:
            assert chunk is chunks[-1] and chunk["error"].keys() == {"message", "type", "param", "code"}
            return
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in ended, "a chunk after the end of its choice"
            if choice["finish_reason"]:
                ended[index] = choice["finish_reason"]
            for call in choice.get("delta", {}).get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == calls.get(index, 0) and call["function"]["name"]
                    calls[index] = call["index"] + 1
                assert call["index"] < calls[index]
    assert sorted(ended) == list(range(len(ended))) and ended


def _chat_whole(path: str, answer: Any) -> None:
    assert answer["object"] in ("chat.completion", "text_completion") and answer["choices"]
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


def _openai_error(body: Any) -> str:
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    param = body["error"]["param"]
    return str(body["error"]["message"]) if param is None else f"{body['error']['message']} {PARAM}{param}"


CHAT = Spoken(
    samples=[
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
                    {"role": "tool", "tool_call_id": "call_abc", "content": "rain", "cot_id": "c", "cot_summary": None},
                    {"role": "user", "content": [{"type": "text", "text": "And tomorrow?", "novel": {"a": [1]}}]},
                ],
                "tools": [{**TOOL, "copilot_cache_control": {"type": "ephemeral"}}],
                "reasoning": {"effort": "low", "enabled": True},
                "prediction": {"type": "content", "content": [{"type": "text", "text": "It"}]},
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0.7,
                "top_p": 0.9,
                "max_completion_tokens": 300,
                "stop": ["STOP"],
                "user": "me",
            },
        ),
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [USER],
                "max_tokens": 40,
                "n": 2,
                "logprobs": True,
                "top_logprobs": 2,
                "logit_bias": {"5": -10},
                "seed": 3,
                "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
            },
        ),
        (
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": ["Once", "Twice"],
                "max_tokens": 12,
                "stream": True,
                "echo": True,
                "logprobs": 1,
                "stop": "x",
                "structured_outputs": {"choice": ["yes", "no"]},
            },
        ),
    ],
    fields=tuple(
        "model messages tools tool_choice stream temperature top_p max_tokens max_completion_tokens stop user prompt n "
        "logprobs top_logprobs logit_bias seed response_format structured_outputs echo parallel_tool_calls "
        "reasoning".split()
    ),
    error=_openai_error,
    stream=_chat_stream,
    whole=_chat_whole,
    plain=(
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50, "temperature": 0},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
)

# OpenAI: responses -------------------------------------------------------------------------------------------------


def _response_whole(path: str, answer: Any) -> None:
    if path.endswith("/input_tokens"):
        assert answer["input_tokens"] > 0
        return
    assert answer["object"] == "response" and answer["status"] in ("completed", "incomplete")
    assert answer["output"] and answer["usage"]["total_tokens"] > 0


RESPONSES = Spoken(
    samples=[
        ("/v1/responses", short(codex.request("Go on.", HISTORY))),
        ("/v1/responses/input_tokens", {"model": "tiny", "input": [USER, *HISTORY], "tools": [FLAT]}),
        (
            "/v1/responses",
            {
                "model": "tiny",
                "input": [{"role": "developer", "content": "Be brief."}, USER, *HISTORY],
                "instructions": "Help.",
                "tools": [
                    FLAT,
                    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}},
                    {"type": "web_search_preview"},
                ],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **FUNCTION}]},
                "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}, "verbosity": "low"},
                "reasoning": {"effort": "low", "summary": "auto"},
                "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
                "metadata": {"a": "b"},
                "max_output_tokens": 300,
                "top_logprobs": 2,
                "truncation": "disabled",
                "stream": True,
            },
        ),
        ("/v1/responses", {"input": "Say something.", "store": True, "previous_response_id": None, "temperature": 1}),
    ],
    fields=tuple(
        "input model instructions tools tool_choice text reasoning include metadata max_output_tokens top_logprobs "
        "truncation stream store previous_response_id temperature prompt_cache_key client_metadata "
        "parallel_tool_calls".split()
    ),
    error=_openai_error,
    stream=lambda path, text: check_stream(text),
    whole=_response_whole,
    plain=(
        "/v1/responses",
        {"model": "tiny", "input": QUESTION, "max_output_tokens": 50, "temperature": 0},
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
)

# Anthropic ---------------------------------------------------------------------------------------------------------


def _messages_whole(path: str, answer: Any) -> None:
    if path.endswith("/count_tokens"):
        assert answer["input_tokens"] > 0 and len(answer) == 1
        return
    assert answer["type"] == "message" and answer["stop_reason"]
    for block in answer["content"]:
        assert block["type"] in ("text", "thinking", "tool_use") and isinstance(block.get("input", {}), dict)


def _messages_error(body: Any) -> str:
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return str(body["error"]["message"])


MESSAGES = Spoken(
    samples=[
        (claude_code.PATH, short(claude_code.request(1, "Go on.", BLOCKS))),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [USER, *BLOCKS], "tools": [ANTHROPIC_TOOL]}),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "max_tokens": 200,
                "messages": [USER, *BLOCKS, {"role": "assistant", "content": "It"}],
                "system": [{"type": "text", "text": "Be brief."}],
                "stop_sequences": ["STOP", "rain"],
                "temperature": 0.5,
                "top_k": 5,
                "tools": [ANTHROPIC_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
                "metadata": {"user_id": "me"},
                "mcp_servers": [],
            },
        ),
    ],
    fields=tuple(
        "model max_tokens messages system stop_sequences temperature top_k tools tool_choice thinking output_config "
        "mcp_servers stream".split()
    ),
    error=_messages_error,
    stream=lambda path, text: read_message(text),
    whole=_messages_whole,
    plain=(
        "/v1/messages",
        {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50, "temperature": 0},
        lambda answer: answer["content"][0]["text"],
    ),
)

# Ollama ------------------------------------------------------------------------------------------------------------

GREEDY = {"temperature": 0}


def _ollama_whole(path: str, answer: Any) -> None:
    if path == "/api/show":
        assert answer["capabilities"]
        return
    assert answer["done"] is True and answer["done_reason"] in ("stop", "length", "load")
    assert ("message" if path == "/api/chat" else "response") in answer


def _ollama_error(body: Any) -> str:
    assert body.keys() == {"error"}
    return str(body["error"])


OLLAMA = Spoken(
    samples=[
        (
            "/api/chat",
            {
                "model": "tiny:latest",
                "messages": [{"role": "system", "content": "Be brief."}, USER, *OLLAMA_HISTORY],
                "tools": [TOOL],
                "think": True,
                "keep_alive": "5m",
                "options": {"temperature": 0.5, "num_ctx": 8192, "num_predict": 200, "stop": ["STOP"], "seed": 4},
            },
        ),
        (
            "/api/chat",
            {
                "model": "tiny",
                "messages": [USER],
                "stream": False,
                "format": SCHEMA,
                "think": "low",
                "logprobs": True,
                "top_logprobs": 2,
                "options": {"top_k": 40.0, "repeat_penalty": 1.1, "repeat_last_n": -1, "mirostat": 0},
            },
        ),
        (
            "/api/generate",
            {
                "model": "tiny",
                "prompt": "Once",
                "system": "Be brief.",
                "raw": False,
                "format": "json",
                "context": [],
                "images": [],
                "keep_alive": -1,
                "options": {},
            },
        ),
        ("/api/show", {"model": "tiny:latest", "verbose": True}),
    ],
    fields=tuple(
        "model messages tools think keep_alive options stream format logprobs top_logprobs prompt system raw context "
        "images suffix template name".split()
    ),
    error=_ollama_error,
    stream=lambda path, text: read_lines(text, chat=path == "/api/chat"),
    whole=_ollama_whole,
    plain=(
        "/api/chat",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": False,
            "options": {"temperature": 0},
        },
        lambda answer: answer["message"]["content"],
    ),
)
SPOKEN = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "ollama": OLLAMA}
