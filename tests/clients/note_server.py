"""A server whose model follows a script: it has a file shown by the client's own tool, and tells of it.

The first turn of a task calls the tool; once the file's content is in the prompt, the model says so. What a coding
agent asks besides (a title, for example) gets a short text. Does not know the clients' APIs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CONFIG, Running, running_server

KEY = "secret"
SERVED = "scripted"
FILE = "note.txt"
CONTENT = "the heron stands on one leg"
TASK = f"Run a shell command that shows the file {FILE}, and tell me what it says."
FINAL = f"The file says that {CONTENT}."
ARGUMENTS = {
    "Bash": {"command": f"cat {FILE}", "description": "Show the file"},  # Claude Code
    "bash": {"command": f"cat {FILE}", "description": "Show the file"},  # opencode, Copilot CLI, pi
    "run_shell_command": {
        "command": f"cat {FILE}",
        "description": "Show the file",
        "is_background": False,
    },  # Qwen Code
    "exec_command": {"cmd": f"cat {FILE}"},  # Codex
    "shell_command": {"command": f"cat {FILE}"},  # Codex, other versions, and our programs
}
"""Name of a client's tool that runs commands -> what it is called with."""
THOUGHTS = ("I shall read it.", "There it is.")


def say(prompt: str) -> str:
    """The model's answer."""
    if CONTENT in prompt:
        return f"<think>{THOUGHTS[1]}</think>\n\n{FINAL}<|im_end|>"
    tool = next((name for name in ARGUMENTS if f'"name": "{name}"' in prompt), None)
    if tool is None or TASK not in prompt or "<tool_response>" in prompt:
        return "A note<|im_end|>"
    call = json.dumps({"name": tool, "arguments": ARGUMENTS[tool]})
    return f"<think>{THOUGHTS[0]}</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"


@contextmanager
def note_server(folder: Path) -> Iterator[Running]:
    """The server, in a thread of this process.

    Args:
        folder: for the tokenizer's files.
    """
    tokenizer = tokenizer_of("hermes", folder)
    config = replace(CONFIG, api_key=(KEY,), served_model_name=(SERVED,))
    with running_server(tokenizer, ScriptedEngine(tokenizer, say), config) as running:
        yield running
