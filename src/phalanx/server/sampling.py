"""Parses the options that chat and text completions share, from body to `Options`. Pure.

Ranges are OpenAI's; for fields that OpenAI does not have, vLLM's. Does not know prompts or messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.errors import UnknownModel
from phalanx.server.parsed import GenerationDefaults, Options, Served
from phalanx.server.refusals import count, in_range, invalid, refuse_unknown, show, unsupported
from phalanx.server.schema import SamplingBody
from phalanx.types import Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-4  # dividing float32 logits by less overflows, and at this temperature the draw is the argmax already
SEEDS = 1 << 64


def parse_options(body: SamplingBody, served: Served, max_tokens: int | None, logprobs: int | None) -> Options:
    """Parse everything but the prompt.

    Args:
        max_tokens: parsed by the caller, because its name depends on the endpoint.
        logprobs: number of top log-probabilities; parsed by the caller, because its form depends on the endpoint.

    Raises:
        InvalidRequest: names the field.
    """
    model = resolve_model(body.model, served)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= served.max_n:
        raise invalid("n", f"n must be from 1 to {served.max_n}, not {show(n)}.")
    min_tokens = count("min_tokens", body.min_tokens, least=0) or 0
    if max_tokens is not None and min_tokens > max(1, max_tokens):
        raise invalid("min_tokens", f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens}).")
    return Options(
        model=model,
        n=n,
        stream=bool(body.stream),
        include_usage=_include_usage(body),
        timing=bool(body.timing),
        speculation=bool(body.speculation),
        most_drafts=count("num_speculative_tokens", body.num_speculative_tokens, least=0),
        sampling=_sampling(body, served.defaults, logprobs),
        seeded=body.seed is not None,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=_stop_strings(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        timeout_s=_timeout(body.timeout),
    )


def resolve_model(name: str | None, served: Served) -> str:
    """The requested name, or the default one.

    Raises:
        UnknownModel: this server does not serve a model of that name.
    """
    if name is None:
        return served.names[0]
    if name not in served.names:
        raise UnknownModel(
            f"The model {name[:200]!r} is not served here; this server has {', '.join(served.names)}.",
            param="model",
            code="model_not_found",
        )
    return name


def _sampling(body: SamplingBody, defaults: GenerationDefaults, logprobs: int | None) -> Sampling:
    temperature = _number(body, "temperature", 0.0, MAX_TEMPERATURE, defaults.temperature)
    top_p = _number(body, "top_p", 0.0, 1.0, defaults.top_p)
    top_k = int(_number(body, "top_k", -1, 1 << 31, defaults.top_k))
    return Sampling(
        seed=(body.seed or 0) % SEEDS,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p if top_p > 0.0 else 1.0,
        top_k=1 if top_p == 0.0 else max(0, top_k),  # top_p 0 keeps only the most likely token
        min_p=_number(body, "min_p", 0.0, 1.0, defaults.min_p),
        repetition_penalty=_number(body, "repetition_penalty", 0.01, 100.0, defaults.repetition_penalty),
        presence_penalty=_number(body, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=_number(body, "frequency_penalty", -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=logprobs,
    )


def _number(body: SamplingBody, field: str, low: float, high: float, default: float) -> float:
    value: float | None = getattr(body, field)
    return default if value is None else in_range(field, value, low, high)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 12):
            raise invalid("logit_bias", f"logit_bias has the key {key[:40]!r}, which is not a token id.")
        parsed[int(key)] = in_range("logit_bias", value, -100.0, 100.0)
    return parsed


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else (stop or [])
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.")
    if any(not text or len(text) > MAX_STOP_CHARS for text in strings):
        raise invalid("stop", f"stop strings must have 1 to {MAX_STOP_CHARS} characters.")
    return tuple(dict.fromkeys(strings))


def _include_usage(body: SamplingBody) -> bool:
    options = body.stream_options
    if options is None:
        return False
    refuse_unknown(options, "stream_options.")
    if not body.stream:
        raise invalid("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    return bool(options.include_usage)


def _timeout(seconds: float | None) -> float | None:
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise invalid("timeout", f"timeout must be a positive number of seconds, not {show(seconds)}.")
    return seconds
