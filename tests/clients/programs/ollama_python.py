"""ollama: a task with a tool, whole and streamed, generate, the model, and its exceptions."""

import json
import sys

import ollama

base_url, key, model, task, content = sys.argv[1:]
client = ollama.Client(host=base_url.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"})


def shell_command(command: str) -> str:
    """Run a shell command.

    Args:
        command: the command.
    """
    raise AssertionError(command)


def turn(messages: list, *, stream: bool) -> ollama.Message:
    """The model's message."""
    answer = client.chat(model=model, messages=messages, tools=[shell_command], think=True, stream=stream)
    if not stream:
        assert answer.done and answer.done_reason == "stop" and answer.eval_count and answer.total_duration
        return answer.message
    joined = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in answer:
        joined.content += part.message.content or ""
        joined.thinking += part.message.thinking or ""
        joined.tool_calls += part.message.tool_calls or []
    assert part.done and part.prompt_eval_count
    return joined


def run(*, stream: bool) -> dict:
    """Two turns: a call, and the answer to its result."""
    messages = [{"role": "user", "content": task}]
    first = turn(messages, stream=stream)
    (call,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_name": call.function.name, "content": content}]
    second = turn(messages, stream=stream)
    return {
        "call": [call.function.name, dict(call.function.arguments)],
        "thinking": [first.thinking.strip(), second.thinking.strip()],
        "text": second.content.strip(),
    }


def refusal(work) -> list:
    """What the client makes of an error."""
    try:
        work()
    except ollama.ResponseError as error:
        return [type(error).__name__, error.status_code, str(error.error)]
    raise AssertionError("not refused")


shown = client.show(model)
parts = client.generate(model=model, prompt=content, stream=True)
report = {
    "whole": run(stream=False),
    "streamed": run(stream=True),
    "models": [entry.model for entry in client.list().models],
    "running": [entry.model for entry in client.ps().models],
    "more": {
        "generate": client.generate(model=model, prompt=content).response.strip(),
        "streamed": "".join(
            part.response for part in client.generate(model=model, prompt=content, stream=True)
        ).strip(),
        "loaded": client.generate(model=f"{model}:latest").done_reason,
        "capabilities": shown.capabilities,
        "context": shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"],
    },
    "errors": [
        refusal(lambda: client.chat(model="gpt-unknown", messages=[])),
        refusal(lambda: client.chat(model=model, messages=[{"role": "user", "content": "x"}], options={"top_p": 2})),
        refusal(lambda: client.embed(model=model, input="x")),
        refusal(lambda: client.pull("no such")),
    ],
}
print(json.dumps(report))
