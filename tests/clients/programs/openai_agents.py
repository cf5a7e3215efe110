"""openai-agents: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools and of one
without, key, model, and `chat` for its model of chat completions in place of the default, which asks for responses.
"""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIProvider, Runner, function_tool, set_tracing_disabled
from asked import QUESTION, REPORT_WISH, WISH, Report, Trip, get_weather
from openai import AsyncOpenAI

tools_url, schema_url, key, model, *api = sys.argv[1:]
set_tracing_disabled(True)


def served(url):
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    return OpenAIProvider(openai_client=client, use_responses=False if api == ["chat"] else None).get_model(model)


def told(result):
    items = [item.raw_item for item in result.new_items]
    calls = [json.loads(item.arguments) for item in items if getattr(item, "type", "") == "function_call"]
    thoughts = [item.summary or item.content for item in items if getattr(item, "type", "") == "reasoning"]
    thought = "".join(part.text for parts in thoughts for part in parts)
    return {"calls": calls, "text": result.final_output, "thought": thought}


async def main():
    agent = Agent(name="weather", instructions="Be brief.", tools=[function_tool(get_weather)], model=served(tools_url))
    whole = await Runner.run(agent, QUESTION)
    stream = Runner.run_streamed(agent, QUESTION)
    async for _ in stream.stream_events():
        pass
    reporter = agent.clone(output_type=Report)
    with_report = await Runner.run(reporter, REPORT_WISH)
    greedy = ModelSettings(temperature=0)
    traveller = Agent(name="trip", output_type=Trip, model=served(schema_url), model_settings=greedy)
    trip = await Runner.run(traveller, WISH)
    streamed = Runner.run_streamed(traveller, WISH)
    async for _ in streamed.stream_events():
        pass
    return {
        "whole": told(whole),
        "streamed": told(stream),
        "report": with_report.final_output.model_dump(),
        "trip": trip.final_output.model_dump(),
        "streamed_trip": streamed.final_output.model_dump(),
    }


print(json.dumps(asyncio.run(main())))
