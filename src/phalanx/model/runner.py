"""The runner: executes buffer operations and forwards on one rank; decides nothing (design: Lock step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.dist.reduce import Reducer
from phalanx.errors import EngineError
from phalanx.kernels import install
from phalanx.model.cache import row_memory
from phalanx.model.cache.buffers import ArenaBuffers, Snapshot
from phalanx.model.cache.layer_layout import CacheFacts
from phalanx.model.cache.row_view import RowView
from phalanx.model.disk_blocks import DiskBlocks
from phalanx.model.graph_cache import GraphCache
from phalanx.model.graphs import Graphs
from phalanx.model.in_flight import InFlight
from phalanx.model.overlap import Overlap, overlap_of
from phalanx.model.stage import Stage, call_model, check_hidden
from phalanx.sched.plan import Admit, Evict, Forward, Free, Move, Resize, Restore, RowOp, Share, Step, Store, Swap

MAX_ASYNC_ROWS = 4
"""Most rows of a forward dispatched before its plan exists. With more rows the batch changes more often, which discards
the result, and the time saved is a smaller part of a step."""

GIVEN_BACK_PER_STEP = 64 << 20  # bytes of ended rows returned to the system per step: 4 ms
SAVED_PER_STEP = 16 << 20  # bytes of kept prefixes copied per step: 10 ms, for memory that was not touched before


class Runner:
    """One model and its KV buffers.

    Args:
        model: an mlx-lm model, its weights in memory.
        facts: what `registry.inspect` found about it.
        dtype: floating dtype of the hidden states.
        reducer: all-reduces the layers' results; None for a single rank.
        overlap: None: chosen for this process's kernels and device.
        stage: the layers of this pipeline stage; None for the whole model.
    """

    def __init__(
        self,
        model: Module,
        facts: CacheFacts,
        dtype: mx.Dtype,
        reducer: Reducer | None = None,
        overlap: Overlap | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.model = model
        self.facts = facts
        self.dtype = dtype
        self.reducer = reducer or Reducer(None)
        self.stage = stage
        self._has_hidden_output = stage is not None and stage.has_hidden_output
        self.samples = True
        """Whether this rank needs logits; workers do not."""
        self.outgoing: Callable[[mx.array], mx.array] = lambda hidden: hidden
        """Converts a stage's output for the link, in the same evaluation; lazy."""
        ops = install.operations()
        on_gpu = mx.default_device() != mx.Device(mx.cpu)
        self._overlap = overlap or overlap_of(native=ops is not None, on_gpu=on_gpu)
        self._graphs = Graphs() if ops is None else GraphCache(ops, model, facts.mask_dims, self.reducer, stage)
        self._captured_before = 0
        self._step = 0
        self._arenas: dict[int, ArenaBuffers] = {}
        self._entries: dict[int, Snapshot] = {}
        self.disk: DiskBlocks | None = None
        self._touched: ArenaBuffers | None = None
        self._logits: mx.array | None = None
        self._last: tuple[Forward, list[int]] | None = None  # if it sampled one token per row; lengths before it
        self._in_flight: InFlight | None = None
        self._unchecked: list[mx.array] | None = None  # of a dispatched forward, from `Reducer.finish`

    @property
    def kv_bytes(self) -> int:
        """Bytes of memory of rows."""
        return sum(arena.nbytes for arena in self._arenas.values())

    @property
    def uncounted_bytes(self) -> int:
        """The part of `kv_bytes` that MLX does not count."""
        return self.kv_bytes if row_memory.in_pages() else 0

    @property
    def prefix_bytes(self) -> int:
        """Bytes of all kept prefixes."""
        return sum(entry.nbytes for entry in self._entries.values())

    def begin(self, step: int) -> None:
        """Begin a step, whose number later faults are reported with."""
        self._step = step
        for arena in self._arenas.values():
            arena.copy_saved(SAVED_PER_STEP)
            arena.give_back(GIVEN_BACK_PER_STEP)
        self._captured_before = self._graphs.captured
        self.reducer.begin(step)

    def apply(self, ops: Sequence[RowOp]) -> None:
        """Execute buffer operations in order.

        Raises:
            EngineError: a slot, entry or length does not exist here.
        """
        self._flush()
        if ops:
            self._discard_in_flight()
        for op in ops:
            self._apply(op)
        if self.disk is not None:
            self.disk.begin_writes(at_once=not any(arena.has_rows for arena in self._arenas.values()))

    def forward(self, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None = None) -> mx.array | None:
        """Feed tokens; `kv_len[i]` is the valid length of row `start + i` before the forward.

        Args:
            hidden: [rows, L, width] (packed: [tokens, 1, width]), the previous stage's output; None for the first stage
                and for a whole model.

        Returns:
            Before the last stage: the result of `outgoing`, evaluated, all-reduces checked. In the last: logits
            `[rows, L, V]` (packed: `[tokens, 1, V]`), not evaluated, if the forward samples or scores and this rank
            samples; evaluate them together with `written_caches()`. Otherwise None, with the caches evaluated.

        Raises:
            EngineError: the buffers are too short, a recurrent row would be padded or rolled back, or `hidden` does not
                belong to this forward.
            CollectiveFault: an all-reduce was wrong on some rank. With `_defers_checks`, `check_sums` raises it for a
                forward whose logits are returned.
        """
        self._flush()
        check_hidden(self.stage, hidden, (sum(fwd.valid), 1) if fwd.packed else (len(kv_len), len(fwd.tokens[0])))
        arena = self._arena(fwd.arena)
        arena.check_state(fwd.start, kv_len)
        in_flight, self._in_flight, self._last = self._in_flight, None, None
        if self.facts.recurrent and min(fwd.valid) < len(fwd.tokens[0]):
            raise EngineError("Rows with recurrent state cannot be padded.")
        if fwd.packed:
            logits = self._packed(arena, fwd, kv_len, hidden)
        elif self.facts.one_row and len(kv_len) > 1:
            logits = self._rows_in_turn(arena, fwd, kv_len, hidden)
        else:
            view = self._view(arena, fwd.start, kv_len, len(fwd.tokens[0]), fwd.sample)
            if in_flight is not None and in_flight.computes(fwd, kv_len):
                logits = in_flight.logits
                arena.advance(view, [length + 1 for length in kv_len])
            else:
                if in_flight is not None and in_flight.written:
                    self._forget(in_flight)
                logits = self._call(arena, view, fwd.tokens, kv_len, fwd.valid, hidden, join=fwd.sample)
            if fwd.sample and len(fwd.tokens[0]) == 1 and self.stage is None:
                self._last = fwd, [*kv_len]
        self._touched = arena
        if self.samples and (fwd.sample or fwd.score) and not self._has_hidden_output:
            self._logits = logits
            return logits
        handed_on = [logits] if self._has_hidden_output else []
        mx.eval(handed_on, arena.touched())
        return logits if self._has_hidden_output else None

    @property
    def captured_graph(self) -> bool:
        """Whether this step captured a graph, which takes longer than a usual step."""
        return self._graphs.captured > self._captured_before

    @property
    def replay_limit(self) -> int:
        """Largest model call that is replayed, in rows x tokens per row; 0 where every call is built anew."""
        return self._graphs.max_tokens

    def blocks(self, step: Step) -> bool:
        """Whether executing this step waits for the device before its logits are evaluated."""
        return bool(step.ops) or not self._is_async(step.forwards)

    def _is_async(self, forwards: Sequence[Forward]) -> bool:
        """Whether these forwards are dispatched without waiting: one sampling forward, no all-reduce to check first."""
        lazy = (self.reducer.size == 1 or self._defers_checks) and not self.facts.one_row
        return lazy and len(forwards) == 1 and forwards[0].sample and not self._has_hidden_output

    @property
    def _defers_checks(self) -> bool:
        """Whether all-reduces are checked after the wait for the tokens, instead of in a separate wait."""
        return self._overlap is not Overlap.NONE and self.samples and not self._has_hidden_output

    # -- async scheduling ------------------------------------------------------------------------------------------

    @property
    def has_in_flight(self) -> bool:
        """Whether the next forward has been dispatched already."""
        return self._in_flight is not None

    def may_dispatch_next(self, forwards: Sequence[Forward]) -> bool:
        """Whether `dispatch_next` may follow: a single rank, no wait in these forwards, few rows."""
        alone = self.reducer.size == 1 and self.stage is None
        return alone and self._is_async(forwards) and len(forwards[0].seqs) <= MAX_ASYNC_ROWS

    def dispatch_next(self, tokens: mx.array) -> None:
        """Dispatch or build the most likely next forward: the rows of the last one, each fed its new token.

        It runs on the device while the processor handles the sampled tokens. If the plan contains another forward, the
        result is discarded: its keys and values lie beyond all rows' lengths. A forward that is not replayed is only
        built here: call `start_in_flight` when the tokens, uint32 [rows], have arrived.
        """
        if self._last is None or self.reducer.size > 1:
            return
        fwd, before = self._last
        arena, kv_len = self._arena(fwd.arena), [length + 1 for length in before]
        if max(kv_len) >= arena.capacity:
            return
        view = self._view(arena, fwd.start, kv_len, 1, True)
        build = self._overlap is Overlap.BUILD
        call = self._build_in_flight if build else self._graphs.call_in_flight
        logits = call(arena, view, tokens[:, None])
        if logits is not None:
            arena.reach(view)
            written = arena.touched() if build else []
            self._in_flight = InFlight(fwd.arena, fwd.start, kv_len, tokens, logits, written)

    def _build_in_flight(self, arena: ArenaBuffers, view: RowView, tokens: mx.array) -> mx.array:
        """Build the model call for tokens [rows, 1] that the device is still computing."""
        view.early = False  # evaluating early would write to buffers that the device still reads
        arena.resume(view)
        logits: mx.array = self.model(tokens.astype(mx.int32), cache=list(arena.caches))
        arena.close()
        return logits

    def start_in_flight(self) -> None:
        """Dispatch the forward that `dispatch_next` built. Its tokens must have arrived.

        Not earlier: MLX writes to a cache in place only if no unfinished work reads it. Dispatched during the previous
        forward, as mlx-lm does, it would copy the caches of all layers (measured: 79 MB for a buffer of 78).
        """
        if self._in_flight is not None and self._in_flight.written:
            mx.async_eval(self._in_flight.logits, self._in_flight.written)  # type: ignore[no-untyped-call]

    def _discard_in_flight(self) -> None:
        """Wait for the forward in flight and drop it: its buffers may be moved or freed next."""
        if self._in_flight is not None:
            self._forget(self._in_flight)
        self._in_flight = self._last = None

    def _forget(self, in_flight: InFlight) -> None:
        """Wait for a forward that no plan contains. What it wrote lies beyond the rows' lengths, so it is ignored."""
        mx.eval(in_flight.logits, in_flight.written)
        if in_flight.written:
            self._arena(in_flight.arena).forget()

    # -- model calls -----------------------------------------------------------------------------------------------

    def written_caches(self) -> list[mx.array]:
        """Cache arrays that the last forward wrote, to be evaluated together with its logits."""
        return self._touched.touched() if self._touched is not None else []

    def reset(self) -> None:
        """Free unevaluated results, captured graphs and MLX's cached buffers."""
        self._discard_in_flight()
        self._logits = self._touched = self._unchecked = None
        self._graphs.reset()
        for arena in self._arenas.values():
            arena.copy_saved()
            arena.give_back()
        mx.clear_cache()

    def _view(self, arena: ArenaBuffers, start: int, kv_len: Sequence[int], length: int, sample: bool) -> RowView:
        # Beyond a window, drafts need array masks, which change with the position; native attention takes lengths.
        beyond = sample and length > 1 and any(max(kv_len) + length > window for window in arena.windows)
        ragged = beyond and not self.facts.one_row and install.active()
        return RowView(start, kv_len, length, mask_dims=self.facts.mask_dims, prefill=not sample, ragged=ragged)

    def _call(
        self,
        arena: ArenaBuffers,
        view: RowView,
        tokens: Sequence[Sequence[int]],
        kv_len: Sequence[int],
        valid: Sequence[int],
        hidden: mx.array | None,
        *,
        join: bool = False,
    ) -> mx.array | None:
        """One model call over rows of one arena. Returns logits [rows, L, V] if this rank samples, or a stage's output.

        Args:
            join: the caller waits for the logits and then calls `check_sums`.
        """
        arena.open(view, [length + n for length, n in zip(kv_len, valid, strict=True)])
        wanted = self.samples or self._has_hidden_output
        if (replayed := self._graphs.call(arena, view, tokens, samples=wanted, hidden=hidden)) is not None:
            logits, sums = replayed
        else:
            caches: list[Any] = list(arena.caches)  # a copy: models may extend the list
            ids = mx.array([list(row) for row in tokens], dtype=mx.int32)
            logits = call_model(self.model, self.stage, ids, caches, hidden)
            sums = self.reducer.finish()
        arena.close()
        if self._has_hidden_output and logits is not None:
            logits = self.outgoing(logits)
        if self.reducer.size > 1:
            # Evaluate all collectives of the call, in the same order on every rank. The rank that samples evaluates
            # the logits later, unless they contain collectives of mlx-lm's own.
            arrays = [*sums, *arena.touched(), *([logits] if self.reducer.foreign or self._has_hidden_output else [])]
            self._unchecked = sums
            if join and self._defers_checks:
                mx.async_eval(arrays)  # type: ignore[no-untyped-call]
            else:
                mx.eval(arrays)
                self.check_sums()
        return logits if wanted else None

    def check_sums(self) -> None:
        """Check the all-reduces of the last forward, once. Raises CollectiveFault if one was wrong on some rank."""
        sums, self._unchecked = self._unchecked, None
        if sums is not None:
            mx.eval(sums)
            self.reducer.judge(self._step, sums)

    def _packed(
        self, arena: ArenaBuffers, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None
    ) -> mx.array | None:
        """A call without padding: each token is its own row; logits [tokens, 1, V]."""
        if not install.active():
            raise EngineError(
                "Only the native kernels can pack rows, and this rank has none.",
                remedy="Install phalanx-cpu on every machine, or start all ranks with --no-cpu-kernels.",
            )
        view = RowView(fwd.start, kv_len, 1, mask_dims=self.facts.mask_dims, packed=fwd.valid)
        tokens = [(token,) for row, n in zip(fwd.tokens, fwd.valid, strict=True) for token in row[:n]]
        return self._call(arena, view, tokens, kv_len, fwd.valid, hidden)

    def _rows_in_turn(
        self, arena: ArenaBuffers, fwd: Forward, kv_len: Sequence[int], hidden: mx.array | None
    ) -> mx.array | None:
        """For models that take one position for all rows: one unpadded call per row; logits padded with 0."""
        width = len(fwd.tokens[0])
        parts = []
        for i, (row, n) in enumerate(zip(fwd.tokens, fwd.valid, strict=True)):
            view = self._view(arena, fwd.start + i, kv_len[i : i + 1], n, fwd.sample)
            own = None if hidden is None else mx.contiguous(hidden[i : i + 1, :n])
            part = self._call(arena, view, [row[:n]], kv_len[i : i + 1], [n], own)
            mx.eval([] if part is None else part, arena.touched())  # before the next row writes (see `buffers.py`)
            if part is not None:
                parts.append(mx.pad(part, [(0, 0), (0, width - n), (0, 0)]) if n < width else part)
        return mx.concatenate(parts) if parts else None

    def _flush(self) -> None:
        """Evaluate lazy results of an earlier forward of the step (see `buffers.py`)."""
        if self._logits is not None and self._touched is not None:
            mx.eval(self._logits, self._touched.touched())
        self._logits = None
        self.check_sums()

    def _apply(self, op: RowOp) -> None:
        match op:
            case Resize():
                self._resize(op)
            case Admit():
                self._arena(op.arena).admit(op.slot)
            case Restore():
                self._arena(op.arena).load(op.slot, self._entry(op.entry), op.length, op.start)
            case Share():
                self._arena(op.src_arena).copy(op.src, self._arena(op.arena), op.slot, op.length, op.start)
            case Move():
                self._arena(op.src_arena).move(op.src, self._arena(op.arena), op.dst)
            case Swap():
                self._arena(op.arena).swap(op.a, op.b)
            case Store():
                self._entries[op.entry] = self._arena(op.arena).save(op.slot, op.length)
            case Evict():
                self._entry(op.entry)
                del self._entries[op.entry]
            case Free():
                self._arena(op.arena).free(op.slot)
            case _:
                assert self.disk is not None
                self.disk.apply(op, self._entries, self._arena)

    def _resize(self, op: Resize) -> None:
        arena = self._arenas.get(op.arena)
        if arena is None:
            arena = self._arenas[op.arena] = ArenaBuffers(self.facts.layouts)
        arena.resize(op.rows, op.capacity)
        if op.rows == 0:
            del self._arenas[op.arena]

    def _arena(self, number: int) -> ArenaBuffers:
        arena = self._arenas.get(number)
        if arena is None:
            raise EngineError(f"Arena {number} was never sized.")
        return arena

    def _entry(self, number: int) -> Snapshot:
        entry = self._entries.get(number)
        if entry is None:
            raise EngineError(f"Prefix entry {number} does not exist.")
        return entry
