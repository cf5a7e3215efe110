"""Libraries for agents: each program in `programs/` runs loops of tools and asks for objects, and prints a report.

A report is what the client made of the answers: the `calls` that it ran, the last `text` and the model's `thought`,
`whole` and `streamed`; a `report` as an object; a `trip` held to a JSON schema, whole and streamed. The model with
tools is scripted, the one without is a trained one on a real engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from clients.demo_server import KEY, SERVED
from clients.scripted_server import FINAL, PLACES, REPORT, RESULTS, THOUGHT, first_answer

CLIENTS = {  # program, and what else it is told -> environment
    "openai_node_tools.mjs": "openai-node",
    "openai_node_responses.mjs": "openai-node",
    "vercel_ai_tools.mjs": "vercel-ai",
    "vercel_ai_tools.mjs openai": "vercel-ai",
    "langgraph_agent.py": "langchain",
    "pydantic_ai_agent.py": "pydantic-ai",
    "openai_agents.py": "openai-agents",
    "openai_agents.py chat": "openai-agents",
    "agent_framework_agent.py": "agent-framework",
    "agent_framework_agent.py chat": "agent-framework",
    "huggingface_client.py": "huggingface-hub",
    "instructor_client.py": "instructor",
}
LOOPS = [program for program in CLIENTS if program != "instructor_client.py"]  # it runs no tools
WITHOUT_THOUGHTS = [
    "openai_node_tools.mjs",
    "langgraph_agent.py",
    "agent_framework_agent.py chat",
]  # they read no reasoning
WITH_THOUGHTS = [program for program in LOOPS if program not in WITHOUT_THOUGHTS]


@pytest.fixture(scope="module")
def told(trained_server, scripted_server, report_of) -> Callable[[str], dict[str, Any]]:
    """The report of a program, and the `prompts` with results that the model saw meanwhile."""

    @cache
    def run(program: str) -> dict[str, Any]:
        urls = scripted_server.base_url, trained_server.base_url
        name, *told = program.split()
        report = report_of(CLIENTS[program], name, *urls, KEY, SERVED, *told)
        return {**report, "prompts": scripted_server.second_prompts()}

    return run


@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("program", LOOPS)
def test_a_loop_of_tools(told, program, way):
    loop = told(program)[way]
    assert (loop["calls"], loop["text"]) == (PLACES, FINAL)


@pytest.mark.parametrize("program", LOOPS)
def test_the_model_sees_its_own_words_and_the_results(told, program):
    """Each client sends calls back in its own form; the prompt has them as the model wrote them all the same."""
    prompts = [prompt for prompt in told(program)["prompts"] if '"get_weather"' in prompt]
    assert len(prompts) >= 2  # whole and streamed
    for prompt in prompts:
        _, said, following = prompt.partition(first_answer(prompt))
        assert said and all(result in following for result in RESULTS)


@pytest.mark.parametrize("way", ["whole", "streamed"])
@pytest.mark.parametrize("program", WITH_THOUGHTS)
def test_reasoning(told, program, way):
    assert told(program)[way]["thought"].strip() == THOUGHT


@pytest.mark.parametrize("program", CLIENTS)
def test_an_object_at_the_end_of_a_loop(told, program):
    """In the arguments of a call (langgraph, pydantic-ai, instructor), or with `response_format` beside the tools."""
    report = told(program)
    assert report["report"] == report.get("streamed_report", REPORT) == REPORT


@pytest.mark.parametrize("program", CLIENTS)
def test_an_object_held_to_a_schema(told, program):
    trip = told(program)["trip"]
    assert trip.keys() == {"city", "days", "meals", "note"}
    assert trip["city"] in ("Oslo", "Rome") and trip["days"] in range(1, 10)
    assert len(trip["meals"]) <= 3 and {*trip["meals"]} <= {"fish", "soup"}
    assert trip["note"] is None or len(trip["note"]) <= 20
    assert told(program)["streamed_trip"] == trip  # both are greedy


def test_texts_and_reasoning_that_a_client_takes_for_stored_are_refused_with_the_setting_that_avoids_it(told):
    """Vercel's `ai` sends references to them, but calls whole: a loop of nothing but calls needs no setting."""
    report = told("vercel_ai_tools.mjs openai")
    assert report["by_default"] == FINAL
    assert "set store: false in the client" in report["refusal"]
