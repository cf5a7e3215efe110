"""Requests as Codex 0.171 sends them: names, order, types and sizes are its own, the texts are not.

Every request carries all tools, two messages of the developer's, and two of the user's before the first answer.
"""

from __future__ import annotations

from typing import Any

from support.claude_code import lorem

HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_exec",
    "user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.171.0)",
}
PATH = "/v1/responses"
MODELS_PATH = "/v1/models?client_version=0.171.0"
ID = "00000000-0000-4000-8000-000000000000"
FUNCTIONS: dict[str, tuple[int, dict[str, Any], list[str]]] = {  # size of the description, arguments, needed ones
    "exec_command": (
        82,
        {
            "cmd": {"type": "string", "description": lorem(25)},
            "login": {"type": "boolean", "description": lorem(45)},
            "max_output_tokens": {"type": "number", "description": lorem(87)},
            "prefix_rule": {"type": "array", "description": lorem(118), "items": {"type": "string"}},
            "sandbox_permissions": {
                "type": "string",
                "description": lorem(107),
                "enum": ["use_default", "require_escalated"],
            },
        },
        ["cmd"],
    ),
    "write_stdin": (80, {"chars": {"type": "string"}, "session_id": {"type": "number"}}, ["session_id"]),
    "view_image": (124, {"path": {"type": "string", "description": lorem(39)}}, ["path"]),
    "get_goal": (60, {}, []),
    "update_goal": (700, {"status": {"type": "string", "enum": ["complete"]}}, ["status"]),
}
AGENTS = ("close_agent", "resume_agent", "send_input", "spawn_agent", "wait_agent")


def function(name: str, size: int, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """A function, flat as this API has it."""
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": lorem(size),
        "strict": False,
        "parameters": parameters,
    }


def tools() -> list[dict[str, Any]]:
    """Functions, a namespace, and a tool that OpenAI runs."""
    target = {"target": {"type": "string", "description": lorem(38)}}
    agents = [function(name, 5989 if name == "spawn_agent" else 300, target, ["target"]) for name in AGENTS]
    return [
        *(function(name, *rest) for name, rest in FUNCTIONS.items()),
        {"type": "namespace", "name": "multi_agent_v1", "description": lorem(43), "tools": agents},
        {"type": "web_search", "external_web_access": False},
    ]


def message(role: str, *texts: str) -> dict[str, Any]:
    """A message of the client's."""
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": ID, "role": role, "content": parts}


def request(question: str, history: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A request of a conversation.

    Args:
        history: the items after the first question.
    """
    said = [
        message("developer", lorem(16979)),
        message("developer", lorem(1400), lorem(338)),
        message("user", lorem(414)),
        message("user", question),
    ]
    names = ("thread_id", "session_id", "x-codex-window-id", "root_turn_id", "x-codex-turn-metadata", "turn_id")
    return {
        "model": "tiny",
        "input": [*said, *history],
        "tools": tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": ID,
        "client_metadata": dict.fromkeys(names, ID),
        **fields,
    }


def answered(output: list[dict[str, Any]], result: str) -> list[dict[str, Any]]:
    """What it appends for an answer that called tools: items without ids and states, and the outputs of the calls."""
    dropped = ("id", "status")
    items = [{name: value for name, value in item.items() if name not in dropped} for item in output]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": result} for item in calls]
    return [*items, *results]
