"""A model that asks for the weather once and then tells it, for clients of other people, in four formats of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from pydantic import BaseModel
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import running_server

THOUGHT = "The user asks for the weather."
FORECAST = '{"text": "rain", "degrees": 7}'
RESULT = "rain and wind"
ASK = {"role": "user", "content": "How is the weather in Oslo?"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "lfm2": "<|tool_call_start|>[get_weather(city='Oslo', days=2)]<|tool_call_end|>",
    "openai": "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo", "days": 2}<|call|>',
}


class get_weather(BaseModel):
    """Ask for the weather."""

    city: str
    days: int


def answers(shape: str) -> Callable[[str], str]:
    """A call after a question, a text after its `RESULT`, and a forecast where one is asked for."""

    def say(prompt: str) -> str:
        final = FORECAST if "forecast" in prompt else "It rains."
        called = RESULT in prompt or "forecast" in prompt
        if shape == "openai":
            thought = f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
            said = f"<|start|>assistant<|channel|>final<|message|>{final}<|return|>"
            return thought + (said if called else CALLS[shape])
        return f"<think>{THOUGHT}</think>\n\n" + (final if called else CALLS[shape]) + "<|im_end|>"

    return say


@contextmanager
def asking(shape: str, folder: Path) -> Iterator[openai.OpenAI]:
    """A client of a server with this model."""
    tokenizer = tokenizer_of(shape, folder)
    with (
        running_server(tokenizer, ScriptedEngine(tokenizer, answers(shape))) as running,
        openai.OpenAI(base_url=running.base_url, api_key="none", max_retries=0) as client,
    ):
        yield client
