"""A model that calls tools as it is written here, in hermes' format, behind the same key and name as the demo model.

Asked with `get_weather` among the tools it calls it twice. Once results are there it reports: as an object where the
question wants one, by a tool for output where there is one, and else in words. Its calls have blanks that no template
writes, so that a prompt with them holds the model's own words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.demo_server import KEY, SERVED
from msgspec.structs import replace
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import CONFIG, Running, running_server

from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Submit

THOUGHT = "Two places, two calls."
TEXT = "I will look."
PLACES = [{"city": "Oslo", "days": 2}, {"city": "São Paulo", "days": 1}]
RESULTS = ["Oslo, 2 days: rain", "São Paulo, 1 days: rain"]
"""What the clients' tools return."""

CALLS = """<tool_call>
{"name":   "get_weather", "arguments":  {"city":  "Oslo", "days": 2}}
</tool_call>
<tool_call>
{"name": "get_weather",  "arguments": {"days":   1, "city": "S\\u00e3o Paulo"}}
</tool_call>"""
FINAL = "It rains in both – take a coat."
REPORT_WISH = "Report the weather."
REPORT = {"place": "Oslo", "rain": True, "days": 2}
REPORTERS = ("final_result", "PartialReport", "Report")  # tools for output: pydantic-ai's, instructor's, langchain's
REPORT_CALL = '<tool_call>\n{"name": "%s", "arguments": {"place": "Oslo", "rain": true, "days": 2}}\n</tool_call>'
VERSION_CALL = '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'


def first_answer(prompt: str) -> str:
    """The calls, and text before them where the request has no `response_format`, which would forbid it."""
    text = "" if REPORT_WISH in prompt else f"{TEXT}\n"
    return f"<think>{THOUGHT}</think>\n\n{text}{CALLS}"


def answer(prompt: str) -> str:
    """The answer to a prompt, which shows the tools."""
    called = "</tool_response>" in prompt
    if '"llm_version"' in prompt and not called:
        return f"{VERSION_CALL}<|im_end|>"
    if '"get_weather"' in prompt and not called:
        return f"{first_answer(prompt)}<|im_end|>"
    for name in REPORTERS:
        if f'"{name}"' in prompt:
            return f"{REPORT_CALL % name}<|im_end|>"
    return f"{json.dumps(REPORT) if REPORT_WISH in prompt else FINAL}<|im_end|>"


class Scripted:
    """The server, and the prompts that its model saw."""

    def __init__(self, running: Running, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        self.origin = running.origin
        self.base_url = running.base_url
        self._engine = engine
        self._tokenizer = tokenizer

    def second_prompts(self) -> list[str]:
        """Take the text of all prompts with results since the last call."""
        received = [message.request for message in self._engine.received if isinstance(message, Submit)]
        self._engine.received.clear()
        prompts = [self._tokenizer.decode(request.prompt, skip_special_tokens=False) for request in received]
        return [prompt for prompt in prompts if "</tool_response>" in prompt]


@contextmanager
def scripted_server(path: Path) -> Iterator[Scripted]:
    """The server, in a thread of this process; `path` is an empty folder for the tokenizer."""
    tokenizer = tokenizer_of("hermes", path)
    engine = ScriptedEngine(tokenizer, answer)
    with running_server(tokenizer, engine, replace(CONFIG, api_key=(KEY,), served_model_name=(SERVED,))) as running:
        yield Scripted(running, engine, tokenizer)
