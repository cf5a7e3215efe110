"""Simon Willison's `llm` with its plugin for Ollama: it finds the model by itself; chats, objects and tools."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import pytest
from clients.demo_server import KEY, SERVED
from clients.scripted_server import FINAL, REPORT, REPORT_WISH, RESULTS, TEXT

MODEL = f"ollama/{SERVED}"
WEATHER = """
def get_weather(city: str, days: int) -> str:
    return f"{city}, {days} days: rain"
"""
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "rain": {"type": "boolean"}, "days": {"type": "integer"}},
    "required": ["place", "rain", "days"],
}
WAYS = pytest.mark.parametrize("words", [(), ("--no-stream",)], ids=["streamed", "whole"])


@pytest.fixture(scope="module")
def llm(scripted_server, run, tmp_path_factory):
    settings = {
        "LLM_USER_PATH": str(tmp_path_factory.mktemp("llm-user")),
        "OLLAMA_HOST": scripted_server.origin,
        "OLLAMA_API_KEY": KEY,
    }

    def start(*words: str) -> CompletedProcess[str]:
        ended: CompletedProcess[str] = run("llm-ollama", "llm", *words, **settings)
        return ended

    return start


def test_the_model_is_found_with_what_it_can_do(llm):
    ended = llm("ollama", "models")
    assert ended.returncode == 0, ended.stderr
    _, row = ended.stdout.splitlines()
    name, _, can = row.split(maxsplit=2)
    assert (name, can) == (SERVED, "completion, thinking, tools")


@WAYS
def test_a_chat(llm, words):
    ended = llm("-m", MODEL, *words, "-o", "temperature", "0", "How are you?")
    assert (ended.returncode, ended.stdout) == (0, f"{FINAL}\n"), ended.stderr
    (logged,) = json.loads(llm("logs", "list", "--json", "-n", "1").stdout)
    assert logged["input_tokens"] > 0 and logged["output_tokens"] > 0


@WAYS
def test_an_object_held_to_a_schema(llm, words):
    ended = llm("-m", MODEL, *words, "--schema", json.dumps(SCHEMA), REPORT_WISH)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == REPORT


@WAYS
def test_functions_are_called_as_the_model_asks(llm, scripted_server, words):
    scripted_server.second_prompts()
    ended = llm("-m", MODEL, *words, "--functions", WEATHER, "How is the weather?")
    assert ended.returncode == 0, ended.stderr
    assert FINAL in ended.stdout and TEXT in ended.stdout
    (prompt,) = scripted_server.second_prompts()
    assert all(result in prompt for result in RESULTS)


def test_a_refusal_is_one_line_with_our_message(llm):
    ended = llm("-m", MODEL, "-o", "top_p", "2", "hello")
    assert ended.returncode == 1
    assert "options.top_p must be from 0 to 1, not 2.0." in ended.stderr and len(ended.stderr.splitlines()) == 1
