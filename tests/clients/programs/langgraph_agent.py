"""langchain's agent on langgraph: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with tools
and of one without, key, model.
"""

import json
import sys

from asked import QUESTION, WISH, Report, Trip, get_weather
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

tools_url, schema_url, key, model = sys.argv[1:]
asked = {"messages": [{"role": "user", "content": QUESTION}]}


def served(url):
    return ChatOpenAI(base_url=url, api_key=key, model=model, temperature=0, max_retries=0)


agent = create_agent(served(tools_url), tools=[tool(get_weather)])
messages = agent.invoke(asked)["messages"]
pieces = [piece for piece, _ in agent.stream(asked, stream_mode="messages") if isinstance(piece, AIMessageChunk)]
turns = {}
for piece in pieces:
    turns[piece.id] = turns[piece.id] + piece if piece.id in turns else piece
reporter = create_agent(served(tools_url), tools=[tool(get_weather)], response_format=ToolStrategy(Report))
traveller = served(schema_url).with_structured_output(Trip, method="json_schema", strict=True)


def told(messages):
    answers = [message for message in messages if isinstance(message, AIMessage)]
    return {"calls": [call["args"] for one in answers for call in one.tool_calls], "text": answers[-1].text}


report = {
    "whole": told(messages),
    "streamed": told(turns.values()),
    "report": reporter.invoke(asked)["structured_response"].model_dump(),
    "trip": traveller.invoke(WISH).model_dump(),
    "streamed_trip": list(traveller.stream(WISH))[-1].model_dump(),
}
print(json.dumps(report))
