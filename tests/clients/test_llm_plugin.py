"""Simon Willison's `llm`: models that `extra-openai-models.yaml` adds, as its documentation says; objects and tools."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from clients.demo_server import KEY, SERVED, post
from clients.scripted_server import FINAL, RESULTS, TEXT, VERSION_CALL, first_answer

PROMPT = "Tell me a story about a lighthouse."
ASKED = ("-o", "temperature", "0", "-o", "max_tokens", "24")
MODELS = """\
- model_id: chats
  model_name: {served}
  api_base: {url}
  api_key_name: phalanx
- model_id: completes
  model_name: {served}
  api_base: {url}
  api_key_name: phalanx
  completion: true
- model_id: missing
  model_name: gpt-unknown
  api_base: {url}
  api_key_name: phalanx
- model_id: writes-objects
  model_name: {served}
  api_base: {url}
  api_key_name: phalanx
  supports_schema: true
- model_id: calls
  model_name: {served}
  api_base: {tools_url}
  api_key_name: phalanx
  supports_tools: true
"""
TRIP = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHORT = {  # what llm makes of the same in short
    "name": "output",
    "schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "description": "how many"}},
        "required": ["city", "days"],
    },
}
WEATHER = """
def get_weather(city: str, days: int) -> str:
    return f"{city}, {days} days: rain"
"""


@pytest.fixture(scope="module")
def llm(server, scripted_server, run, tmp_path_factory):
    user: Path = tmp_path_factory.mktemp("llm-user")
    models = MODELS.format(served=SERVED, url=server.base_url, tools_url=scripted_server.base_url)
    (user / "extra-openai-models.yaml").write_text(models)

    def start(*words: str) -> CompletedProcess[str]:
        ended: CompletedProcess[str] = run("llm", "llm", *words, LLM_USER_PATH=str(user))
        return ended

    assert start("keys", "set", "phalanx", "--value", KEY).returncode == 0
    return start


def chat(server, *turns: str) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    answer = post(server, "chat/completions", messages=messages, temperature=0, max_tokens=24)
    return answer["choices"][0]["message"]["content"]


def test_a_streamed_chat_goes_on(llm, server):
    first = llm("-m", "chats", *ASKED, PROMPT)
    text = chat(server, PROMPT)
    assert (first.returncode, first.stdout) == (0, text + "\n"), first.stderr
    (logged,) = json.loads(llm("logs", "list", "--json", "-n", "1").stdout)
    assert logged["output_tokens"] == 24
    second = llm("--continue", "-m", "chats", *ASKED, "And then?")
    assert (second.returncode, second.stdout) == (0, chat(server, PROMPT, text, "And then?") + "\n"), second.stderr


def test_an_answer_at_once(llm, server):
    ended = llm("-m", "chats", "--no-stream", *ASKED, PROMPT)
    assert (ended.returncode, ended.stdout) == (0, chat(server, PROMPT) + "\n"), ended.stderr


def test_completion(llm, server):
    ended = llm("-m", "completes", *ASKED, PROMPT)
    text = post(server, "completions", prompt=PROMPT, temperature=0, max_tokens=24)["choices"][0]["text"]
    assert (ended.returncode, ended.stdout) == (0, text + "\n"), ended.stderr


@pytest.mark.parametrize("words", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_an_object_held_to_a_schema(llm, words):
    ended = llm("-m", "writes-objects", *words, "-o", "temperature", "0", "--schema", json.dumps(TRIP), "Plan a trip.")
    assert ended.returncode == 0, ended.stderr
    trip = json.loads(ended.stdout)
    assert trip.keys() == {"city", "days"} and trip["city"] in ("Oslo", "Rome") and trip["days"] in range(1, 10)


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (("--schema", "city, days int: how many"), {"type": "json_schema", "json_schema": SHORT}),
        (("-o", "json_object", "true"), {"type": "json_object"}),
    ],
    ids=["short schema", "any object"],
)
def test_objects_are_those_of_the_same_request_without_llm(llm, server, words, form):
    ended = llm("-m", "writes-objects", *ASKED, *words, PROMPT)
    asked = {"messages": [{"role": "user", "content": PROMPT}], "response_format": form}
    answer = post(server, "chat/completions", temperature=0, max_tokens=24, **asked)
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("{")
    assert (ended.returncode, ended.stdout) == (0, text + "\n"), ended.stderr


@pytest.mark.parametrize("words", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_functions_are_called_as_the_model_asks(llm, scripted_server, words):
    scripted_server.second_prompts()
    ended = llm("-m", "calls", *words, "--functions", WEATHER, "How is the weather?")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(f"{FINAL}\n") and ended.stdout.startswith(TEXT)
    (prompt,) = scripted_server.second_prompts()
    assert first_answer(prompt) in prompt and all(result in prompt for result in RESULTS)


def test_a_tool_without_arguments(llm, scripted_server):
    scripted_server.second_prompts()
    ended = llm("-m", "calls", "-T", "llm_version", "Which version is it?")
    assert (ended.returncode, ended.stdout) == (0, f"{FINAL}\n"), ended.stderr
    (prompt,) = scripted_server.second_prompts()
    version = llm("--version").stdout.split()[-1]
    assert VERSION_CALL in prompt and f"<tool_response>\n{version}\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-m", "chats", "-o", "logit_bias", '{"99999999": 1}'), "logit_bias has the token id 99999999"),
        (("-m", "chats", "--key", "wrong"), "401 - Incorrect API key provided."),
        (("-m", "missing"), "404 - The model 'gpt-unknown' is not served here; this server has demo."),
    ],
    ids=["400", "401", "404"],
)
def test_refusals_are_one_line_with_our_message(llm, words, message):
    ended = llm(*words, "hello")
    assert ended.returncode == 1
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1
