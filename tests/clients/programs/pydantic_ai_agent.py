"""pydantic-ai: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of one
without, key, model.
"""

import json
import sys

from asked import QUESTION, WISH, Report, Trip, get_weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

tools_url, schema_url, key, model = sys.argv[1:]


def served(url):
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key=key))


async def read(_, events):
    async for _ in events:
        pass


def told(result):
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [part.args_as_dict() for part in parts if part.part_kind == "tool-call" and part.tool_name == "get_weather"]
    thought = "".join(part.content for part in parts if part.part_kind == "thinking")
    return {"calls": calls, "text": result.output, "thought": thought}


agent = Agent(served(tools_url), tools=[get_weather])
whole = agent.run_sync(QUESTION)
with_report = Agent(served(tools_url), tools=[get_weather], output_type=Report).run_sync(QUESTION)
stream = agent.run_sync(QUESTION, event_stream_handler=read)  # asks for streams; `run_stream` ends at the first text
greedy = {"temperature": 0}
traveller = Agent(served(schema_url), output_type=NativeOutput(Trip, strict=True), model_settings=greedy)
objects = traveller.run_stream_sync(WISH)
partial = [dict(one) for one in objects.stream_output(debounce_by=None)]
report = {
    "whole": told(whole),
    "streamed": told(stream),
    "report": with_report.output.model_dump(),
    "trip": traveller.run_sync(WISH).output.model_dump(),
    "streamed_trip": partial[-1],
}
print(json.dumps(report))
