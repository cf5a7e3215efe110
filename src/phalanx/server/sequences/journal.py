"""The journal of unfinished sequences: each one's request, its committed tokens and its output queue.

The journal lives in the server and survives the engine, so that streams pause instead of breaking when a rank dies
(design: Fail-stop, then resume). It keeps the committed tokens, and submits every unfinished sequence again once a new
engine is ready. A sequence that may have caused crashes runs alone, and fails after further crashes. `queue_room.py`
limits the number of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from phalanx.errors import EngineError, EngineUnavailable, PhalanxError, Quarantined, SlowClient
from phalanx.server.sequences.output_queue import OutputQueue, StreamEnd, Timings
from phalanx.server.sequences.queue_room import TOKEN_BYTES, QueueRoom
from phalanx.server.sequences.server_metrics import ServerMetrics
from phalanx.supervision.client import EngineClient
from phalanx.types import Batch, Cancel, Finish, Finished, ModelInfo, PromptScored, SequenceRequest, Submit, Tokens

log = logging.getLogger(__name__)

UNREAD_TOKENS = 2048  # per request; about 8 KiB of text, or a minute of a fast model
CRASHES = 2  # a sequence that was running in so many crashes runs alone; after as many alone, it is quarantined
TRIAL_TOKENS = 32  # that a sequence computes alone: more than a step, so that it passes the point of its last crash


class _JournalEntry:
    """One unfinished sequence."""

    def __init__(self, request: SequenceRequest, index: int, slots: RequestSlots, now: float) -> None:
        self.request = request
        self.index = index
        self.slots = slots
        self.submitted = now
        self.timings = Timings(slots.arrived)
        self.committed: list[int] = list(request.committed)
        self.scored = request.prompt_logprobs is None
        self.finish_at: int | None = None  # number of output tokens that completed a stop string
        self.known = False  # the running engine has it
        self.progressed = False  # it got tokens since its last submission
        self.is_resumed = bool(request.committed)  # another engine, or an earlier one, computed tokens of it
        self.crashes = 0  # while it was computed
        self.crashes_alone = 0  # while it was computed alone

    def submission(self, now: float, max_tokens: int | None = None) -> SequenceRequest:
        """The request that continues this sequence: with committed tokens and the remaining timeout.

        Args:
            max_tokens: further tokens at most.
        """
        timeout, stop = self.request.timeout_s, self.request.stop
        if max_tokens is not None:
            limit = min(stop.max_tokens, len(self.committed) + max_tokens)
            stop = replace(stop, max_tokens=limit, min_tokens=min(stop.min_tokens, limit))
        return replace(
            self.request,
            committed=list(self.committed),
            stop=stop,
            prompt_logprobs=None if self.scored else self.request.prompt_logprobs,
            timeout_s=None if timeout is None else max(0.001, timeout - (now - self.submitted)),
        )


class RequestSlots:
    """Room for the choices of one request. A context manager that cancels unfinished choices and frees the room at the
    end.

    The server reserves slots before it tokenises a request, so that a full server answers 429 at once.
    """

    def __init__(self, journal: Journal, n: int, arrived: float, owner: str) -> None:
        self.arrived = arrived
        self.owner = owner
        self.output = OutputQueue(limit=UNREAD_TOKENS)
        self._journal = journal
        self.free = n  # slots without a sequence
        self.prompt_bytes = 0
        self.ids: set[str] = set()

    def __enter__(self) -> RequestSlots:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.release(self)

    def hold_prompts(self, n_tokens: int) -> None:
        """Take memory for all choices' prompts.

        Raises:
            QueueFull: prompts of unfinished requests take all of it.
        """
        self._journal.hold_prompts(self, n_tokens * TOKEN_BYTES)

    def submit(self, requests: Sequence[SequenceRequest], first: int = 0) -> None:
        """Submit choices to the engine; the events of `requests[i]` have index `first` + i in the output queue.

        Raises:
            EngineUnavailable: the engine went down meanwhile.
        """
        self._journal.submit(self, requests, first)

    def finish(self, index: int, n_tokens: int) -> None:
        """End choice `index` after `n_tokens` output tokens, where the server found a stop string."""
        self._journal.finish(self, index, n_tokens)


class Journal:
    """See the module's docstring. Used only on the event loop's thread.

    Args:
        prompt_bytes: limit for the prompts of unfinished requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: ServerMetrics,
        *,
        max_num_seqs: int,
        queue: int,
        prompt_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._entries: dict[str, _JournalEntry] = {}  # by sequence id, in order of arrival
        self._reserved = 0  # reserved slots that have no sequence yet
        self._room = QueueRoom(max_num_seqs=max_num_seqs, queue=queue, prompt_bytes=prompt_bytes)
        self._suspects: list[_JournalEntry] = []  # that will run alone
        self._trial: _JournalEntry | None = None  # runs alone, while all others wait
        self._closing = ""  # why new requests are refused
        self._idle = asyncio.Event()
        self._idle.set()
        engine.subscribe(self)
        engine.when_lost.append(self._pause)

    # Called by requests ----------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Number of choices that hold a slot."""
        return len(self._entries) + self._reserved

    def reserve(self, n: int, owner: str = "") -> RequestSlots:
        """Take slots for n choices.

        A request with more choices than all slots gets them once its owner holds none.

        Args:
            owner: of the request's API key; see `http/fair_quota.py`.

        Raises:
            EngineUnavailable: the engine is loading, restarting, failed or shutting down.
            QueueFull: no room now; `retry_after` estimates the seconds until there is.
        """
        self.require_ready()
        self._room.take_choices(owner, n, self.unfinished)
        self._reserved += n
        self._idle.clear()
        return RequestSlots(self, n, self._clock(), owner)

    def hold_prompts(self, slots: RequestSlots, n_bytes: int) -> None:
        """See `RequestSlots.hold_prompts`."""
        self._room.take_prompts(slots.owner, n_bytes)
        slots.prompt_bytes += n_bytes

    def require_ready(self) -> ModelInfo:
        """The served model.

        Raises:
            EngineUnavailable: the engine is not ready, or the server is shutting down.
        """
        if self._closing:
            raise EngineUnavailable(self._closing, retry_after=5.0)
        state, info = self._engine.state, self._engine.info
        if state.phase != "ready" or info is None:
            raise EngineUnavailable(describe(state.phase, state.reason), retry_after=2.0)
        return info

    def submit(self, slots: RequestSlots, requests: Sequence[SequenceRequest], first: int = 0) -> None:
        """See `RequestSlots.submit`."""
        if len(requests) > slots.free:
            raise ValueError(f"{len(requests)} sequences for {slots.free} slots")
        now = self._clock()
        for index, request in enumerate(requests, first):
            entry = _JournalEntry(request, index, slots, now)
            if self._trial is None:
                self._send(entry, request)
            self._entries[request.id] = entry
            slots.ids.add(request.id)
            slots.free -= 1
            self._reserved -= 1

    def finish(self, slots: RequestSlots, index: int, n_tokens: int) -> None:
        """See `RequestSlots.finish`. The journal itself ends a sequence while no engine runs it."""
        for entry in [entry for entry in self._entries.values() if entry.slots is slots and entry.index == index]:
            entry.finish_at = n_tokens
            try:
                if entry.known:
                    self._engine.send(Finish(entry.request.id, n_tokens))
            except EngineUnavailable:
                entry.known = False
            if not entry.known:
                self._end_locally(entry)

    def release(self, slots: RequestSlots) -> None:
        """Cancel the request's unfinished sequences and free its slots."""
        for id in list(slots.ids):
            self._forget(id)
            with suppress(EngineUnavailable):  # an engine that is down has no sequences
                self._engine.send(Cancel(id))
        self._reserved -= slots.free
        self._room.give_choices(slots.owner, slots.free)
        self._room.give_prompts(slots.owner, slots.prompt_bytes)
        slots.free = slots.prompt_bytes = 0
        self._set_if_idle()

    def close(self, reason: str) -> None:
        """Refuse new requests, with this reason."""
        self._closing = reason

    async def wait_until_idle(self) -> None:
        """Wait until no request holds a slot."""
        await self._idle.wait()

    def fail_all(self, error: PhalanxError) -> None:
        """End every request with this error."""
        for entry in list(self._entries.values()):
            entry.slots.output.fail(error)
        for slots in {entry.slots for entry in self._entries.values()}:
            self._drop(slots)

    # Called by the engine client -------------------------------------------------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Pass a step's events to the output queues of their requests."""
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
        """Submit unfinished sequences again: suspects one at a time, then all, in their order of arrival."""
        self._metrics.engine_up()
        suspects = [entry for entry in self._entries.values() if entry.crashes >= CRASHES]
        self._suspects = sorted(suspects, key=lambda entry: entry.crashes_alone)  # the likely cause comes last
        if self._entries:
            log.info("resuming %d unfinished sequences, %d of them alone", len(self._entries), len(suspects))
        self._resume()

    def _pause(self) -> None:
        """Mark all unfinished requests as paused, so that a gateway may move them."""
        for entry in self._entries.values():
            entry.slots.output.set_paused(True)

    def _resume(self) -> None:
        """Submit the next suspect, alone; after the last one, all waiting sequences."""
        now = self._clock()
        self._trial = None
        with suppress(EngineUnavailable):  # it has just gone down; `on_ready` will be called again
            while self._suspects and self._trial is None:
                entry = self._suspects.pop(0)
                if entry.request.id in self._entries:
                    self._send(entry, entry.submission(now, TRIAL_TOKENS))
                    self._trial = entry
            waiting = [entry for entry in self._entries.values() if not entry.known]
            for entry in waiting if self._trial is None else ():
                self._send(entry, entry.submission(now))

    def _send(self, entry: _JournalEntry, request: SequenceRequest) -> None:
        self._engine.send(Submit(request))
        entry.known = True
        entry.slots.output.set_paused(False)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """Count the crash for every sequence that may have caused it. Without a restart, fail all requests."""
        self._metrics.engine_down()
        computing, alone = self._computing(), self._trial
        self._suspects, self._trial = [], None
        for entry in self._entries.values():
            entry.known = entry.progressed = False
            entry.is_resumed = True
        if not will_restart:
            self.fail_all(EngineError(f"The engine stopped and will not be started again: {reason}"))
            return
        for entry in computing:
            if entry.request.id not in self._entries:
                continue  # dropped together with another choice of its request
            entry.crashes += 1
            entry.crashes_alone += entry is alone
            if entry.finish_at is not None:
                self._end_locally(entry)
            elif entry.crashes_alone >= CRASHES:
                self._quarantine(entry, reason)

    def _computing(self) -> list[_JournalEntry]:
        """The sequences that may have had a row; the engine serves those of one owner in order of arrival."""
        seen: Counter[str] = Counter()
        found = []
        for entry in self._entries.values():
            if not entry.known:
                continue
            if entry.progressed or seen[entry.slots.owner] < self._max_num_seqs:
                found.append(entry)
            seen[entry.slots.owner] += 1
        return found

    def _on_tokens(self, entry: _JournalEntry, event: Tokens, now: float) -> None:
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

    def _on_finished(self, entry: _JournalEntry, event: Finished, now: float) -> None:
        if entry.finish_at is not None and event.reason != "error":
            event = replace(event, reason="stop", n_tokens=min(event.n_tokens, entry.finish_at), stop_id=None)
        if event.reason in ("error", "cancelled"):  # the client did not cancel it: its entry would be gone
            self._fail(entry.slots, EngineError(event.detail or "The engine could not compute this request."))
            return
        if entry is self._trial and event.reason == "length" and event.n_tokens < entry.request.stop.max_tokens:
            entry.known, entry.crashes, entry.crashes_alone = False, 0, 0  # it continues with the others
            self._resume()
            return
        self._room.note_end(now)
        is_alone = len(self._entries) == 1 and not entry.is_resumed
        self._metrics.finished(entry.timings, event, len(entry.request.prompt), now, is_alone=is_alone)
        entry.slots.output.push(entry.index, StreamEnd(event, entry.timings))
        self._forget(entry.request.id)
        self._set_if_idle()

    def _end_locally(self, entry: _JournalEntry) -> None:
        """End a sequence at its stop string without the engine, which is down."""
        self._on_finished(entry, Finished(entry.request.id, "stop", len(entry.committed)), self._clock())

    def _quarantine(self, entry: _JournalEntry, reason: str) -> None:
        log.error("quarantined %s, alone in %d engine crashes; the last: %s", entry.request.id, CRASHES, reason)
        error = Quarantined(
            f"This request was computed alone in {CRASHES} engine crashes and is not tried again; the last one: "
            f"{reason}.",
            remedy="Do not send it again unchanged; the server's log has the crashes.",
        )
        self._fail(entry.slots, error)

    def _fail(self, slots: RequestSlots, error: PhalanxError) -> None:
        self._metrics.failed()
        slots.output.fail(error)
        self._drop(slots)

    def _drop(self, slots: RequestSlots) -> None:
        """Cancel a request's sequences here and in the engine. Its reader gets the error from the output queue."""
        for id in list(slots.ids):
            self._forget(id)
            with suppress(EngineUnavailable):
                self._engine.send(Cancel(id))
        self._set_if_idle()

    def _forget(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        if entry is not None:
            entry.slots.ids.discard(id)
            self._room.give_choices(entry.slots.owner, 1)
            self._metrics.speeds.left(self._clock())
            if entry is self._trial:
                self._resume()

    def _set_if_idle(self) -> None:
        if self.unfinished == 0:
            self._idle.set()


def describe(phase: str, reason: str) -> str:
    """One sentence on the phase of an engine that is not ready, for an error message."""
    return f"The engine is {phase}{f': {reason}' if reason else ''}."
