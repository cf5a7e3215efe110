"""What a chat template or an encoder cannot take is refused by the name that the field has in the client's dialect."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.scripted_model import ScriptedEngine, tokenizer_of
from support.serving import serving

from phalanx.server.fields.refusals import MAX_DEPTH
from phalanx.text.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/api/generate"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
LEAVES_OUT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}<assistant>"
)
REFUSES = "{% if messages | length > 0 %}{{ raise_exception('not today') }}{% endif %}"
ASK = {"role": "user", "content": "Hi."}
SAID = {"role": "assistant", "content": "Well."}
HISTORY = [ASK, SAID, ASK]


def refusals(folder, template, requests):
    """The errors, each as message and param, where the dialect has one."""
    tokenizer_of("hermes", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    tokenizer = Tokenizer.load(folder)

    async def main():
        found = []
        async with asyncio.timeout(60), serving(tokenizer, ScriptedEngine(tokenizer, [])) as client:
            for path, body in requests:
                answer = await client.post(path, json={"model": "tiny", **body})
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                found.append((error, None) if isinstance(error, str) else (error["message"], error.get("param")))
        return found

    return asyncio.run(main())


def test_a_text_that_the_template_leaves_out(tmp_path):
    requests = [
        (CHAT, {"messages": HISTORY}),
        (RESPONSES, {"input": HISTORY}),
        (MESSAGES, {"messages": HISTORY, "max_tokens": 9}),
        (OLLAMA, {"messages": HISTORY}),
        (TEXT, {"prompt": "Hi.", "system": "Be brief."}),
    ]
    chat, responses, messages, ollama, text = refusals(tmp_path, LEAVES_OUT, requests)
    assert "the text of messages[1], whose role is assistant" in chat[0] and chat[1] == "messages[1].content"
    assert "the text of a message of input, whose role is assistant" in responses[0] and responses[1] == "input"
    assert "the text of a message of messages, whose role is assistant" in messages[0], "blocks are counted otherwise"
    assert "messages[1]" in ollama[0]
    assert "the text of a message of prompt, whose role is system" in text[0]


def test_messages_that_the_template_refuses(tmp_path):
    requests = [(CHAT, {"messages": HISTORY}), (RESPONSES, {"input": "Hi."})]
    chat, responses = refusals(tmp_path, REFUSES, requests)
    assert (chat[1], responses[1]) == ("messages", "input")
    assert "not today" in chat[0] and "not today" in responses[0]


@pytest.mark.parametrize("levels", [MAX_DEPTH, 480, 900])
def test_what_is_nested_too_deeply(tmp_path, levels):
    """Metadata of 480 levels ended the answer that repeats it, and tools of as many were a fault of the messages."""
    nested = json.loads("[" * levels + "]" * levels)
    schema = {"type": "object", "default": nested}
    function = {"name": "f", "parameters": schema}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": nested})}}
    requests = [
        (RESPONSES, {"input": "Hi.", "metadata": {"a": nested}}, "metadata"),
        (RESPONSES, {"input": "Hi.", "tool_choice": {"type": "x", "a": nested}}, "tool_choice"),
        (RESPONSES, {"input": "Hi.", "tools": [{"type": "function", **function}]}, "tools[0].parameters"),
        (MESSAGES, {"messages": [ASK], "max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}]}, "input_sc"),
        (OLLAMA, {"messages": [ASK], "tools": [{"function": function}]}, "tools[0].function.parameters"),
        (CHAT, {"messages": [ASK], "chat_template_kwargs": {"a": nested}}, "chat_template_kwargs"),
        (CHAT, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}, ASK]}, "tool_calls[0].function.argu"),
    ]
    found = refusals(tmp_path, LEAVES_OUT, [(path, body) for path, body, _ in requests])
    for (message, _), (_, _, field) in zip(found, requests, strict=True):
        assert field in message and "nested too deeply" in message


def test_a_call_as_deep_as_a_model_may_write_it_is_taken_back(tmp_path):
    nested = json.loads("[" * 255 + "]" * 255)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": nested})}}
    history = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK]
    tokenizer = tokenizer_of("hermes", tmp_path)

    async def main():
        engine = ScriptedEngine(tokenizer, ["Well.<|im_end|>"])
        async with asyncio.timeout(60), serving(tokenizer, engine) as client:
            answer = (await client.post(CHAT, json={"model": "tiny", "messages": history})).raise_for_status()
            assert answer.json()["choices"][0]["message"]["content"] == "Well."
        assert "[" * 255 in tokenizer.decode(engine.received[0].request.prompt, skip_special_tokens=False)

    asyncio.run(main())
