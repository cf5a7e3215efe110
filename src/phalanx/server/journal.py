"""Every unfinished sequence: what was asked, what is committed, who reads it. Survives the engine process.

The journal is why streams pause and do not break when a rank dies (design: Fail-stop, then resume): it listens to the
engine, keeps the committed tokens, and submits every unfinished sequence again when the engine is back. It is also the
one place that decides whether there is room for one more request (429). Does not know HTTP, text or processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from phalanx.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    PhalanxError,
    Quarantined,
    QueueFull,
    SlowClient,
)
from phalanx.server.metrics import Metrics
from phalanx.server.output_queue import Ended, OutputQueue, Timings
from phalanx.supervision.client import EngineClient
from phalanx.types import (
    Batch,
    Cancel,
    Finish,
    Finished,
    ModelInfo,
    PromptScored,
    SequenceRequest,
    Submit,
    Tokens,
)

log = logging.getLogger(__name__)

UNREAD_TOKENS = 2048  # per request; about 8 KiB of text, or a minute of a fast model
CRASHES = 2  # a sequence that was being computed in so many crashes is not tried again
RETRY_AFTER_S = (1.0, 30.0)  # least and most seconds a client is told to wait


class _Entry:
    """One unfinished sequence."""

    def __init__(self, request: SequenceRequest, index: int, slots: RequestSlots, now: float) -> None:
        self.request = request
        self.index = index
        self.slots = slots
        self.submitted = now
        self.timings = Timings(slots.arrived)
        self.committed: list[int] = list(request.committed)
        self.scored = request.prompt_logprobs is None
        self.finish_at: int | None = None  # a stop string ended it there; the engine was told
        self.progressed = False  # since it was last submitted
        self.crashes = 0

    def again(self, now: float) -> SequenceRequest:
        """The request that continues this sequence on an engine that knows nothing."""
        timeout = self.request.timeout_s
        return replace(
            self.request,
            committed=list(self.committed),
            prompt_logprobs=None if self.scored else self.request.prompt_logprobs,
            timeout_s=None if timeout is None else max(0.001, timeout - (now - self.submitted)),
        )


class RequestSlots:
    """Room for one request's choices, taken before it is tokenised and given back when it ends, however it ends."""

    def __init__(self, journal: Journal, n: int, arrived: float) -> None:
        self.arrived = arrived
        self.output = OutputQueue(limit=UNREAD_TOKENS)
        self._journal = journal
        self.free = n  # slots without a sequence
        self.ids: set[str] = set()

    def __enter__(self) -> RequestSlots:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.release(self)

    def submit(self, requests: Sequence[SequenceRequest]) -> None:
        """Hand the choices to the engine; `requests[i]` becomes choice i of the output.

        Raises:
            EngineUnavailable: the engine went down meanwhile.
        """
        self._journal.submit(self, requests)

    def finish(self, index: int, n_tokens: int) -> None:
        """A stop string ended choice `index` after `n_tokens` output tokens."""
        self._journal.finish(self, index, n_tokens)


