"""Parses bodies into frozen requests; the server schedules only these.

Two steps, with tokenising in between: `parse_*` turns a body into a request, `plan_sequences` turns its token ids into
the engine's `SequenceRequest`s. A field that would change the answer, but is not implemented, is refused by name. null
counts as absent everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.fields.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from phalanx.server.fields.refusals import check_ids, in_range, invalid, token_limit, unsupported
from phalanx.server.requests.conversation import parse_conversation, parse_prompts
from phalanx.server.requests.offered_tools import definitions, parse_tools, shown_tools, takes_tools
from phalanx.server.requests.parsed import (
    ApiModel,
    ChatRequest,
    CompletionRequest,
    Conversation,
    Options,
    TokenizeRequest,
)
from phalanx.server.requests.sampling_fields import MAX_TOP_LOGPROBS, parse_options, resolve_model
from phalanx.server.requests.thinking_fields import thinking_variables
from phalanx.types import ModelInfo, SequenceRequest, StopRule

MAX_SCORED_PROMPT = 1 << 16  # log-probabilities of a prompt; they come from the engine at once, and take 45 ms to read
MAX_SCORED = 1 << 18  # of all prompts of a request; as objects they take 100 MB
MAX_ECHOED = 1 << 23  # characters of all echoed prompts of a request


def parse_chat(body: ChatBody, served: ApiModel) -> ChatRequest:
    """Parse a chat request.

    Raises:
        InvalidRequest: names the field.
    """
    _refuse_other_outputs(body)
    tools = parse_tools(body, served)
    thinking = thinking_variables(
        effort=body.reasoning_effort,
        thinking=body.thinking,
        reasoning=body.reasoning,
        enabled=body.enable_thinking,
        budget=body.thinking_budget,
    )
    kwargs = template_variables(body.chat_template_kwargs, thinking, body.verbosity)
    return ChatRequest(
        options=parse_options(body, served, _chat_max_tokens(body), _chat_logprobs(body)),
        conversation=parse_conversation(body, kwargs if tools is None else _with_tools(kwargs, body), served),
        tools=tools,
    )


def template_variables(
    given: Mapping[str, Any] | None, thinking: Mapping[str, Any], verbosity: str | None
) -> dict[str, Any]:
    """The variables of a request's chat template. The client's own chat_template_kwargs win."""
    return {**thinking, **({} if verbosity is None else {"verbosity": verbosity}), **(given or {})}


def parse_completion(body: CompletionBody, served: ApiModel) -> CompletionRequest:
    """Parse a text completion request.

    Raises:
        InvalidRequest: names the field.
    """
    if body.suffix:
        raise unsupported("suffix")
    echo = bool(body.echo)
    max_tokens = token_limit("max_tokens", body.max_tokens, least=0 if echo else 1)
    if body.max_tokens is None and served.default_max_tokens is not None:
        max_tokens = max(served.default_max_tokens, body.min_tokens or 0)
    if body.logprobs is not None:
        in_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    prompts = parse_prompts(body.prompt)
    options = parse_options(body, served, max_tokens, body.logprobs)
    if len(prompts) > served.max_prompts:
        raise invalid(
            "prompt",
            f"{len(prompts)} prompts in one request; this server takes {served.max_prompts} (--max-prompts).",
        )
    return CompletionRequest(options=options, prompts=prompts, echo=echo)


def parse_tokenize(body: TokenizeBody, served: ApiModel) -> TokenizeRequest:
    """Parse a tokenize request.

    Raises:
        InvalidRequest: names the field.
    """
    resolve_model(body.model, served)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    source: str | Conversation
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise invalid(name, f"{name} goes with messages, not with prompt.")
        source = body.prompt
    else:
        if body.add_special_tokens is not None:
            raise invalid("add_special_tokens", "add_special_tokens goes with prompt, not with messages.")
        variables = dict(body.chat_template_kwargs or {})
        if body.tools and takes_tools(served):
            variables = _with_tools(variables, body)
        source = parse_conversation(body, variables, served)
    special = body.add_special_tokens is not False
    return TokenizeRequest(source=source, add_special_tokens=special, with_texts=bool(body.return_token_strs))


def parse_detokenize(body: DetokenizeBody, served: ApiModel, info: ModelInfo) -> list[int]:
    """Parse a detokenize request: token ids, all inside the vocabulary.

    Raises:
        InvalidRequest: names the field.
    """
    resolve_model(body.model, served)
    check_ids("tokens", body.tokens, info.vocab_size)
    return body.tokens


def plan_sequences(
    options: Options,
    prompts: Sequence[list[int]],
    *,
    field: str,
    group: str,
    seed: int,
    eos_ids: frozenset[int],
    info: ModelInfo,
    echo: bool = False,
    owner: str = "",
    grammar: str = "",
    checkpoint: int = 0,
) -> list[SequenceRequest]:
    """The engine's requests for `len(prompts)` prompts with n choices each, in the order of the answer's `index`.

    Args:
        field: the prompts' field ("prompt" or "messages"), for errors.
        group: id of the whole request; sequence i is `{group}/{i}`.
        seed: shared by all choices; a choice's index is also a part of its sampling key.
        owner: of the request's API key; see `SequenceRequest`.
        grammar: of the outputs, compiled before. At its end it allows only the model's end token, so it overrides
            `ignore_eos`.
        checkpoint: see `SequenceRequest`.

    Raises:
        InvalidRequest: a prompt is empty, has an id outside the vocabulary, or leaves no room in the context.
    """
    check_ids("stop_token_ids", options.stop_token_ids, info.vocab_size)
    check_ids("logit_bias", options.sampling.logit_bias, info.vocab_size)
    passes_eos = options.ignore_eos and not grammar
    stop_ids = options.stop_token_ids if passes_eos else options.stop_token_ids | eos_ids
    if echo and options.sampling.logprobs is not None:
        _check_scored(prompts, options.n, options.sampling.logprobs)
    requests: list[SequenceRequest] = []
    for prompt in prompts:
        max_tokens = _max_tokens(options, len(prompt), info.max_model_len, field)
        check_ids(field, prompt, info.vocab_size)
        stop = StopRule(max_tokens=max_tokens, min_tokens=min(options.min_tokens, max_tokens), stop_ids=stop_ids)
        for choice in range(options.n):
            request = SequenceRequest(
                id=f"{group}/{len(requests)}",
                group=group,
                prompt=prompt,
                sampling=replace(options.sampling, seed=seed, choice=choice),
                stop=stop,
                prompt_logprobs=options.sampling.logprobs if echo else None,
                timeout_s=options.timeout_s,
                owner=owner,
                cache_salt=options.cache_salt,
                max_drafts=options.max_drafts,
                checkpoint=checkpoint,
                grammar=grammar,
            )
            requests.append(request)
    return requests


def check_echoed(n_chars: int, n: int) -> None:
    """Refuse an echo of too much text.

    Args:
        n_chars: of all prompts.
        n: choices of each.
    """
    if n_chars * n > MAX_ECHOED:
        raise invalid("echo", f"echo would answer {n_chars * n} characters; at most {MAX_ECHOED} are allowed.")


def _check_scored(prompts: Sequence[list[int]], n: int, top: int) -> None:
    for what, n_tokens, most in [
        ("of one prompt", max(map(len, prompts)), MAX_SCORED_PROMPT),
        ("of all prompts", sum(map(len, prompts)) * n, MAX_SCORED),
    ]:
        if (entries := n_tokens * (1 + top)) > most:
            raise invalid(
                "logprobs",
                f"echo with logprobs={top} would answer {entries} log-probabilities {what}; at most {most} are "
                "allowed. Ask for fewer, for fewer prompts, or for shorter ones.",
            )


def _max_tokens(options: Options, n_prompt: int, max_model_len: int, field: str) -> int:
    wanted = options.max_tokens
    if n_prompt == 0:
        raise invalid(field, "The prompt has no tokens.")
    room = max_model_len - n_prompt
    limit = f"This model's maximum context length is {max_model_len} tokens."
    code = "context_length_exceeded"
    if room < 1:
        message = f"{limit} However, your prompt has {n_prompt} tokens, which leaves no room for an answer."
        raise InvalidRequest(f"{message} Please reduce the length of the prompt.", param=field, code=code)
    if wanted is None or (wanted > room and options.clamp_max_tokens):
        return room
    if wanted > room:
        message = (
            f"{limit} However, you requested {n_prompt + wanted} tokens ({n_prompt} in the prompt, {wanted} in the "
            "completion). Please reduce the length of the prompt or of the completion."
        )
        raise InvalidRequest(message, param=options.max_tokens_field, code=code)
    return max(1, wanted)  # 0 (echo only): the engine computes one token, which is dropped


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them.")
    return token_limit("max_tokens", old) if new is None else token_limit("max_completion_tokens", new)


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs or 0
    in_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if top and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
    return top if body.logprobs else None


def _with_tools(kwargs: dict[str, Any], body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The template's variables with the request's tools, if it has some."""
    if not body.tools:
        return kwargs
    if "tools" in kwargs:
        raise invalid("chat_template_kwargs", "chat_template_kwargs has tools, and so has the request.")
    return {**kwargs, "tools": shown_tools(definitions(body.tools))}


def _refuse_other_outputs(body: ChatBody) -> None:
    if body.echo:
        raise unsupported("echo", "only of /v1/completions")
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", 'only ["text"]')
