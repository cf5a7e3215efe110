"""anthropic: prints a report of what it made of the answers. Arguments: base URL without /v1, key, model.

A tool loop whole and one streamed, each with the client's own form of the first answer sent back; counts; the final
text of a stream; thinking; and the client's exceptions for refusals.
"""

import json
import sys

import anthropic

base_url, key, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "Ask for the weather.", "input_schema": schema}]
question = {"role": "user", "content": "How is the weather in Oslo?"}
system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
asked = {"model": model, "max_tokens": 200, "system": system, "tools": tools, "thinking": {"type": "adaptive"}}


def result_of(message):
    (call,) = (block for block in message.content if block.type == "tool_use")
    block = {"type": "tool_result", "tool_use_id": call.id, "content": "rain and wind", "is_error": False}
    return {"role": "user", "content": [block]}


def loop(ask):
    first = ask([question])
    messages = [question, {"role": "assistant", "content": first.content}, result_of(first)]
    second = ask(messages)
    counted = {name: value for name, value in asked.items() if name != "max_tokens"}
    return {
        "blocks": [block.type for block in first.content],
        "thinking": first.content[0].thinking.strip(),
        "input": first.content[-1].input,
        "reasons": [first.stop_reason, second.stop_reason],
        "text": second.content[-1].text.strip(),
        "prompt": second.usage.input_tokens + second.usage.cache_read_input_tokens,
        "cached": second.usage.cache_read_input_tokens,
        "first": first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens,
        "counted": client.messages.count_tokens(messages=messages, **counted).input_tokens,
    }


def whole(messages):
    return client.messages.create(messages=messages, **asked)


def streamed(messages):
    with client.messages.stream(messages=messages, **asked) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        return stream.get_final_message()


def refusal(client, **fields):
    try:
        client.messages.create(**{**asked, "messages": [question], **fields})
    except anthropic.APIStatusError as error:
        return {"kind": type(error).__name__, "type": error.body["error"]["type"], "message": error.message}
    return None


image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
with client.messages.stream(messages=[question], model=model, max_tokens=50, stop_sequences=["wind"]) as stream:
    text = "".join(stream.text_stream)
    ending = stream.get_final_message()
report = {
    "whole": loop(whole),
    "streamed": loop(streamed),
    "text": text,
    "stop": [ending.stop_reason, ending.stop_sequence],
    "models": [[entry.id, entry.type, entry.display_name] for entry in client.models.list()],
    "errors": {
        400: refusal(client, messages=[{"role": "user", "content": [image]}]),
        401: refusal(client.with_options(api_key="wrong")),
        404: refusal(client, model="claude-unknown"),
    },
}
print(json.dumps(report))