class Journal:
    """Listens to the engine; see the module's docstring. Used on the event loop's thread only."""

    def __init__(
        self, engine: EngineClient, metrics: Metrics, *, max_num_seqs: int, queue: int, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._capacity = max_num_seqs + queue
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # in order of arrival
        self._reserved = 0  # slots taken whose request is still being tokenised
        self._closing = ""  # why no new request is taken
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._last_end: float | None = None
        self._end_interval = 1.0  # seconds between ends, smoothed
        engine.subscribe(self)

    # The requests' side ----------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Choices that hold a slot."""
        return len(self._entries) + self._reserved

    def reserve(self, n: int) -> RequestSlots:
        """Take slots for n choices. The one place that answers "the queue is full".

        Raises:
            EngineUnavailable: loading, restarting, failed or shutting down.
            QueueFull: with the seconds after which trying again makes sense.
            InvalidRequest: so many choices have never room.
        """
        self.require_ready()
        if n > self._capacity:
            raise InvalidRequest(f"{n} choices in one request; this server has places for {self._capacity}.", param="n")
        if self.unfinished + n > self._capacity:
            raise QueueFull(
                f"{self.unfinished} of {self._capacity} places ({self._max_num_seqs} running, the rest waiting) are "
                f"taken; there is no room for {n} more.",
                retry_after=self._retry_after(n),
            )
        self._reserved += n
        self._quiet.clear()
        return RequestSlots(self, n, self._clock())

    def require_ready(self) -> ModelInfo:
        """What is served, or EngineUnavailable with the reason."""
        if self._closing:
            raise EngineUnavailable(self._closing, retry_after=5.0)
        state, info = self._engine.state, self._engine.info
        if state.phase != "ready" or info is None:
            raise EngineUnavailable(describe(state.phase, state.reason), retry_after=2.0)
        return info

    def submit(self, slots: RequestSlots, requests: Sequence[SequenceRequest]) -> None:
        """See `RequestSlots.submit`."""
        if len(requests) > slots.free:
            raise ValueError(f"{len(requests)} sequences for {slots.free} slots")
        now = self._clock()
        for index, request in enumerate(requests):
            self._engine.send(Submit(request))
            self._entries[request.id] = _Entry(request, index, slots, now)
            slots.ids.add(request.id)
            slots.free -= 1
            self._reserved -= 1

    def finish(self, slots: RequestSlots, index: int, n_tokens: int) -> None:
        """See `RequestSlots.finish`. Without an engine the sequence ends here; there is nothing to wait for."""
        for entry in [entry for entry in self._entries.values() if entry.slots is slots and entry.index == index]:
            entry.finish_at = n_tokens
            try:
                self._engine.send(Finish(entry.request.id, n_tokens))
            except EngineUnavailable:
                self._end_here(entry)

    def release(self, slots: RequestSlots) -> None:
        """The request is over: whatever of it is unfinished is cancelled."""
        for id in list(slots.ids):
            self._forget(id)
            with suppress(EngineUnavailable):  # an engine that is down has forgotten it already
                self._engine.send(Cancel(id))
        self._reserved -= slots.free
        slots.free = 0
        self._notice_quiet()

    def close(self, reason: str) -> None:
        """Take no new requests from now on."""
        self._closing = reason

    async def quiet(self) -> None:
        """Wait until no request is left."""
        await self._quiet.wait()

    def fail_all(self, error: PhalanxError) -> None:
        """End every request with this error."""
        for entry in list(self._entries.values()):
            entry.slots.output.fail(error)
        for slots in {entry.slots for entry in self._entries.values()}:
            self._drop(slots)

    # The engine's side -----------------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Route a step's events to their requests."""
        now = self._clock()
        for event in batch.events:
            entry = self._entries.get(event.id)
            if entry is None:
                continue  # cancelled while the step was computed
            match event:
                case Tokens():
                    self._on_tokens(entry, event, now)
                case PromptScored():
                    entry.scored = True
                    entry.slots.output.push(entry.index, event)
                case Finished():
                    self._on_finished(entry, event, now)

    def on_ready(self, info: ModelInfo) -> None:
        """Submit what is unfinished again, in the old order."""
        self._metrics.engine_up()
        now = self._clock()
        for entry in list(self._entries.values()):
            entry.progressed = False
            self._engine.send(Submit(entry.again(now)))
        if self._entries:
            log.info("resumed %d unfinished sequences", len(self._entries))

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Count the crash against what was being computed; end everything if the engine stays away."""
        self._metrics.engine_down()
        if not will_restart:
            self.fail_all(EngineError(f"The engine stopped and will not be started again: {reason}"))
            return
        computing = [
            entry
            for i, entry in enumerate(self._entries.values())
            if entry.progressed or i < self._max_num_seqs  # first come, first served: these may have held a row
        ]
        for entry in computing:
            if entry.request.id not in self._entries:
                continue  # went with a sibling
            entry.crashes += 1
            if entry.finish_at is not None:
                self._end_here(entry)
            elif entry.crashes >= CRASHES:
                self._quarantine(entry, reason)

    def _on_tokens(self, entry: _Entry, event: Tokens, now: float) -> None:
        if event.start != len(entry.committed):
            message = f"tokens of {event.id} start at {event.start}, but {len(entry.committed)} are committed"
            log.error("engine protocol broken: %s", message)
            self._fail(entry.slots, EngineError(f"The engine lost count: {message}."))
            return
        entry.committed.extend(event.tokens)
        entry.progressed = True
        self._metrics.tokens(entry.timings, len(entry.request.prompt), len(event.tokens), now)
        if entry.timings.first_token is None:
            entry.timings.first_token = now
        entry.timings.last_token = now
        if entry.finish_at is None and not entry.slots.output.push(entry.index, event):
            self._fail(
                entry.slots,
                SlowClient(f"The stream was cancelled: its reader is more than {UNREAD_TOKENS} tokens behind."),
            )

    def _on_finished(self, entry: _Entry, event: Finished, now: float) -> None:
        if entry.finish_at is not None and event.reason != "error":
            event = replace(event, reason="stop", n_tokens=min(event.n_tokens, entry.finish_at), stop_id=None)
        if event.reason in ("error", "cancelled"):  # nobody who reads asked for a cancellation
            self._fail(entry.slots, EngineError(event.detail or "The engine could not compute this request."))
            return
        self._note_end(now)
        self._metrics.finished(entry.timings, event, len(entry.request.prompt), now)
        entry.slots.output.push(entry.index, Ended(event, entry.timings))
        self._forget(entry.request.id)
        self._notice_quiet()

    def _end_here(self, entry: _Entry) -> None:
        """End a sequence whose stop string was found although no engine can confirm it."""
        self._on_finished(entry, Finished(entry.request.id, "stop", len(entry.committed)), self._clock())

    def _quarantine(self, entry: _Entry, reason: str) -> None:
        log.error("quarantined %s after %d engine crashes; the last: %s", entry.request.id, entry.crashes, reason)
        error = Quarantined(
            f"This request was being computed in {entry.crashes} engine crashes and is not tried again; "
            f"the last one: {reason}.",
            remedy="Do not send it again unchanged; the server's log has the crashes.",
        )
        self._fail(entry.slots, error)

    def _fail(self, slots: RequestSlots, error: PhalanxError) -> None:
        self._metrics.failed()
        slots.output.fail(error)
        self._drop(slots)

    def _drop(self, slots: RequestSlots) -> None:
        """Forget a request's sequences here and in the engine; its reader finds the output's error."""
        for id in list(slots.ids):
            self._forget(id)
            with suppress(EngineUnavailable):
                self._engine.send(Cancel(id))
        self._notice_quiet()

    def _forget(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        if entry is not None:
            entry.slots.ids.discard(id)

    def _notice_quiet(self) -> None:
        if self.unfinished == 0:
            self._quiet.set()

    def _note_end(self, now: float) -> None:
        if self._last_end is not None:
            self._end_interval = 0.8 * self._end_interval + 0.2 * (now - self._last_end)
        self._last_end = now

    def _retry_after(self, n: int) -> float:
        """Seconds until about n places are free, going by the recent pace."""
        least, most = RETRY_AFTER_S
        return min(most, max(least, n * self._end_interval))


def describe(phase: str, reason: str) -> str:
    """One sentence on an engine that is not ready."""
    return f"The engine is {phase}{f': {reason}' if reason else ''}."
