"""The parts of an endpoint that generates, so that `endpoints/generating.py` serves every dialect alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from phalanx.server.answers.deltas import ResponseHead
from phalanx.server.dialects.common.answer_format import AnswerFormat
from phalanx.server.fields.json_fields import Readers
from phalanx.server.fields.openai_bodies import Body
from phalanx.server.requests.parsed import ApiModel, ChatRequest, CompletionRequest

B = TypeVar("B", bound=Body)


class ParsedBody(Struct, frozen=True):
    """A parsed body that the model answers."""

    request: ChatRequest | CompletionRequest
    format: Callable[[ResponseHead], AnswerFormat]  # of its answer


class StaticAnswer(Struct, frozen=True):
    """The answer to a body that needs no tokens; the model must be ready all the same."""

    answer: Callable[[int], dict[str, Any]]  # at this time, in seconds since 1970


class Dialect(Struct, Generic[B], frozen=True, kw_only=True):
    """An endpoint that generates."""

    body: type[B]
    readers: Readers | None = None  # of the body's large fields; None: those of OpenAI's bodies
    parse: Callable[[B, ApiModel], ParsedBody | StaticAnswer]  # raises InvalidRequest, which names the field
    field: str  # that holds the prompt, for errors
    id_prefix: str  # of answers' ids
    longest_silence_s: float = math.inf  # that its clients accept in a stream; --keepalive-seconds may be less
