"""Microsoft's agent-framework: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools
and of one without, key, model, and `chat` for its client of chat completions in place of the one of responses.
"""

import asyncio
import json
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from asked import QUESTION, REPORT_WISH, WISH, Report, Trip, get_weather

tools_url, schema_url, key, model, *api = sys.argv[1:]
Client = OpenAIChatCompletionClient if api == ["chat"] else OpenAIChatClient


def agent(url, **more):
    options = {"store": False, **more.pop("default_options", {})}  # calls go back by value, not by an answer's id
    return Agent(Client(model=model, base_url=url, api_key=key), "Be brief.", default_options=options, **more)


def told(response):
    parts = [part for message in response.messages for part in message.contents]
    calls = [json.loads(part.arguments) for part in parts if part.type == "function_call"]
    thought = "".join(part.text for part in parts if part.type == "text_reasoning" and part.text)
    return {"calls": calls, "text": response.messages[-1].text.strip(), "thought": thought}


async def streamed(one, prompt, **options):
    stream = one.run(prompt, stream=True, **options)
    async for _ in stream:
        pass
    return await stream.get_final_response()


async def main():
    weather = agent(tools_url, tools=[get_weather])
    traveller = agent(schema_url, default_options={"temperature": 0})
    as_trip = {"options": {"response_format": Trip}}
    return {
        "whole": told(await weather.run(QUESTION)),
        "streamed": told(await streamed(weather, QUESTION)),
        "report": (await weather.run(REPORT_WISH, options={"response_format": Report})).value.model_dump(),
        "trip": (await traveller.run(WISH, **as_trip)).value.model_dump(),
        "streamed_trip": (await streamed(traveller, WISH, **as_trip)).value.model_dump(),
    }


print(json.dumps(asyncio.run(main())))
