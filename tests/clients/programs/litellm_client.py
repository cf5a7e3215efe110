"""litellm: prints what `../test_chat_clients.py` calls a report. Arguments: base URL, key, model, prompt."""

import json
import sys

import litellm

base_url, key, model, prompt = sys.argv[1:]
litellm.suppress_debug_info = True
messages = [{"role": "user", "content": prompt}]
server = {"api_base": base_url, "api_key": key, "num_retries": 0, "max_retries": 0}
asked = {**server, "model": f"openai/{model}", "messages": messages, "temperature": 0, "max_tokens": 24}

chat = litellm.completion(**asked)
message = chat.choices[0].message
following = [*messages, message, {"role": "user", "content": "And then?"}]  # the answer as the client parsed it
second = litellm.completion(**{**asked, "messages": following})

streamed, usage = "", None
for chunk in litellm.completion(**asked, stream=True, stream_options={"include_usage": True}):
    streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
    usage = getattr(chunk, "usage", None) or usage
completion = litellm.text_completion(
    **server, model=f"text-completion-openai/{model}", prompt=prompt, temperature=0, max_tokens=24
)


def refusal(**fields):
    try:
        litellm.completion(**{**asked, **fields})
    except (litellm.BadRequestError, litellm.AuthenticationError, litellm.NotFoundError) as error:
        return {"kind": type(error).__name__, "status": error.status_code, "message": error.message}
    return None


report = {
    "chat": {
        "text": message.content,
        "finish": chat.choices[0].finish_reason,
        "tokens": chat.usage.completion_tokens,
    },
    "second": second.choices[0].message.content,
    "stream": {"text": streamed, "tokens": usage.completion_tokens},
    "completion": completion.choices[0].text,
    "models": litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=base_url, api_key=key
    ),
    "errors": {
        400: refusal(temperature=-1),
        401: refusal(api_key="wrong"),
        404: refusal(model="openai/gpt-unknown"),
    },
}
print(json.dumps(report))
