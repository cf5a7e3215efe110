"""langchain-openai: prints what `../test_chat_clients.py` calls a report. Arguments: base URL, key, model, prompt."""

import json
import sys

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

base_url, key, model, prompt = sys.argv[1:]
asked = {"base_url": base_url, "api_key": key, "model": model, "temperature": 0, "max_tokens": 24, "max_retries": 0}
chat_model = ChatOpenAI(**asked, stream_usage=True)

answer = chat_model.invoke(prompt)
second = chat_model.invoke([HumanMessage(prompt), answer, HumanMessage("And then?")])  # the answer as the client has it
whole = None
for piece in chat_model.stream(prompt):
    whole = piece if whole is None else whole + piece


def refusal(**fields):
    try:
        ChatOpenAI(**{**asked, **fields}).invoke(prompt)
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
        "text": answer.content,
        "finish": answer.response_metadata["finish_reason"],
        "tokens": answer.usage_metadata["output_tokens"],
    },
    "second": second.content,
    "stream": {"text": whole.content, "tokens": whole.usage_metadata["output_tokens"]},
    "completion": OpenAI(**asked).invoke(prompt),
    "errors": {400: refusal(temperature=-1), 401: refusal(api_key="wrong"), 404: refusal(model="gpt-unknown")},
}
print(json.dumps(report))
