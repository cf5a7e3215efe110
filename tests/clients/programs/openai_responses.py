"""openai: Responses: a task with a tool, whole and streamed, and its exceptions."""

import json
import sys

import openai

base_url, key, model, task, content = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
TOOL = {
    "type": "function",
    "name": "shell_command",
    "description": "Run a shell command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "strict": False,
}
ASKED = {"model": model, "tools": [TOOL], "store": False}


def turn(items: list, *, stream: bool) -> openai.types.responses.Response:
    """The model's response."""
    if not stream:
        return client.responses.create(input=items, **ASKED)
    with client.responses.stream(input=items, **ASKED) as events:
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(numbers)))
        return events.get_final_response()


def reasoning(response: openai.types.responses.Response) -> str:
    """The text of the reasoning."""
    parts = [part for item in response.output if item.type == "reasoning" for part in (item.content or item.summary)]
    return "".join(part.text for part in parts).strip()


def run(*, stream: bool) -> dict:
    """Two turns: a call, and the answer to its result."""
    items = [{"role": "user", "content": task}]
    first = turn(items, stream=stream)
    (call,) = (item for item in first.output if item.type == "function_call")
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": content})
    second = turn(items, stream=stream)
    assert second.status == "completed" and second.usage.input_tokens_details.cached_tokens > 0
    return {
        "call": [call.name, json.loads(call.arguments)],
        "thinking": [reasoning(first), reasoning(second)],
        "text": second.output_text.strip(),
    }


def refusal(**changed) -> list:
    """What the client makes of an error."""
    try:
        client.responses.create(**{**ASKED, "input": task, **changed})
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.body["message"]]
    raise AssertionError("not refused")


report = {
    "whole": run(stream=False),
    "streamed": run(stream=True),
    "more": {"string": client.responses.create(model=model, input=content).output_text.strip()},
    "errors": [refusal(model="gpt-unknown"), refusal(top_p=2), refusal(previous_response_id="resp_1")],
}
print(json.dumps(report))
