"""A question, a tool and an answer that called it, as the clients of each dialect send them back."""

from __future__ import annotations

import json

USER = {"role": "user", "content": "How is the weather in Oslo?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"], "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Ask for the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"city": "Oslo", "days": 2}

# OpenAI: chat

CALL = {
    "id": "call_abc",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}

# OpenAI: responses

HISTORY = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_abc",
        "name": "get_weather",
        "arguments": json.dumps(ARGUMENTS),
    },
    {"type": "function_call_output", "call_id": "call_abc", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "call_def", "name": "patch", "input": "*** x"},
    {"type": "custom_tool_call_output", "call_id": "call_def", "output": [{"type": "input_text", "text": "ok"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "And tomorrow?"}]},
]
FLAT = {"type": "function", "strict": True, **FUNCTION}

# Anthropic

BLOCKS = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "no"}]},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Ask.", "input_schema": SCHEMA}

# Ollama

OLLAMA_HISTORY = [
    {
        "role": "assistant",
        "content": "",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    {"role": "user", "content": "And tomorrow?", "images": []},
]
