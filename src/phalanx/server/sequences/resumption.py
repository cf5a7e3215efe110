"""Streams that may move from one server to another: what is told of them, and how one goes on that began elsewhere.

A gateway with the server's admin key gets a record after each piece of a stream, and sends what the records said to
another server once this one fails (`http/stream_records.py`: the wire).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import zlib
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from phalanx.errors import AdminKeyRefused, EngineError, InvalidRequest, PhalanxError, Quarantined
from phalanx.http.stream_records import (
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
from phalanx.server.fields.json_pieces import finite
from phalanx.server.fields.refusals import check_ids
from phalanx.server.requests.sampling_fields import SEEDS
from phalanx.types import Finished, ModelInfo, SequenceRequest, TokenLogprobs, Tokens

NUMBERS = 1 << 53  # that every reader of JSON can tell apart
ID = re.compile(r"[A-Za-z0-9_-]{1,100}")  # of an answer
LATEST = 1 << 37  # seconds since 1970: the year 6325; dates end with 9999


def migration_of(headers: Mapping[str, str], admin_key: str | None) -> Resumption | None:
    """What the two headers ask for; None without them.

    Args:
        admin_key: None: this server sends no records.

    Raises:
        AdminKeyRefused: MIGRATION has another key, or RESUME comes without it.
        RequestTooLarge: RESUME is more than a `Resume` may have.
    """
    given = headers.get(MIGRATION)
    if given is None and RESUME not in headers:
        return None
    if admin_key is None:
        raise AdminKeyRefused(f"{MIGRATION}: this server has no --admin-key, so it sends no records of streams.")
    # Headers are decoded as latin-1: these are the bytes that were sent. Equal lengths keep the time constant.
    if given is None or not hmac.compare_digest(_digest(given.encode("latin-1")), _digest(admin_key.encode())):
        raise AdminKeyRefused(f"{MIGRATION} must have this server's --admin-key.")
    return Resumption(headers.get(RESUME))


class Resumption:
    """One request whose stream may move.

    Args:
        first_part: the value of the header RESUME, if there is one.
    """

    def __init__(self, first_part: str | None) -> None:
        self.resume: Resume | None = None  # what the stream goes on from, once its body is read
        self.moves = 0  # how often it has moved, if it goes on inexactly
        self.ledger = Ledger()
        self._first_part = first_part
        self.n_before = 0 if first_part is None else max(0, resume_size(first_part))
        """Bytes of the body before the client's own."""

    @property
    def n_known(self) -> int:
        """Tokens that the stream goes on from."""
        return 0 if self.resume is None else sum(len(choice.tokens) for choice in self.resume.choices)

    def body(self, data: bytes) -> bytes:
        """The client's body.

        Raises:
            InvalidRequest: the part before it is no `Resume`.
        """
        if self._first_part is None:
            return data
        self.resume, rest = split_body(self._first_part, data)
        return rest

    def prompt(self, vocab_size: int) -> list[int]:
        """The prompt of a chat that goes on, if another server's memory made it; else empty.

        Raises:
            InvalidRequest: it is none, or not the one that the answer began with.
        """
        if self.resume is None:
            return []
        start = self.resume.start
        check_ids(f"{RESUME}: start.prompt", start.prompt, vocab_size)
        if start.prompt and _crc(start.prompt) != start.prompts:
            raise _invalid("the start's prompt is not the one whose checksum it has.")
        return start.prompt

    def begin(
        self,
        requests: Sequence[SequenceRequest],
        *,
        id: str,
        created: int,
        echo: bool,
        is_recalled: bool,
        numerics: str,
        info: ModelInfo,
    ) -> list[SequenceRequest]:
        """The choices' requests, with what is known of each.

        Args:
            id: of the answer.
            created: when it began, in seconds since 1970.
            echo: it repeats the prompts.
            is_recalled: another server cannot make the prompt, so that it is told.
            numerics: of this server.

        Raises:
            InvalidRequest: what is said to be known cannot be.
        """
        prompts = crc_of(requests)
        seed = requests[0].sampling.seed
        if self.resume is None:
            told = requests[0].prompt if is_recalled else []
            self.ledger.start = Start(
                id=id, created=created, seed=seed, numerics=numerics, prompts=prompts, prompt=told
            )
            return list(requests)
        continued = _continued(requests, self.resume, echo=echo, vocab_size=info.vocab_size)
        start = self.resume.start
        if not start.exact or (start.numerics, start.prompts) != (numerics, prompts):
            self.moves = self.resume.moves
            self.ledger.start = replace(start, exact=False) if start.exact else None
        return continued


