"""Parses bodies into frozen requests; the server schedules only these. Pure: no I/O, no clock, no tokenizer.

Two steps, because tokenising lies between them: `parse_*` turns a body into a request, `plan_sequences` turns its token
ids into the engine's `SequenceRequest`s. A field that would change the answer, but is not implemented, is refused by
name. null counts as absent everywhere. Does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.server.messages import parse_conversation, parse_prompts
from phalanx.server.parsed import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    Options,
    Served,
    TokenizeRequest,
)
from phalanx.server.refusals import check_ids, count, in_range, invalid, refuse_unknown, unsupported
from phalanx.server.sampling import MAX_TOP_LOGPROBS, parse_options, resolve_model
from phalanx.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from phalanx.types import ModelInfo, SequenceRequest, StopRule


def parse_chat(body: ChatBody, served: Served) -> ChatRequest:
    """Parse a chat request.

    Raises:
        InvalidRequest: names the field.
    """
    refuse_unknown(body)
    _refuse_tools(body)
    _refuse_other_outputs(body)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatRequest(
        options=parse_options(body, served, _chat_max_tokens(body), _chat_logprobs(body)),
        conversation=parse_conversation(body, kwargs, served),
    )


def parse_completion(body: CompletionBody, served: Served) -> CompletionRequest:
    """Parse a text completion request.

    Raises:
        InvalidRequest: names the field.
    """
    refuse_unknown(body)
    if body.suffix:
        raise unsupported("suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "only the same number as n")
    echo = bool(body.echo)
    max_tokens = count("max_tokens", body.max_tokens, least=0 if echo else 1)
    if body.logprobs is not None:
        in_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    prompts = parse_prompts(body.prompt)
    options = parse_options(body, served, max_tokens, body.logprobs)
    if len(prompts) * options.n > served.max_n:
        raise invalid("prompt", f"{len(prompts)} prompts times n={options.n} is more than the {served.max_n} allowed.")
    return CompletionRequest(options=options, prompts=prompts, echo=echo)


def parse_tokenize(body: TokenizeBody, served: Served) -> TokenizeRequest:
    """Parse a tokenize request.

    Raises:
        InvalidRequest: names the field.
    """
    refuse_unknown(body)
    resolve_model(body.model, served)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Send either prompt or messages.")
    source: str | Conversation
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise invalid(name, f"{name} goes with messages, not with prompt.")
        source = body.prompt
    else:
        if body.add_special_tokens is not None:
            raise invalid("add_special_tokens", "add_special_tokens goes with prompt, not with messages.")
        source = parse_conversation(body, dict(body.chat_template_kwargs or {}), served)
    special = body.add_special_tokens is not False
    return TokenizeRequest(source=source, add_special_tokens=special, with_texts=bool(body.return_token_strs))


def parse_detokenize(body: DetokenizeBody, served: Served, vocab_size: int) -> list[int]:
    """Parse a detokenize request: token ids, all inside the vocabulary.

    Raises:
        InvalidRequest: names the field.
    """
    refuse_unknown(body)
    resolve_model(body.model, served)
    check_ids("tokens", body.tokens, vocab_size)
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
    cache_salt: str = "",
) -> list[SequenceRequest]:
    """The engine's requests for `len(prompts)` prompts with n choices each, in the order of the answer's `index`.

    Args:
        field: the prompts' field ("prompt" or "messages"), for errors.
        group: id of the whole request; sequence i is `{group}/{i}`.
        seed: shared by all choices; a choice's index is a part of its sampling key as well.
        cache_salt: sequences share cached prefixes only with sequences of the same salt.

    Raises:
        InvalidRequest: a prompt is empty, has an id outside the vocabulary, or leaves no room in the context.
    """
    check_ids("stop_token_ids", options.stop_token_ids, info.vocab_size)
    check_ids("logit_bias", options.sampling.logit_bias, info.vocab_size)
    stop_ids = options.stop_token_ids if options.ignore_eos else options.stop_token_ids | eos_ids
    requests: list[SequenceRequest] = []
    for prompt in prompts:
        check_ids(field, prompt, info.vocab_size)
        max_tokens = _max_tokens(options.max_tokens, len(prompt), info.max_model_len, field)
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
                cache_salt=cache_salt,
                most_drafts=options.most_drafts,
            )
            requests.append(request)
    return requests


def _max_tokens(wanted: int | None, n_prompt: int, max_model_len: int, field: str) -> int:
    if n_prompt == 0:
        raise invalid(field, "The prompt has no tokens.")
    room = max_model_len - n_prompt
    limit = f"This model's maximum context length is {max_model_len} tokens."
    code = "context_length_exceeded"
    if room < 1:
        message = f"{limit} However, your prompt has {n_prompt} tokens, which leaves no room for an answer."
        raise InvalidRequest(f"{message} Please reduce the length of the prompt.", param=field, code=code)
    if wanted is not None and wanted > room:
        message = (
            f"{limit} However, you requested {n_prompt + wanted} tokens ({n_prompt} in the prompt, {wanted} in the "
            "completion). Please reduce the length of the prompt or of the completion."
        )
        raise InvalidRequest(message, param="max_tokens", code=code)
    return room if wanted is None else max(1, wanted)  # 0 (echo only): the engine computes one token, which is dropped


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them.")
    return count("max_tokens", old, least=1) if new is None else count("max_completion_tokens", new, least=1)


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs or 0
    in_range("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
    if top and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
    return top if body.logprobs else None


def _refuse_tools(body: ChatBody) -> None:
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise unsupported(name, "tool calls are not supported yet")
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none"):
            raise unsupported(name, "tool calls are not supported yet")


def _refuse_other_outputs(body: ChatBody) -> None:
    if body.response_format is not None and body.response_format != {"type": "text"}:
        raise unsupported("response_format", 'only {"type": "text"}, so far')
    if body.modalities is not None and body.modalities != ["text"]:
        raise unsupported("modalities", 'only ["text"]')
