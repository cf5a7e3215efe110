"""openai-python: prints what `../test_chat_clients.py` calls a report. Arguments: base URL, key, model, prompt."""

import json
import sys

import openai

base_url, key, model, prompt = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": prompt}]
asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}

chat = client.chat.completions.create(**asked)
message = chat.choices[0].message
following = [*messages, message, {"role": "user", "content": "And then?"}]  # the answer as the client parsed it
second = client.chat.completions.create(**{**asked, "messages": following})

streamed, usage = "", None
for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
    streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = chunk.usage or usage
with client.chat.completions.stream(**asked, stop=".") as helper:
    for _ in helper:
        pass
    final = helper.get_final_completion().choices[0].message.content


def refusal(client, **fields):
    try:
        client.chat.completions.create(**{**asked, **fields})
    except openai.APIStatusError as error:
        kind = type(error).__name__
        return {
            "kind": kind,
            "status": error.status_code,
            "message": error.message,
            "code": error.code,
            "param": error.param,
        }
    return None


report = {
    "chat": {
        "text": message.content,
        "finish": chat.choices[0].finish_reason,
        "tokens": chat.usage.completion_tokens,
    },
    "second": second.choices[0].message.content,
    "stream": {"text": streamed, "tokens": usage.completion_tokens},
    "helper": final,
    "models": [entry.id for entry in client.models.list()],
    "completion": client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=24).choices[0].text,
    "errors": {
        400: refusal(client, temperature=-1),
        401: refusal(client.with_options(api_key="wrong")),
        404: refusal(client, model="gpt-unknown"),
    },
}
print(json.dumps(report))
