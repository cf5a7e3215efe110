"""The fake that ships with the seam of `client.py`: an engine in this process, for tests of the server.

Its tokens are a pure function of request and position, so that a resumed sequence continues as it would have.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.supervision.client import EngineClient, EngineState, LoadProgress
from phalanx.types import (
    Batch,
    Cancel,
    EngineStats,
    Finish,
    Finished,
    FinishReason,
    KeepOwners,
    ModelInfo,
    PromptScored,
    ResetPrefixCache,
    SequenceRequest,
    Submit,
    Timing,
    ToEngine,
    TokenLogprobs,
    Tokens,
)

Script = Callable[[SequenceRequest, int], int]
"""(request, number of output tokens so far) -> the next token; a pure function, so that a resume continues it."""

FAKE_INFO = ModelInfo(
    model_type="fake",
    max_model_len=512,
    vocab_size=256,
    dtype="float32",
    quantization="none",
    supports_rollback=True,
    caches="none",
    weights_bytes=0,
    kv_bytes_per_token=1,
    kv_budget_bytes=1 << 20,
    prefix_budget_bytes=0,
    load_s=0.0,
)


def hashed(vocab_size: int) -> Script:
    """Tokens from a hash of (prompt, seed and choice unless greedy, position); never one of the stop ids."""

    def draw(request: SequenceRequest, position: int) -> int:
        sampling = request.sampling
        key = (sampling.seed, sampling.choice) if sampling.temperature > 0 else ()
        digest = hashlib.sha256(repr((request.prompt, key, position)).encode()).digest()
        token = int.from_bytes(digest[:8], "little") % vocab_size
        while token in request.stop.stop_ids:
            token = (token + 1) % vocab_size
        return token

    return draw


def replying(tokens: Sequence[int]) -> Script:
    """Repeats `tokens` without end; a stop id among them ends the sequence."""
    return lambda request, position: tokens[position % len(tokens)]


class _Row:
    """A sequence of the fake engine."""

    def __init__(self, request: SequenceRequest, now: float) -> None:
        self.request = request
        self.produced = len(request.committed)
        self.scored = request.prompt_logprobs is None
        self.arrived = now
        self.scheduled: float | None = None
        self.first: float | None = None


class FakeEngine(EngineClient):
    """Deterministic engine inside this event loop: one token per running row and step.

    With `manual=True` the engine advances only when a test calls `step()`. `crash()` and `recover()` simulate the end
    and the restart of the engine process.

    Args:
        script: the next token of a sequence; `hashed` by default.
        step_s: seconds between two steps.
        autostart: whether `start` also becomes ready; else the test calls `become_ready`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        info: ModelInfo = FAKE_INFO,
        *,
        script: Script | None = None,
        max_num_seqs: int = 16,
        step_s: float = 0.0,
        manual: bool = False,
        autostart: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.received: list[ToEngine] = []  # every message, for assertions
        self._info = info
        self._script = script or hashed(info.vocab_size)
        self._max_num_seqs = max_num_seqs
        self._step_s = step_s
        self._manual = manual
        self._autostart = autostart
        self._clock = clock
        self._state = EngineState()
        self._ready_once = False
        self._rows: dict[str, _Row] = {}  # insertion order is arrival order
        self._outbox: list[Tokens | PromptScored | Finished] = []  # leaves with the next step
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self._pong_at: float | None = None

    @property
    def info(self) -> ModelInfo | None:
        return self._info if self._ready_once else None

    @property
    def state(self) -> EngineState:
        age = None if self._pong_at is None else self._clock() - self._pong_at
        return replace(self._state, last_pong_age_s=age)

    async def start(self) -> None:
        if not self._manual:
            self._loop_task = asyncio.create_task(self._run())
        if self._autostart:
            self.become_ready()

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            self._loop_task = None
        self._rows.clear()
        self._state = replace(self._state, phase="stopped", reason="closed")

    def send(self, message: ToEngine) -> None:
        self._require_ready()
        self.received.append(message)
        match message:
            case Submit(request):
                self._rows[request.id] = _Row(request, self._clock())
                self._work.set()
            case Cancel(id):
                self._rows.pop(id, None)
            case Finish(id, n_tokens):
                row = self._rows.pop(id, None)
                if row is not None:
                    self._outbox.append(self._finished(row, "stop", min(n_tokens, row.produced)))
                    self._work.set()
            case ResetPrefixCache() | KeepOwners():
                pass  # the fake has no prefix cache
            case _:
                raise ValueError(f"the fake engine does not know {type(message).__name__}")

    async def ping(self) -> EngineStats:
        self._require_ready()
        self._pong_at = self._clock()
        running = min(len(self._rows), self._max_num_seqs)
        return replace(self._stats, running=running, waiting=len(self._rows) - running)

    # For tests ---------------------------------------------------------------------------------------------------

    def become_ready(self) -> None:
        """End loading: the engine serves."""
        self._state = replace(self._state, phase="ready", reason="", down_since=None, progress=None)
        self._ready_once = True
        self._pong_at = self._clock()
        self.emit_ready(self._info)

    def down_since(self, at: float) -> None:
        """Set the time, in seconds since the epoch, from which the engine is down."""
        self._state = replace(self._state, down_since=at)

    def loading(self, done: int, total: int) -> None:
        """Report loading progress in bytes."""
        self._state = replace(
            self._state, phase="loading", reason="loading", progress=LoadProgress("weights", done, total)
        )

    def crash(self, reason: str = "killed by signal 9", *, will_restart: bool = True) -> None:
        """Go down and forget all sequences."""
        self._rows.clear()
        self._outbox.clear()
        self._stats = EngineStats()
        phase, code = ("restarting", None) if will_restart else ("failed", ExitCode.CRASH)
        self._state = replace(self._state, phase=phase, reason=reason, exit_code=code)
        for call in self.when_lost:
            call()
        self.emit_down(reason, will_restart=will_restart)

    def recover(self) -> None:
        """Come back after `crash`."""
        self._state = replace(self._state, restarts=self._state.restarts + 1)
        self.become_ready()

    def step(self) -> None:
        """Generate one token for each of the oldest `max_num_seqs` sequences."""
        events, self._outbox = self._outbox, []
        now = self._clock()
        for row in [row for row in self._rows.values() if self._expired(row, now)]:
            del self._rows[row.request.id]
            events.append(self._finished(row, "timeout", row.produced))
        for row in list(self._rows.values())[: self._max_num_seqs]:
            events += self._advance(row, now)
        self._emit(events)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            if self._rows or self._outbox:
                self.step()
                await asyncio.sleep(self._step_s)
            else:
                self._work.clear()

    def _advance(self, row: _Row, now: float) -> list[Tokens | PromptScored | Finished]:
        request = row.request
        events: list[Tokens | PromptScored | Finished] = []
        row.scheduled = now if row.scheduled is None else row.scheduled
        row.first = now if row.first is None else row.first
        if not row.scored and request.prompt_logprobs is not None:
            row.scored = True
            scores = [self._logprobs(token, request.prompt_logprobs) for token in request.prompt[1:]]
            events.append(PromptScored(request.id, [None, *scores]))
        token = self._script(request, row.produced)
        scored = None if (top := request.sampling.logprobs) is None else [self._logprobs(token, top)]
        events.append(Tokens(request.id, row.produced, [token], scored))
        row.produced += 1
        self._stats = replace(self._stats, generated_tokens=self._stats.generated_tokens + 1)
        if token in request.stop.stop_ids:
            events.append(self._finished(row, "stop", row.produced, stop_id=token))
        elif row.produced >= request.stop.max_tokens:
            events.append(self._finished(row, "length", row.produced))
        if isinstance(events[-1], Finished):
            del self._rows[request.id]
        return events

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        others = [(token + i) % self._info.vocab_size for i in range(top)]
        return TokenLogprobs(token, -0.5, 0, [(other, -0.5 * (i + 1)) for i, other in enumerate(others)])

    def _expired(self, row: _Row, now: float) -> bool:
        limit = row.request.timeout_s
        return limit is not None and now - row.arrived >= limit

    def _finished(self, row: _Row, reason: FinishReason, n_tokens: int, stop_id: int | None = None) -> Finished:
        now = self._clock()
        scheduled = now if row.scheduled is None else row.scheduled
        first = now if row.first is None else row.first
        timing = Timing(queue_s=scheduled - row.arrived, prefill_s=first - scheduled, decode_s=now - first)
        return Finished(row.request.id, reason, n_tokens, 0, timing, "", stop_id)

    def _emit(self, events: list[Tokens | PromptScored | Finished]) -> None:
        if events:
            self._stats = replace(self._stats, step=self._stats.step + 1)
            self.emit_batch(Batch(self._stats.step, events))

    def _require_ready(self) -> None:
        if self._state.phase != "ready":
            raise EngineUnavailable(f"The engine is {self._state.phase}: {self._state.reason or 'not ready yet'}.")
