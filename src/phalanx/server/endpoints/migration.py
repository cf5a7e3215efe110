"""Streams that can move between servers: sends their records, and continues a stream that began on another server.

A gateway with the server's admin key gets a record after each piece of a stream, and sends the recorded tokens to
another server if this one fails (`http/stream_records.py` describes the wire).
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
from msgspec.structs import asdict, replace

from phalanx.errors import AdminKeyRefused, EngineError, InvalidRequest, PhalanxError, Quarantined
from phalanx.http.api_keys import is_same
from phalanx.http.stream_records import (
    LINES,
    MIGRATION,
    RESUME,
    ChoiceEnded,
    RecordedChoice,
    Resume,
    Start,
    StreamRecord,
    framed,
    resume_size,
    split_body,
)
from phalanx.server.answers.choice_decoder import may_stop
from phalanx.server.answers.generation import Generation, Watch
from phalanx.server.dialects.common.answer_format import AnswerFormat
from phalanx.server.dialects.common.dialect import ParsedBody, StaticAnswer
from phalanx.server.fields.json_pieces import finite
from phalanx.server.fields.refusals import check_ids
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.requests.parsed import CompletionRequest
from phalanx.server.requests.sampling_fields import SEEDS
from phalanx.server.sequences.output_queue import Event, OutputQueue, StreamEnd, Timings
from phalanx.types import Finished, ModelInfo, SequenceRequest, TokenLogprobs, Tokens

NUMBERS = 1 << 53  # that every reader of JSON can tell apart
ID = re.compile(r"[A-Za-z0-9_-]{1,100}")  # of an answer
LATEST = 1 << 37  # seconds since 1970: the year 6325; dates end with 9999

Asked = TypeVar("Asked", bound=ParsedBody | StaticAnswer)


class StreamMigration:
    """One request's known tokens, and the records of its stream.

    Call the methods in the order below. Without the two headers they change nothing.

    Args:
        headers: of the request.
        admin_key: None if the server has none and so sends no records.
        determinism_key: of a server with this model; see `determinism_key.py`.

    Raises:
        AdminKeyRefused: MIGRATION has a wrong key, or is missing beside RESUME.
        RequestTooLarge: RESUME exceeds the limit of a `Resume`.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        admin_key: str | None,
        prompts: Prompts,
        determinism_key: Callable[[ModelInfo], str],
    ) -> None:
        self.moves = 0  # times that the stream has moved, if this server continues it inexactly
        self.n_known = 0  # known tokens and log-probabilities
        self._records = RecordBuffer() if _is_of_gateway(headers, admin_key) else None
        self._first_part = headers.get(RESUME)
        self.n_before = 0 if self._first_part is None else max(0, resume_size(self._first_part))
        """Bytes of the `Resume` before the client's body."""
        self._resume: Resume | None = None
        self._prompts = prompts
        self._determinism_key = determinism_key

    def body(self, data: bytes) -> bytes:
        """The client's body.

        Raises:
            InvalidRequest: the bytes before it are not a `Resume`.
        """
        if self._first_part is None:
            return data
        self._resume, rest = split_body(self._first_part, data)
        choices = self._resume.choices
        self.n_known = sum(len(choice.tokens) + sum(len(one.top) for one in choice.logprobs) for choice in choices)
        return rest

    def accept(self, asked: Asked) -> Asked:
        """Check and return the parsed body. An answer that is not streamed has no records.

        Raises:
            InvalidRequest: the begun stream cannot be an answer to it.
        """
        request = asked.request if isinstance(asked, ParsedBody) else None
        if request is None or not request.options.stream:
            self._records = None
            if self._resume is not None:
                raise _invalid("the request's answer is not streamed; send it again as it is.")
        if self._resume is not None and self._resume.start.prompt and isinstance(request, CompletionRequest):
            raise _invalid("start.prompt is a chat's; this request has its own prompt.")
        return asked

    def start(self, id: str, created: int, seed: int) -> Start:
        """The answer's `Start`: a new one, or the one from the server that began it."""
        if self._resume is not None:
            return self._resume.start
        return Start(id=id, created=created, seed=seed, determinism_key="", prompts=0)

    @property
    def n_moves(self) -> int:
        """How often another server has lost the stream before."""
        return 0 if self._resume is None else self._resume.moves

    async def prompt(self, vocab_size: int) -> list[int] | None:
        """The prompt in the `Resume`; empty if the template gives it. None if the answer begins here.

        Raises:
            InvalidRequest: it has invalid ids, or is not the prompt with which the answer began.
        """
        if self._resume is None:
            return None
        start = self._resume.start
        await self._prompts.run(len(start.prompt), partial(_check_prompt, start, vocab_size))
        return start.prompt

    def begin(
        self, requests: list[SequenceRequest], start: Start, info: ModelInfo, *, echo: bool, is_recalled: bool
    ) -> list[SequenceRequest]:
        """The choices' requests, with the known tokens of each.

        Args:
            echo: the answer repeats the prompts.
            is_recalled: only this server's memory of calls gives the prompt, so the first record has it.

        Raises:
            InvalidRequest: the `Resume` does not fit the requests.
        """
        if self._records is None:
            return requests
        determinism_key, prompts = self._determinism_key(info), _crc_of(requests)
        if self._resume is None:
            prompt = requests[0].prompt if is_recalled else []
            self._records.start = replace(start, determinism_key=determinism_key, prompts=prompts, prompt=prompt)
            return requests
        continued = _continued(requests, self._resume, echo=echo, vocab_size=info.vocab_size)
        if not start.exact or (start.determinism_key, start.prompts) != (determinism_key, prompts):
            self.moves = self._resume.moves
            self._records.start = replace(start, exact=False) if start.exact else None
        return continued

    @property
    def watch(self) -> Watch | None:
        """The argument of the stream's `Generation`."""
        return None if self._records is None else self._records.note

    async def replay(self, generation: Generation, form: AnswerFormat, n_choices: int) -> bool:
        """Pass the known tokens through decoders and format, without output; False if there are none."""
        if (resume := self._resume) is None:
            return False

        def work() -> None:
            form.opening(n_choices, None)
            form.events(generation.take(_known(resume)), None)
            form.next_number = resume.next_number

        await self._prompts.run(self.n_known, work)
        assert self._records is not None, "RESUME comes with MIGRATION"
        self._records.choices.clear()  # another server has sent these records
        return True

    def with_records(
        self, pieces: AsyncGenerator[bytes], output: OutputQueue, media_type: str
    ) -> AsyncGenerator[bytes]:
        """The pieces of a stream, each with its record; also a record when the engine goes down or is back."""
        if self._records is None:
            return pieces
        return _with_records(pieces, self._records, output, lines=media_type == LINES)

    def fail(self, error: PhalanxError) -> None:
        """The stream ends with this error."""
        if self._records is not None and isinstance(error, EngineError) and not isinstance(error, Quarantined):
            self._records.failed = str(error)


