"""Requests as Claude Code 2.1 sends them: names, order, types and sizes are its own, the texts are not.

Every request carries a billing block that no other one has, all its tools, a system message behind the first question,
and `max_tokens` of 32,000 whatever the model's context is.
"""

from __future__ import annotations

from typing import Any

HEADERS = {
    "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-system-2026-04-07,effort-2025-11-24",
    "anthropic-version": "2023-06-01",
}
PATH = "/v1/messages?beta=true"
CACHED = {"cache_control": {"type": "ephemeral"}}
SIZES = {  # of a tool's description
    "Agent": 1227,
    "Bash": 1196,
    "CronCreate": 2924,
    "CronDelete": 120,
    "CronList": 110,
    "Edit": 360,
    "EnterWorktree": 300,
    "ExitWorktree": 1900,
    "NotebookEdit": 700,
    "Read": 1100,
    "ReportFindings": 500,
    "ScheduleWakeup": 3000,
    "SendMessage": 500,
    "Skill": 1700,
    "TaskCreate": 2100,
    "TaskGet": 700,
    "TaskList": 900,
    "TaskOutput": 900,
    "TaskStop": 260,
    "TaskUpdate": 2500,
    "WebFetch": 400,
    "WebSearch": 400,
    "Workflow": 1200,
    "Write": 300,
}
PARAMETERS: dict[str, dict[str, Any]] = {  # of some tools; of the others, of `TaskGet`
    "Bash": {"command": {"type": "string"}, "timeout": {"type": "number"}, "run_in_background": {"type": "boolean"}},
    "Edit": {
        **{
            name: {"description": "lorem ipsum", "type": "string"} for name in ("file_path", "old_string", "new_string")
        },
        "replace_all": {"description": "lorem ipsum", "default": False, "type": "boolean"},
    },
    "Read": {
        "file_path": {"type": "string"},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    },
    "TaskUpdate": {
        "taskId": {"type": "string"},
        "status": {"anyOf": [{"type": "string", "enum": ["pending", "completed"]}, {"type": "string", "const": "x"}]},
        "metadata": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "blocks": {"type": "array", "items": {"type": "string"}},
    },
    "WebFetch": {"url": {"type": "string", "format": "uri"}, "prompt": {"type": "string", "maxLength": 4000}},
}


def lorem(n_chars: int) -> str:
    """A text of so many characters."""
    return ("lorem ipsum dolor sit amet consectetur adipiscing elit " * (n_chars // 55 + 1))[:n_chars]


def tools() -> list[dict[str, Any]]:
    """Its 24 tools."""
    found = []
    for name, size in SIZES.items():
        properties = PARAMETERS.get(name, {"taskId": {"description": "lorem ipsum", "type": "string"}})
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": list(properties)[:1],
            "additionalProperties": False,
        }
        found.append({"name": name, "description": lorem(size), "input_schema": schema})
    return found


def request(number: int, question: str, history: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Request `number` of a conversation.

    Args:
        history: the messages after the first question and the system message.
    """
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.0a1; cc_entrypoint=sdk-cli; cch={number:05x};"
    return {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [text(lorem(306)), text(question, **CACHED)]},
            {"role": "system", "content": lorem(6062)},
            *history,
        ],
        "system": [text(billing), text(lorem(62), **CACHED), text(lorem(5916), **CACHED)],
        "tools": tools(),
        "metadata": {"user_id": "00000000-0000-4000-8000-000000000000"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **fields,
    }


def text(said: str, **more: Any) -> dict[str, Any]:
    """A block."""
    return {"type": "text", "text": said, **more}


def answered(content: list[dict[str, Any]], result: str, *, failed: bool = False) -> list[dict[str, Any]]:
    """What it appends for an answer that called one tool."""
    (call,) = (block for block in content if block["type"] == "tool_use")
    error = {"is_error": True} if failed else {}
    block = {"tool_use_id": call["id"], "type": "tool_result", "content": result, **error, **CACHED}
    return [{"role": "assistant", "content": content}, {"role": "user", "content": [block]}]
