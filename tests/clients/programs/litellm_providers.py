"""litellm: a loop of tools with each provider that this server serves, whole and streamed, and both asynchronously.
Prints a report for each. Arguments: origin, key, model.
"""

import asyncio
import json
import sys

import litellm
from asked import QUESTION, TOOL, get_weather

origin, key, model = sys.argv[1:]
litellm.suppress_debug_info = True
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]}
PROVIDERS = {  # the prefix of the model's name -> path of the base URL, further arguments
    "openai": ("/v1", {}),
    "hosted_vllm": ("/v1", {}),
    "anthropic": ("", THINKING),
    "ollama_chat": ("", {}),
    "openai/responses": ("/v1", {}),
}


def turn(messages, asked, *, stream):
    """The answer."""
    if not stream:
        return litellm.completion(messages=messages, **asked)
    chunks = list(litellm.completion(messages=messages, stream=True, **asked))
    return litellm.stream_chunk_builder(chunks, messages=messages)


def turn_asynchronously(messages, asked, *, stream):
    """The answer, from the client that servers use: it has HTTP headers of its own."""

    async def ask():
        answer = await litellm.acompletion(messages=messages, stream=stream, **asked)
        return [chunk async for chunk in answer] if stream else answer

    answer = asyncio.run(ask())
    return litellm.stream_chunk_builder(answer, messages=messages) if stream else answer


def loop(asked, *, stream, turn=turn):
    """Ask until there are no more calls."""
    messages = [{"role": "user", "content": QUESTION}]
    calls, thoughts, ends = [], [], []
    while True:
        choice = turn(messages, asked, stream=stream).choices[0]
        message = choice.message
        thoughts.append((getattr(message, "reasoning_content", None) or "").strip())
        ends.append(choice.finish_reason)
        if not message.tool_calls:
            return {"calls": calls, "text": message.content.strip(), "thought": "".join(thoughts), "ends": ends}
        messages.append(message.model_dump())  # the answer as the client parsed it
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            calls.append(given)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**given)})


def refusal(asked):
    """What the client makes of an error."""
    try:
        litellm.completion(messages=[{"role": "user", "content": QUESTION}], **asked, top_p=2)
    except litellm.BadRequestError as error:
        return error.message
    return None


def report(provider, path, more):
    """Both loops and a refusal."""
    server = {"model": f"{provider}/{model}", "api_base": origin + path, "api_key": key, **more}
    asked = {**server, "num_retries": 0, "max_retries": 0, "tools": [TOOL]}
    ways = {
        "whole": loop(asked, stream=False),
        "streamed": loop(asked, stream=True),
        "whole, asynchronous": loop(asked, stream=False, turn=turn_asynchronously),
        "streamed, asynchronous": loop(asked, stream=True, turn=turn_asynchronously),
    }
    return {**ways, "refusal": refusal(asked)}


print(json.dumps({provider: report(provider, *served) for provider, served in PROVIDERS.items()}))
