"""Parses the options that chat and text completions share into `Options`.

Ranges are OpenAI's; for fields that OpenAI does not have, vLLM's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from phalanx.errors import UnknownModel
from phalanx.http.model_lists import name_meant
from phalanx.server.fields.openai_bodies import SamplingBody, StreamOptions
from phalanx.server.fields.refusals import count, in_range, invalid, show, unsupported
from phalanx.server.requests.parsed import ApiModel, GenerationDefaults, Options
from phalanx.server.requests.structured import parse_answer
from phalanx.types import Sampling

MAX_STOP_STRINGS = 16  # OpenAI takes 4
MAX_STOP_CHARS = 4096  # of all together; the automaton that finds them has a state per character
MAX_STOP_IDS = 1024  # vLLM and OpenAI name no limit; a model has a handful that make sense
MAX_BIASES = 1024  # OpenAI takes 1,024
MAX_TOP_LOGPROBS = 20  # as OpenAI
MAX_TEMPERATURE = 100.0  # OpenAI takes 2; here all tokens are about as likely
GREEDY_BELOW = 1e-4  # dividing float32 logits by less overflows, and at this temperature the draw is the argmax already
MAX_SALT_CHARS = 256  # it is kept with every prefix; a hash in hexadecimal has 64
SEEDS = 1 << 64  # different ones: the noise has a 64-bit key
NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "bad_words": [],
    "priority": 0,
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "return_hidden_states": False,
}
"""Fields of vLLM and SGLang that clients and routers send with every request -> the neutral value, the only one that is
accepted."""


def parse_options(body: SamplingBody, served: ApiModel, max_tokens: int | None, logprobs: int | None) -> Options:
    """Parse everything but the prompt.

    Args:
        max_tokens: parsed by the caller, because its name depends on the endpoint.
        logprobs: number of top log-probabilities; parsed by the caller, because its form depends on the endpoint.

    Raises:
        InvalidRequest: names the field.
    """
    _refuse_what_is_not_neutral(body)
    model = resolve_model(body.model, served)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= served.max_n:
        raise invalid("n", f"n must be from 1 to {served.max_n} (--max-n), not {show(n)}.")
    min_tokens = count("min_tokens", body.min_tokens, least=0) or 0
    if max_tokens is not None and min_tokens > max(1, max_tokens):
        raise invalid("min_tokens", f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens}).")
    stream_options = _stream_options(body)
    return Options(
        model=model,
        n=n,
        stream=bool(body.stream),
        include_usage=bool(stream_options.include_usage) or (body.usage is not None and bool(body.usage.include)),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        timing=bool(body.timing),
        speculation=bool(body.speculation),
        max_drafts=count("num_speculative_tokens", body.num_speculative_tokens, least=0),
        sampling=_sampling(body, served.defaults, logprobs),
        seeded=body.seed is not None,
        max_tokens=max_tokens,
        clamp_max_tokens=served.clamp_max_tokens,
        min_tokens=min_tokens,
        stop_strings=parse_stop_strings(body.stop),
        stop_token_ids=_stop_ids(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        timeout_s=_timeout(body.timeout),
        cache_salt=_cache_salt(body.cache_salt),
        answer=parse_answer(body),
    )


def resolve_model(name: str | None, served: ApiModel) -> str:
    """The served name of this model, or the default one.

    Raises:
        UnknownModel: the server has no model of that name.
    """
    if name is None:
        return served.names[0]
    found = name_meant(name, served.names if served.hidden_name is None else (*served.names, served.hidden_name))
    if found is None:
        raise UnknownModel(
            f"The model {name[:200]!r} is not served here; this server has {', '.join(served.names)}.",
            param="model",
            code="model_not_found",
        )
    return found if found in served.names else served.names[0]


def _refuse_what_is_not_neutral(body: SamplingBody) -> None:
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in (None, neutral):
            raise unsupported(name, f"only {json.dumps(neutral)}")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of", "only the same number as n")


def _cache_salt(salt: str | None) -> str:
    if salt is not None and len(salt) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"cache_salt has {len(salt)} characters; at most {MAX_SALT_CHARS} are allowed.")
    return salt or ""


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
    if bias is not None and len(bias) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are allowed.")
    parsed: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 12):
            raise invalid("logit_bias", f"logit_bias has the key {key[:40]!r}, which is not a token id.")
        parsed[int(key)] = in_range("logit_bias", value, -100.0, 100.0)
    return parsed


def parse_stop_strings(stop: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """The stop strings.

    Raises:
        InvalidRequest: names the field.
    """
    strings = [stop] if isinstance(stop, str) else (stop or [])
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(field, f"{field} has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed.")
    if not all(strings):
        raise invalid(field, f"{field} has an empty string.")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise invalid(field, f"{field} has {total} characters; at most {MAX_STOP_CHARS} are allowed together.")
    return tuple(dict.fromkeys(strings))


def _stop_ids(ids: Sequence[int] | None) -> frozenset[int]:
    if ids is not None and len(ids) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_IDS} are allowed.")
    return frozenset(ids or ())


def _stream_options(body: SamplingBody) -> StreamOptions:
    options = body.stream_options
    if options is None:
        return StreamOptions()
    if not body.stream:
        raise invalid("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    return options


def _timeout(seconds: float | None) -> float | None:
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise invalid("timeout", f"timeout must be a positive number of seconds, not {show(seconds)}.")
    return seconds
