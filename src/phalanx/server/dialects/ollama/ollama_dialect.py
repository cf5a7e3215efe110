"""`/api/chat` and `/api/generate` (Ollama): parses their bodies into requests.

`ollama_format.py` writes the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.dialects.common.dialect import Dialect, ParsedBody, StaticAnswer
from phalanx.server.dialects.ollama.ollama_body import (
    READERS,
    Number,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
    OllamaTool,
)
from phalanx.server.dialects.ollama.ollama_format import CHAT_ANSWER, GENERATE_ANSWER, OllamaAnswer, OllamaFormat
from phalanx.server.dialects.ollama.ollama_messages import conversation_of
from phalanx.server.fields.openai_bodies import SamplingBody
from phalanx.server.fields.refusals import ONLY_FUNCTIONS, count, foreign_type, in_range, invalid, unsupported
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.requests.offered_tools import AllowedTools, choose_tools, define, shown_tools
from phalanx.server.requests.parsed import (
    AnswerGrammar,
    ApiModel,
    ChatRequest,
    CompletionRequest,
    Conversation,
    Options,
)
from phalanx.server.requests.sampling_fields import MAX_TOP_LOGPROBS, parse_options, parse_stop_strings, resolve_model
from phalanx.server.requests.structured import answer_of_schema

LEVELS = ("low", "medium", "high")
NEUTRAL: Mapping[str, float] = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}
"""Unsupported options that would change the answer -> the value that changes nothing."""
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""A sampling parameter -> the option's name for it."""


