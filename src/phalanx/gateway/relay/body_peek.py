"""Fields of a request's body that the gateway reads, and the one that it may change.

Everything else passes unchanged and unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

import msgspec
from msgspec import Raw, Struct

from phalanx.errors import InvalidRequest
from phalanx.http.foreign_json import decoder

MANY_NAMES = 1 << 16
"""Colons outside the prompt, an upper bound of the other fields, in a body that is rewritten: 20 ms."""

MAX_ROWS = 128
"""Of one request; the largest `n` of OpenAI's own."""
MAX_LISTED = 1 << 14
"""Prompts of a list that is parsed, in 5 ms; a longer one has more than `MAX_ROWS`, or no server accepts it."""
LISTED_BYTES = 1 << 16
"""Of Ollama's options, at most, that are parsed."""
PROMPTS = re.compile(rb'\[\s*["\[]')
"""Begins a list of prompts: texts, or lists of tokens. A single prompt may be a list of tokens as well."""
BYTES_PER_TOKEN = 4  # of a prompt, where the answer counts no tokens
RESERVED = 256
"""Most tokens of a choice that are reserved in its key's limits before it begins; most answers are shorter."""
MAX_TOKENS = 1 << 31
"""Counts from here on are taken for a replica's error and ignored."""
COUNTS = (
    (("total_tokens",), ()),
    (("prompt_tokens", "completion_tokens"), ()),
    (("input_tokens", "output_tokens"), ("cache_read_input_tokens", "cache_creation_input_tokens")),
    (("prompt_eval_count", "eval_count"), ()),
)
"""One row per API: names that an answer's `usage` must have, and names that count in addition."""


class Peek(Struct, frozen=True):
    """The fields of a body that decide where a request goes, of whatever dialect."""

    model: str | None = None
    prompt_cache_key: str | None = None
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    n: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    max_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    options: Raw = Raw()  # Ollama's

    @property
    def rows(self) -> int:
        """Answers that it asks for: `n` for each prompt; `MAX_ROWS` for a list too long to parse."""
        n_prompts, n = _prompts_in(bytes(self.prompt)), bytes(self.n)
        return min(MAX_ROWS, n_prompts * int(n) or 1) if n.isdigit() and len(n) <= 3 else n_prompts

    @property
    def answer_tokens(self) -> int:
        """Tokens to reserve for its answers."""
        options = bytes(self.options)
        num_predict = _options_in(options).num_predict if len(options) <= LISTED_BYTES else Raw()
        fields = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens, num_predict)
        limits = (bytes(raw) for raw in fields)
        given = (int(limit) for limit in limits if limit.isdigit() and len(limit) < 10)
        return self.rows * min(next(given, RESERVED), RESERVED)

    @property
    def prompt_parts(self) -> tuple[bytes, ...]:
        """The prompt, in the order in which templates put its parts."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.input, self.prompt)
        return tuple(bytes(part) for part in parts)


class AnswerCounts(Struct):
    """Fields of an answer, or of an event of a stream, that count tokens."""

    usage: Raw = Raw()
    prompt_eval_count: Raw = Raw()  # Ollama's
    eval_count: Raw = Raw()

    def as_json(self) -> bytes:
        """The counts as a JSON object; empty if there is none, or null."""
        given = bytes(self.usage)
        if given not in (b"", b"null"):
            return given
        if not bytes(self.eval_count):
            return b""
        prompt = bytes(self.prompt_eval_count) or b"0"  # Ollama leaves it out where the whole prompt was cached
        return b'{"prompt_eval_count":%b,"eval_count":%b}' % (prompt, bytes(self.eval_count))


class _Options(Struct):
    num_predict: Raw = Raw()


_peek = decoder(Peek)
_read_fields = decoder(dict[str, Raw])
_read_list = decoder(list[Raw])
_read_counts = decoder(dict[str, object])
_read_answer = decoder(AnswerCounts)
_read_options = decoder(_Options)


def peek(body: bytes) -> Peek:
    """Look into a JSON body.

    Raises:
        InvalidRequest: it is not a JSON object, or a field that must be a string is not; names the field.
    """
    try:
        return _peek(body)
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$.")
        if not place:
            raise InvalidRequest("The JSON body must be an object.") from error
        field = place.rstrip("`")
        raise InvalidRequest(f"Invalid type for '{field}': {wrong}.", param=field, code="invalid_type") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.") from error


def with_model(body: bytes, seen: Peek, model: str) -> bytes:
    """The body with another `model`; every other field keeps its bytes.

    Raises:
        InvalidRequest: it has more than `MANY_NAMES` names.
    """
    n_names = body.count(b":") - sum(part.count(b":") for part in seen.prompt_parts)
    if n_names > MANY_NAMES:
        raise InvalidRequest(f"The body has {n_names} names outside of its prompt; {MANY_NAMES} are allowed.")
    fields = _read_fields(body)
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _prompts_in(prompt: bytes) -> int:
    if not PROMPTS.match(prompt):
        return 1
    if max(prompt.count(b'"') // 2, prompt.count(b"[")) > MAX_LISTED:
        return MAX_ROWS
    return len(_read_list(prompt))


def _options_in(data: bytes) -> _Options:
    try:
        return _read_options(data)
    except msgspec.DecodeError:  # missing, or not an object
        return _Options()


def prompt_tokens(n_bytes: int) -> int:
    """Estimated tokens of a request of so many bytes."""
    return n_bytes // BYTES_PER_TOKEN


def tokens_of(usage: bytes) -> int | None:
    """All tokens that the object counts; None without counts, or if they are out of range.

    Args:
        usage: of `AnswerCounts.as_json`.
    """
    try:
        counts = _read_counts(usage)
    except msgspec.DecodeError:
        return None
    return _total(counts)


def _total(counts: Mapping[str, object]) -> int | None:
    for wanted, more in COUNTS:
        values = [counts.get(name) for name in wanted]
        found = [value for value in values if _is_count(value)]
        if len(found) == len(wanted):
            return sum(found) + sum(value for value in map(counts.get, more) if _is_count(value))
    return None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < MAX_TOKENS


def usage_in(body: bytes) -> bytes:
    """The counts of a whole answer, as JSON; empty if it has none."""
    try:
        return _read_answer(body).as_json()
    except msgspec.DecodeError:
        return b""
