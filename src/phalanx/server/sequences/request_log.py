"""The lives of the last requests: what each waited for, computed, reused and lost.

Listens to the engine beside the journal, which alone decides; `GET /v1/requests/{id}` and the page read it. Does not
know HTTP or text. `request_story.py` puts a life into words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

from phalanx.errors import PhalanxError
from phalanx.types import Batch, Finished, ModelInfo, SequenceProgress, SequenceRequest, Tokens

MAX_LIVES = 1000  # that are remembered; each takes some 2 KB

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
        """Where it stands.

        Args:
            progress: as of the engine's last figures; None: it has no row there.
        """
        if self.finished is not None:
            return "finished"
        if self.first_token is not None:
            return "decode"
        return "queued" if progress is None else "prefill"


class Pause(Struct, kw_only=True):
    """A time in which the engine was away."""

    began: float
    reason: str
    ended: float | None = None  # with the first new token


class RequestLife(Struct, kw_only=True):
    """One request. Times are seconds on the server's monotonic clock, but for `created`."""

    id: str  # of the answer
    request_id: str  # x-request-id
    owner: str
    model: str
    endpoint: str
    created: int  # seconds since 1970
    arrived: float
    stream: bool
    number: int = 0  # in order of their beginnings
    moves: int = 0  # from other servers, before it came here
    roles: tuple[str, ...] = ()  # of its messages
    contents: tuple[str, ...] = ()  # of them; empty once it is over
    choices: list[ChoiceLife] = []
    pauses: list[Pause] = []
    left_in: int | None = None  # the message in which the prompt left the nearest prefix; None: not known, or in none
    outcome: Literal["", "finished", "failed", "client left"] = ""  # "": it is not over
    error: str = ""
    ended: float | None = None

    @property
    def is_paused(self) -> bool:
        """The engine is away, or has sent nothing since it is back."""
        return bool(self.pauses) and self.pauses[-1].ended is None and not self.outcome


Differs = Callable[[RequestLife, list[int]], None]
"""(life, the tokens that its prompt has in common with the nearest prefix): the first choice has ended."""


class RequestLog:
    """Used only on the event loop's thread.

    Args:
        clock: monotonic seconds.
        when_differs: is told of each request whose prompt left the nearest prefix before its end.
    """

    def __init__(self, clock: Callable[[], float], when_differs: Differs | None = None) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, RequestLife] = OrderedDict()  # by id, oldest first
        self._running: dict[str, tuple[RequestLife, ChoiceLife]] = {}  # by sequence id
        self.when_differs = when_differs
        self._n = 0

    def begin(self, life: RequestLife, requests: Sequence[SequenceRequest]) -> None:
        """A request is about to be submitted."""
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
        """The request is answered until the context is left; how it ended is noted then."""
        try:
            yield
        except PhalanxError as error:
            self.fail(id, str(error))
            raise
        finally:
            self._end(id, is_complete=is_complete())

    def fail(self, id: str, error: str) -> None:
        """The request ends with this error."""
        if (life := self._lives.get(id)) is not None:
            life.error = error

    def find(self, id: str, owner: str | None) -> RequestLife | None:
        """The newest request with this id, which is that of its answer or its x-request-id.

        Args:
            owner: whose it must be; None: whoever's.
        """
        named = (life for life in reversed(self._lives.values()) if id in (life.id, life.request_id))
        return next((life for life in named if owner is None or life.owner == owner), None)

    def latest(self, n: int, owner: str | None) -> list[RequestLife]:
        """The requests that are not over, and the last others, n in all at least; newest first. `owner`: see `find`."""
        own = [life for life in reversed(self._lives.values()) if owner is None or life.owner == owner]
        return [life for i, life in enumerate(own) if i < n or not life.outcome]

    # The engine's listener -------------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Take in a step's events."""
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
        """Unfinished requests go on with their next token."""

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Unfinished requests pause."""
        now = self._clock()
        for life in {id(life): life for life, _ in self._running.values()}.values():
            if not life.is_paused:
                life.pauses.append(Pause(began=now, reason=reason))

    def _on_tokens(self, life: RequestLife, choice: ChoiceLife, event: Tokens, now: float) -> None:
        choice.finished = None  # it was ended to try another alone, and goes on
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
    """The message in which a prompt leaves another one; None: behind all of them.

    Args:
        text: that both prompts begin with.
        contents: of the prompt's messages, which templates may strip.
    """
    at = 0
    for index, content in enumerate(contents):
        found = text.find(content.strip(), at)
        if found < 0:
            return index
        at = found + len(content.strip())
    return None