def parse_chat(body: OllamaChatBody, served: ApiModel) -> ParsedBody | StaticAnswer:
    """Parse a chat; without messages it only loads the model.

    Raises:
        InvalidRequest: names the field.
    """
    options = _options(body, served)
    if not body.messages:
        return _loaded(body, options, CHAT_ANSWER)
    defined = [_definition(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    tools = choose_tools(defined, AllowedTools(), served)
    variables = _thinking(body, served)
    if tools is not None:
        variables["tools"] = shown_tools(defined)
    messages = conversation_of(body.messages)
    request = ChatRequest(options=options, conversation=_conversation(messages, variables, served), tools=tools)
    return ParsedBody(request, partial(OllamaFormat, answer=CHAT_ANSWER))


def parse_generate(body: OllamaGenerateBody, served: ApiModel) -> ParsedBody | StaticAnswer:
    """Parse a prompt, which is a user's message unless it is `raw`; without one the request only loads the model.

    Raises:
        InvalidRequest: names the field.
    """
    options = _options(body, served)
    if body.suffix:
        raise unsupported("suffix")
    if body.template:
        raise unsupported("template", "the server has one: --chat-template")
    if body.context:
        raise unsupported("context", "send the conversation to /api/chat")
    if body.images:
        raise unsupported("images", "only text can be read by this model")
    form = partial(OllamaFormat, answer=GENERATE_ANSWER)
    if not body.prompt:
        return _loaded(body, options, GENERATE_ANSWER)
    variables = _thinking(body, served)
    if body.raw:
        if body.system:
            raise invalid("system", "system and raw exclude each other; write it into the prompt.")
        return ParsedBody(CompletionRequest(options=options, prompts=(body.prompt,), echo=False), form)
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    asked = replace(_conversation(messages, variables, served), field="prompt", is_as_sent=False)
    return ParsedBody(ChatRequest(options=options, conversation=asked), form)


def _loaded(body: OllamaBody, options: Options, answer: OllamaAnswer) -> StaticAnswer:
    reason: Literal["load", "unload"] = "unload" if _is_zero(body.keep_alive) else "load"
    return StaticAnswer(lambda created: answer.loaded(options.model, created, reason))


def _is_zero(duration: Any) -> bool:
    """Whether it is 0 seconds: a number, or a text as "0", "0s" and "0m0s"."""
    if isinstance(duration, str):
        return {digit for digit in duration if digit.isdigit()} == {"0"}
    return isinstance(duration, int | float) and not isinstance(duration, bool) and duration == 0


def _conversation(messages: list[dict[str, Any]], variables: dict[str, Any], served: ApiModel) -> Conversation:
    """The messages; a last one of the assistant is continued."""
    begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return Conversation(
        messages=messages,
        template_kwargs={**served.template_kwargs, **variables},
        add_generation_prompt=not begun,
        continue_final_message=begun,
    )


def _thinking(body: OllamaBody, served: ApiModel) -> dict[str, Any]:
    """Variables of the template."""
    think = body.think
    if think is None:
        return {}
    if isinstance(think, str) and think not in LEVELS:
        raise invalid("think", f"think is {think[:40]!r}; it must be true, false, {', '.join(LEVELS)}.")
    if think is not False and served.formats.reasoning is None:
        raise unsupported("think", "this model writes no reasoning that is recognised; see --reasoning-parser")
    level = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {"enable_thinking": think is not False, **level}


def _options(body: OllamaBody, served: ApiModel) -> Options:
    given = body.options or OllamaOptions()
    for name, neutral in NEUTRAL.items():
        if getattr(given, name) not in (None, neutral):
            raise unsupported(f"options.{name}", f"only {neutral:g}")
    sampling = {ours: value for ours, name in SAMPLING.items() if (value := getattr(given, name)) is not None}
    if "top_k" in sampling:
        sampling["top_k"] = _whole("options.top_k", sampling["top_k"])
    if _whole("options.repeat_last_n", given.repeat_last_n) == 0:
        sampling["repetition_penalty"] = 1.0
    elif given.repeat_last_n not in (None, -1) and given.repeat_penalty not in (None, 1.0):
        raise unsupported("options.repeat_last_n", "only -1 and 0: the penalty counts the whole text")
    seed = _whole("options.seed", given.seed)
    asked = SamplingBody(
        model=resolve_model(body.model, served),
        stream=body.stream is not False,
        seed=None if seed is None or seed < 0 else seed,
        **sampling,
    )
    most = _whole("options.num_predict", given.num_predict)
    most = None if most is None or most <= 0 else count("options.num_predict", most, least=1)
    try:
        options = parse_options(asked, served, most, _logprobs(body))
    except InvalidRequest as error:
        raise _renamed(error) from error
    stops = parse_stop_strings(given.stop, "options.stop")
    return replace(options, stop_strings=stops, answer=_format(body.format))


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """The error in this dialect's names."""
    name = SAMPLING.get(error.param or "")
    if name is None:
        return error
    return InvalidRequest(str(error).replace(f"{error.param}", f"options.{name}", 1), param=f"options.{name}")


def _logprobs(body: OllamaBody) -> int | None:
    top = body.top_logprobs or 0
    in_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if top and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
    return top if body.logprobs else None


def _format(form: str | dict[str, Any] | None) -> AnswerGrammar | None:
    if form is None or form == "":
        return None
    if isinstance(form, dict):
        return answer_of_schema("format", "format", form)
    if form != "json":
        raise invalid("format", f'format is {form[:40]!r}; it must be "json" or a JSON schema.')
    return answer_of_schema("format", "format", {"type": "object"})


def _whole(field: str, value: Number | None) -> int | None:
    if isinstance(value, float) and not value.is_integer():  # infinities too
        raise invalid(field, f"{field} must be a whole number, not {value}.")
    return None if value is None else int(value)


def _definition(tool: OllamaTool, where: str) -> ToolDefinition:
    if tool.type not in (None, "function"):
        raise foreign_type(where, tool.type, ONLY_FUNCTIONS)
    function = tool.function
    fields = (f"{where}.function.name", f"{where}.function.parameters")
    return define(function.name, function.description, function.parameters, fields)


CHAT = Dialect(body=OllamaChatBody, readers=READERS, parse=parse_chat, field="messages", id_prefix="ollama-")
GENERATE = Dialect(body=OllamaGenerateBody, readers=READERS, parse=parse_generate, field="prompt", id_prefix="ollama-")
