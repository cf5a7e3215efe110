"""Settings of a load, under the names of `vllm bench serve`, and the requests that they stand for.

There is no tokenizer here: prompts are random token ids, so that they have exactly the length that was asked for. The
chat API takes text only: there a prompt has that many words. Equal settings and seed make equal requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from phalanx.config import Flag
from phalanx.errors import ConfigError

TOKENS = range(300, 2000)
"""Ids for prompts: above control tokens and single bytes, and in nearly every model's vocabulary."""

WORDS = "river stone light seven garden letter winter bread engine silver morning paper window road music cloud".split()

Count = Annotated[int, Meta(ge=1)]


class LoadConfig(Struct, frozen=True, kw_only=True):
    """A load on a server. The docstrings are the help of the flags of `phalanx bench`."""

    backend: Literal["openai", "openai-chat"] = "openai"
    """The API: text completions with token ids as prompts, or chat completions with words, for servers that take no
    token ids."""
    dataset_name: Literal["random", "prefix_repetition"] = "random"
    """Prompts of random tokens, whose answers run to their full length, or prompts that share prefixes."""
    num_prompts: Count = 100
    """Number of requests."""
    random_input_len: Count = 1024
    """random: tokens of a prompt."""
    random_output_len: Count = 128
    """random: tokens of an answer."""
    prefix_repetition_prefix_len: Count = 256
    """prefix_repetition: tokens of a shared prefix."""
    prefix_repetition_suffix_len: Count = 256
    """prefix_repetition: tokens of a prompt behind its prefix."""
    prefix_repetition_num_prefixes: Count = 10
    """prefix_repetition: number of different prefixes."""
    prefix_repetition_output_len: Count = 128
    """prefix_repetition: tokens of an answer, at most."""
    request_rate: float = math.inf
    """Requests per second, on average; inf sends all at once, or as many as --max-concurrency."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests: 1 is a Poisson process, below 1 is bursty,
    inf is evenly spaced."""
    max_concurrency: Annotated[Count | None, Flag(default="no limit")] = None
    """Requests under way, at most; others wait."""
    num_warmups: Annotated[int, Meta(ge=0)] = 1
    """Requests before those that count, one after the other. If one fails, nothing is measured."""
    ignore_eos: bool = False
    """prefix_repetition: answers run to their full length, too."""
    seed: int = 0
    """Of prompts and times. Another seed makes prompts that are in no prefix cache."""

    @property
    def path(self) -> str:
        """Of the API, behind /v1."""
        return "/completions" if self.backend == "openai" else "/chat/completions"


def check_load(config: LoadConfig) -> None:
    """Refuse settings that make no load, or that belong to another one.

    Raises:
        ConfigError: names the flag.
    """
    other = "prefix_repetition" if config.dataset_name == "random" else "random"
    for name, default in zip(LoadConfig.__struct_fields__, LoadConfig.__struct_defaults__, strict=True):
        if name.startswith(f"{other}_") and getattr(config, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')} needs --dataset-name {other}.", remedy="Leave it out.")
    for flag, value in (("--request-rate", config.request_rate), ("--burstiness", config.burstiness)):
        if not value > 0:  # nan is neither
            raise ConfigError(f"{flag} is {value:g}.", remedy="Give a number above 0, or inf.")
    if config.burstiness != 1.0 and config.request_rate == math.inf:
        raise ConfigError("--burstiness needs a --request-rate.", remedy="With inf, all requests are sent at once.")
    if config.dataset_name == "prefix_repetition" and config.prefix_repetition_num_prefixes > config.num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes {config.prefix_repetition_num_prefixes} is more than --num-prompts "
            f"{config.num_prompts}.",
            remedy="Give at least one request for each prefix.",
        )


def requests(config: LoadConfig, model: str) -> list[dict[str, Any]]:
    """The bodies, in the order in which they are sent."""
    draw = random.Random(config.seed)
    shared = {"model": model, "temperature": 0.0, "max_tokens": _output_len(config)}
    if config.ignore_eos or config.dataset_name == "random":
        shared["ignore_eos"] = True
    return [{**shared, **_prompt(config, parts)} for parts in _prompts(config, draw)]


def _prompts(config: LoadConfig, draw: random.Random) -> Iterator[list[int]]:
    """Random numbers, one for each token of each prompt."""
    if config.dataset_name == "random":
        for _ in range(config.num_prompts):
            yield draw.choices(TOKENS, k=config.random_input_len)
        return
    prefixes = [
        draw.choices(TOKENS, k=config.prefix_repetition_prefix_len)
        for _ in range(config.prefix_repetition_num_prefixes)
    ]
    order = [number % len(prefixes) for number in range(config.num_prompts)]
    draw.shuffle(order)
    for number in order:
        yield prefixes[number] + draw.choices(TOKENS, k=config.prefix_repetition_suffix_len)


def _prompt(config: LoadConfig, tokens: list[int]) -> dict[str, Any]:
    if config.backend == "openai":
        return {"prompt": tokens}
    text = " ".join(WORDS[token % len(WORDS)] for token in tokens)
    return {"messages": [{"role": "user", "content": text}]}


def _output_len(config: LoadConfig) -> int:
    return config.random_output_len if config.dataset_name == "random" else config.prefix_repetition_output_len
