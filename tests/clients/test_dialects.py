"""Libraries of other APIs: a program per library runs a task of two turns with a tool, and prints a report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from clients.environments import PROGRAMS
from clients.note_server import ARGUMENTS, CONTENT, FINAL, KEY, SERVED, TASK, THOUGHTS

LOOP = {"call": ["shell_command", ARGUMENTS["shell_command"]], "thinking": list(THOUGHTS), "text": FINAL}
UNKNOWN = f"The model 'gpt-unknown' is not served here; this server has {SERVED}."
CLIENTS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {  # program -> environment, errors, what else it reports
    "ollama_python.py": (
        "ollama",
        [
            ["ResponseError", 404, UNKNOWN],
            ["ResponseError", 400, "options.top_p must be from 0 to 1, not 2.0."],
            ["ResponseError", 400, f"This server's model, {SERVED}, writes text. phalanx makes no embeddings"],
            ["ResponseError", 400, "'no such' is neither a short name nor a hub id"],
        ],
        {
            "models": [SERVED],
            "running": [SERVED],
            "more": {
                "generate": FINAL,
                "streamed": FINAL,
                "loaded": "load",
                "capabilities": ["completion", "tools", "thinking"],
                "context": 1 << 20,
            },
        },
    ),
    "openai_responses.py": (
        "openai-python",
        [
            ["NotFoundError", 404, UNKNOWN],
            ["BadRequestError", 400, "top_p must be from 0 to 1, not 2.0."],
            ["BadRequestError", 400, "previous_response_id is not supported by this server"],
        ],
        {"more": {"string": FINAL}},
    ),
}


@pytest.mark.parametrize("program", CLIENTS)
def test_a_task_with_a_tool(program, note_reader, run):
    environment, errors, others = CLIENTS[program]
    ended = run(environment, "python", str(PROGRAMS / program), note_reader.base_url, KEY, SERVED, TASK, CONTENT)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report.pop("whole") == report.pop("streamed") == LOOP
    found = report.pop("errors")
    assert [error[:2] for error in found] == [error[:2] for error in errors]
    assert all(said.startswith(text) for (_, _, said), (_, _, text) in zip(found, errors, strict=True)), found
    assert report == others