class RecordBuffer:
    """Tokens of a stream since the last record."""

    def __init__(self) -> None:
        self.start: Start | None = None
        self.failed = ""
        self.was_paused = False  # as of the last record
        self.choices: dict[int, RecordedChoice] = {}
        self._n_tokens: dict[int, int] = {}  # by choice, in all records

    def note(self, index: int, event: Event | None, n_tokens: int) -> None:
        """See `Watch`."""
        choice = self.choices.get(index) or RecordedChoice(index=index)
        match event:
            case Tokens():
                n = n_tokens - self._n_tokens.get(index, 0)
                self._n_tokens[index] = n_tokens
                if n == 0:
                    return
                logprobs = [_finite(one) for one in (event.logprobs or ())[:n]]
                choice = replace(choice, tokens=choice.tokens + event.tokens[:n], logprobs=choice.logprobs + logprobs)
            case StreamEnd():
                ended = msgspec.convert(event.finished, ChoiceEnded, from_attributes=True)
                choice = replace(choice, ended=replace(ended, n_tokens=n_tokens))
            case _:
                choice = replace(choice, echoed=True)
        self.choices[index] = choice

    def take(self, *, is_paused: bool) -> StreamRecord:
        """The next record, of everything since the last one.

        Args:
            is_paused: the engine is down.
        """
        choices = list(self.choices.values())
        record = StreamRecord(start=self.start, choices=choices, failed=self.failed, paused=is_paused)
        self.start, self.choices, self.was_paused = None, {}, is_paused
        return record


async def _with_records(
    pieces: AsyncGenerator[bytes], records: RecordBuffer, output: OutputQueue, *, lines: bool
) -> AsyncGenerator[bytes]:
    async with aclosing(pieces):
        async for piece in pieces:
            if piece or output.is_paused != records.was_paused:
                yield piece + framed(records.take(is_paused=output.is_paused), lines=lines)


