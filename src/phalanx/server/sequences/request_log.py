"""A log of the last requests: their waits, computation, reuse of prefixes, and interruptions.

Listens to the engine's events like the journal, but decides nothing; `GET /v1/requests/{id}` and the web page read it.
`request_story.py` puts a life into words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.types import Batch, Finished, ModelInfo, SequenceProgress, SequenceRequest, Tokens

MAX_LIVES = 1000  # each takes some 2 KB

ChoiceState = Literal["queued", "prefill", "decode", "finished"]


class ChoiceLife(Struct, kw_only=True):
    """One sequence of a request."""

    id: str
    prompt: list[int]  # empty once the sequence has ended
    prompt_tokens: int
    output_tokens: int
    first_token: float | None = None
    last_token: float | None = None
    finished: Finished | None = None

    def state(self, progress: SequenceProgress | None) -> ChoiceState:
        """The state of the sequence.

        Args:
            progress: from the engine's last figures; None: it had no row.
        """
        if self.finished is not None:
            return "finished"
        if self.first_token is not None:
            return "decode"
        return "queued" if progress is None else "prefill"


class Pause(Struct, kw_only=True):
    """A time without the engine."""

    began: float
    reason: str
    ended: float | None = None  # with the first new token


class RequestLife(Struct, kw_only=True):
    """One request. Times except `created` are seconds on the server's monotonic clock."""

    id: str  # of the answer
    request_id: str  # x-request-id
    owner: str
    model: str
    endpoint: str
    created: int  # seconds since 1970
    arrived: float
    stream: bool
    number: int = 0  # in order of arrival
    moves: int = 0  # between servers, before it arrived here
    roles: tuple[str, ...] = ()  # of its messages, in order
    contents: tuple[str, ...] = ()  # of its messages; empty once it has ended
    choices: list[ChoiceLife] = []
    pauses: list[Pause] = []
    left_in: int | None = None  # message in which the prompt departs from the nearest prefix; None: unknown, or none
    outcome: Literal["", "finished", "failed", "client left"] = ""  # "": it has not ended
    error: str = ""
    ended: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the engine is down, or has sent no token since it came back."""
        return bool(self.pauses) and self.pauses[-1].ended is None and not self.outcome


Differs = Callable[[RequestLife, list[int]], None]
"""(life, tokens that its prompt shares with the nearest prefix); called when the first choice ends."""


class RequestLog:
    """Used only on the event loop's thread.

    Args:
        clock: monotonic seconds.
        when_differs: called for each request whose prompt departs from the nearest prefix.
    """

    def __init__(self, clock: Callable[[], float], when_differs: Differs | None = None) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, RequestLife] = OrderedDict()  # by id, oldest first
        self._running: dict[str, tuple[RequestLife, ChoiceLife]] = {}  # by sequence id
        self.when_differs = when_differs
        self._n = 0

    def begin(self, life: RequestLife, requests: Sequence[SequenceRequest]) -> None:
        """Log a request that is about to be submitted."""
        for request in requests:
            n_known = len(request.committed)
            choice = ChoiceLife(
                id=request.id, prompt=request.prompt, prompt_tokens=len(request.prompt), output_tokens=n_known
            )
            life.choices.append(choice)
            self._running[request.id] = life, choice
        self._n += 1
        life.number = self._n
        self._lives[life.id] = life
        while len(self._lives) > MAX_LIVES:
            self._stop(self._lives.popitem(last=False)[1])

    @contextmanager
    def watching(self, id: str, is_complete: Callable[[], bool]) -> Iterator[None]:
        """Wrap the answer to a request; logs the outcome at the end."""
        try:
            yield
        except PhalanxError as error:
            self.fail(id, str(error))
            raise
        finally:
            self._end(id, is_complete=is_complete())

    def fail(self, id: str, error: str) -> None:
        """Log the error that a request ends with."""
        if (life := self._lives.get(id)) is not None:
            life.error = error

    def find(self, id: str, owner: str | None) -> RequestLife | None:
        """The newest request with this answer id or x-request-id.

        Args:
            owner: its required owner; None: any.
        """
        named = (life for life in reversed(self._lives.values()) if id in (life.id, life.request_id))
        return next((life for life in named if owner is None or life.owner == owner), None)

    def latest(self, n: int, owner: str | None) -> list[RequestLife]:
        """The last `n` requests and all older ones that have not ended, newest first. `owner`: see `find`."""
        own = [life for life in reversed(self._lives.values()) if owner is None or life.owner == owner]
        return [life for i, life in enumerate(own) if i < n or not life.outcome]

    # The engine's listener -------------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Log a step's events."""
        now = self._clock()
        for event in batch.events:
            if (found := self._running.get(event.id)) is None:
                continue
            life, choice = found
            if isinstance(event, Tokens):
                self._on_tokens(life, choice, event, now)
            elif isinstance(event, Finished):
                choice.finished = event
                self._note_difference(life, choice, event)

    def on_ready(self, info: ModelInfo) -> None:
        """Nothing to do: a pause ends with the request's next token."""

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Begin a pause of all unfinished requests."""
        now = self._clock()
        for life in {id(life): life for life, _ in self._running.values()}.values():
            if not life.is_paused:
                life.pauses.append(Pause(began=now, reason=reason))

    def _on_tokens(self, life: RequestLife, choice: ChoiceLife, event: Tokens, now: float) -> None:
        choice.finished = None  # it had been ended so that another could run alone
        choice.output_tokens = event.start + len(event.tokens)
        choice.first_token = now if choice.first_token is None else choice.first_token
        choice.last_token = now
        if life.is_paused:
            life.pauses[-1].ended = now

    def _note_difference(self, life: RequestLife, choice: ChoiceLife, event: Finished) -> None:
        work = event.work
        differs = 0 < work.left_at < min(choice.prompt_tokens - 1, work.nearest_tokens)
        if differs and choice is life.choices[0] and self.when_differs is not None:
            self.when_differs(life, choice.prompt[: work.left_at])

    def _end(self, id: str, *, is_complete: bool) -> None:
        life = self._lives.get(id)
        if life is None:
            return
        life.ended = self._clock()
        life.outcome = "failed" if life.error else "finished" if is_complete else "client left"
        self._stop(life)

    def _stop(self, life: RequestLife) -> None:
        life.contents = ()
        for choice in life.choices:
            choice.prompt = []
            self._running.pop(choice.id, None)


def message_at(text: str, contents: Sequence[str]) -> int | None:
    """The message in which a prompt departs from another one; None: after all of them.

    Args:
        text: the common beginning of both prompts.
        contents: of the prompt's messages; templates may strip them.
    """
    at = 0
    for index, content in enumerate(contents):
        found = text.find(content.strip(), at)
        if found < 0:
            return index
        at = found + len(content.strip())
    return None