class Ledger:
    """What a stream's pieces are made of, until it is told."""

    def __init__(self) -> None:
        self.start: Start | None = None
        self.failed = ""
        self._is_paused = False
        self._was_paused = False  # as of the last record
        self._choices: dict[int, RecordedChoice] = {}

    def tokens(self, index: int, event: Tokens, n: int) -> None:
        """A choice's text pipeline has taken in the first `n` of these tokens."""
        if n == 0:
            return
        logprobs = [_finite(one) for one in (event.logprobs or ())[:n]]
        before = self._choice(index)
        self._choices[index] = replace(
            before, tokens=before.tokens + event.tokens[:n], logprobs=before.logprobs + logprobs
        )

    def echoed(self, index: int) -> None:
        """The choice's prompt is in the stream."""
        self._choices[index] = replace(self._choice(index), echoed=True)

    def ended(self, index: int, finished: Finished, n_tokens: int) -> None:
        """The choice's ending is in the stream.

        Args:
            n_tokens: of the answer.
        """
        reason = finished.reason
        assert reason == "stop" or reason == "length" or reason == "timeout", "others are errors"
        ended = ChoiceEnded(
            reason=reason,
            n_tokens=n_tokens,
            detail=finished.detail,
            cached_tokens=finished.cached_tokens,
            drafted_tokens=finished.drafted_tokens,
            accepted_tokens=finished.accepted_tokens,
        )
        self._choices[index] = replace(self._choice(index), ended=ended)

    def fail(self, error: PhalanxError) -> None:
        """The stream ends with this error."""
        if isinstance(error, EngineError) and not isinstance(error, Quarantined):
            self.failed = str(error)

    def pause(self, is_paused: bool) -> bool:
        """Nothing computes the stream at the moment, or something does. Returns whether this has to be told."""
        self._is_paused = is_paused
        return self.has_notice

    @property
    def has_notice(self) -> bool:
        """The next record is told at once, also if there is no piece for it."""
        return self._is_paused != self._was_paused

    def take(self) -> StreamRecord:
        """Everything that was not told yet."""
        record = StreamRecord(
            start=self.start, choices=list(self._choices.values()), failed=self.failed, paused=self._is_paused
        )
        self._was_paused = self._is_paused
        self.start = None
        self._choices = {}
        return record

    def _choice(self, index: int) -> RecordedChoice:
        return self._choices.get(index) or RecordedChoice(index=index)


async def recorded(pieces: AsyncGenerator[bytes], ledger: Ledger, *, lines: bool) -> AsyncGenerator[bytes]:
    """The pieces of a stream, each with its record.

    Args:
        lines: see `framed`.
    """
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece + framed(ledger.take(), lines=lines)


def crc_of(requests: Sequence[SequenceRequest]) -> int:
    """The CRC-32 of the prompts' token ids."""
    crc = 0
    for request in requests:
        if request.sampling.choice == 0:
            crc = _crc(request.prompt, crc)
    return crc


def _crc(ids: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(array("q", ids).tobytes(), before)


def over(request: SequenceRequest, stopped_at: int | None) -> Finished | None:
    """How a choice has ended of which every token is known; None if it goes on.

    Args:
        stopped_at: number of tokens that completed a stop string, or the only call.
    """
    known, stop = request.committed, request.stop
    if stopped_at is not None:
        return Finished(request.id, "stop", stopped_at)
    if len(known) > _may_stop(request) and known[-1] in stop.stop_ids:
        return Finished(request.id, "stop", len(known), stop_id=known[-1])
    return Finished(request.id, "length", len(known)) if len(known) >= stop.max_tokens else None


# -- what is known ---------------------------------------------------------------------------------------------------


def _continued(
    requests: Sequence[SequenceRequest], resume: Resume, *, echo: bool, vocab_size: int
) -> list[SequenceRequest]:
    """The requests with the tokens that are known, and the time that is left."""
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
    """Refuse what no server can have said of this choice."""
    where, n = f"{RESUME}: choices[{choice.index}]", len(choice.tokens)
    if n > request.stop.max_tokens:
        raise _invalid(f"choice {choice.index} has {n} tokens; it may have {request.stop.max_tokens} here.")
    if len(choice.logprobs) != (n if request.sampling.logprobs is not None else 0):
        raise _invalid(f"choice {choice.index} has {n} tokens and {len(choice.logprobs)} log-probabilities.")
    if choice.ended is not None and choice.ended.n_tokens != n:
        raise _invalid(f"choice {choice.index} has {n} tokens, and ended after {choice.ended.n_tokens}.")
    check_ids(f"{where}.tokens", choice.tokens, vocab_size)
    check_ids(f"{where}.logprobs", [token for one in choice.logprobs for token, _ in one.top], vocab_size)
    if not request.stop.stop_ids.isdisjoint(choice.tokens[_may_stop(request) : -1]):
        raise _invalid(f"choice {choice.index} has tokens after the one that ended it.")


def _may_stop(request: SequenceRequest) -> int:
    """Number of tokens after which a stop id ends the sequence."""
    return 0 if request.grammar else request.stop.min_tokens


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(f"{RESUME}: {message}")


def _finite(one: TokenLogprobs) -> TokenLogprobs:
    """As JSON can write it."""
    return replace(one, logprob=finite(one.logprob), top=[(token, finite(logprob)) for token, logprob in one.top])


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
