"""huggingface_hub's inference client: prints what `../test_agents.py` calls a report. Arguments: URLs of a model with
tools and of one without, key, model.
"""

import json
import os
import sys

del os.environ["HF_HUB_OFFLINE"]  # with it the client asks no server at all

from asked import QUESTION, REPORT_WISH, TOOL, WISH, Report, Trip, get_weather
from huggingface_hub import InferenceClient

tools_url, schema_url, key, model = sys.argv[1:]


def served(url):
    return InferenceClient(base_url=url, api_key=key)


def whole(client, messages, **asked):
    message = client.chat_completion(messages, model=model, **asked).choices[0].message
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls or []
    ]
    return {"role": "assistant", "content": message.content, "reasoning": message.reasoning, "tool_calls": calls}


def streamed(client, messages, **asked):
    content, reasoning, calls = "", "", {}
    for chunk in client.chat_completion(messages, model=model, stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += choice.delta.reasoning or ""
            for call in choice.delta.tool_calls or []:
                one = calls.setdefault(call.index, {"id": call.id, "type": "function", "function": {"arguments": ""}})
                if call.function.name:
                    one["function"]["name"] = call.function.name
                one["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": list(calls.values())}


def loop(ask, prompt, **asked):
    """Ask until there are no more calls."""
    messages, calls, thought = [{"role": "user", "content": prompt}], [], ""
    while True:
        message = ask(served(tools_url), messages, tools=[TOOL], **asked)
        thought += message["reasoning"] or ""
        if not message["tool_calls"]:
            return {"calls": calls, "text": message["content"].strip(), "thought": thought}
        messages.append(message)
        for call in message["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            calls.append(given)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": get_weather(**given)})


def form(kind):
    return {"type": "json_object", "value": kind.model_json_schema()}  # text-generation-inference's form


wish = [{"role": "user", "content": WISH}]
greedy = {"temperature": 0, "response_format": form(Trip)}
report = {
    "whole": loop(whole, QUESTION),
    "streamed": loop(streamed, QUESTION),
    "report": json.loads(loop(whole, REPORT_WISH, response_format=form(Report))["text"]),
    "trip": json.loads(whole(served(schema_url), wish, **greedy)["content"]),
    "streamed_trip": json.loads(streamed(served(schema_url), wish, **greedy)["content"]),
}
print(json.dumps(report))