def _is_of_gateway(headers: Mapping[str, str], admin_key: str | None) -> bool:
    """Whether the request has the admin key. Raises `AdminKeyRefused`."""
    given = headers.get(MIGRATION)
    if given is None and RESUME not in headers:
        return False
    if admin_key is None:
        raise AdminKeyRefused(f"{MIGRATION}: this server has no --admin-key, so it sends no records of streams.")
    if given is None or not is_same(given, admin_key):
        raise AdminKeyRefused(f"{MIGRATION} must have this server's --admin-key.")
    return True


def _crc_of(requests: Sequence[SequenceRequest]) -> int:
    """The CRC-32 of the prompts' token ids."""
    crc = 0
    for request in requests:
        if request.sampling.choice == 0:
            crc = _crc(request.prompt, crc)
    return crc


def _crc(ids: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(array("q", ids).tobytes(), before)


# -- known tokens ----------------------------------------------------------------------------------------------------


def _known(resume: Resume) -> Iterator[tuple[int, Event | None]]:
    """The known events of each choice, for the decoders."""
    for choice in resume.choices:
        if choice.echoed:
            yield choice.index, None
        yield choice.index, Tokens("", 0, choice.tokens, choice.logprobs or None)
        if choice.ended is not None:
            yield choice.index, StreamEnd(Finished("", **asdict(choice.ended)), Timings(0.0))


def _check_prompt(start: Start, vocab_size: int) -> None:
    """Refuse a prompt other than the one with which the answer began."""
    check_ids(f"{RESUME}: start.prompt", start.prompt, vocab_size)
    if start.prompt and _crc(start.prompt) != start.prompts:
        raise _invalid("start.prompt does not have the checksum start.prompts.")


def _continued(
    requests: Sequence[SequenceRequest], resume: Resume, *, echo: bool, vocab_size: int
) -> list[SequenceRequest]:
    """The requests with their known tokens and the remaining time."""
    if not (math.isfinite(resume.timeout_s) and resume.timeout_s > 0):
        raise _invalid(f"timeout_s is {resume.timeout_s:g}; it must be a positive number of seconds.")
    start = resume.start
    if not (1 <= resume.moves < NUMBERS and 0 <= resume.next_number < NUMBERS and 0 <= start.seed < SEEDS):
        raise _invalid("moves, next_number or the start's seed is out of range.")
    if ID.fullmatch(start.id) is None or not 0 <= start.created < LATEST:
        raise _invalid("the start's id or created cannot be an answer's.")
    choices = {choice.index: choice for choice in resume.choices}
    if len(choices) < len(resume.choices) or not choices.keys() <= set(range(len(requests))):
        indices = [choice.index for choice in resume.choices]
        raise _invalid(f"choices have the indices {indices[:20]}; the request has {len(requests)} choices.")
    continued = []
    for index, request in enumerate(requests):
        choice = choices.get(index) or RecordedChoice(index=index)
        _check(choice, request, vocab_size)
        if choice.echoed > echo or (choice.tokens and echo and not choice.echoed):
            raise _invalid(f"choice {index} {'has' if choice.echoed else 'lacks'} the prompt, against the request.")
        continued.append(
            replace(
                request,
                committed=choice.tokens,
                prompt_logprobs=None if choice.echoed else request.prompt_logprobs,
                timeout_s=min(resume.timeout_s, request.timeout_s or math.inf),
            )
        )
    return continued


def _check(choice: RecordedChoice, request: SequenceRequest, vocab_size: int) -> None:
    """Refuse a choice that contradicts its request or itself."""
    where, n = f"{RESUME}: choices[{choice.index}]", len(choice.tokens)
    if n > request.stop.max_tokens:
        raise _invalid(f"choice {choice.index} has {n} tokens; it may have {request.stop.max_tokens} here.")
    if len(choice.logprobs) != (n if request.sampling.logprobs is not None else 0):
        raise _invalid(f"choice {choice.index} has {n} tokens and {len(choice.logprobs)} log-probabilities.")
    if choice.ended is not None and choice.ended.n_tokens != n:
        raise _invalid(f"choice {choice.index} has {n} tokens, and ended after {choice.ended.n_tokens}.")
    check_ids(f"{where}.tokens", choice.tokens, vocab_size)
    check_ids(f"{where}.logprobs", [token for one in choice.logprobs for token, _ in one.top], vocab_size)
    if not request.stop.stop_ids.isdisjoint(choice.tokens[may_stop(request) : -1]):
        raise _invalid(f"choice {choice.index} has tokens after the one that ended it.")


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"{RESUME}: {message}")


def _finite(one: TokenLogprobs) -> TokenLogprobs:
    """With numbers that JSON can write."""
    return replace(one, logprob=finite(one.logprob), top=[(token, finite(logprob)) for token, logprob in one.top])
