"""The graph cache builds a decode call twice, captures it, and replays it in later steps.

Building and ordering a step's graph takes up to half of the time per token of a small model, on the cores that compute.
The native kernels can keep a call and run it again with other tokens at other positions
(`native/ext/replay.h`). A replay runs the same operations, so it gives the same bits.

The cache does not assume that a call has the same graph at every position. It builds the call at the lowest and at the
highest position, with placeholders for tokens and a traced position, which records whether the model computes with it.
If the graphs differ beyond what a replay can adjust (recurrent state, attention without the fused kernel), the cache
refuses and the runner builds that call in every step. Rows of different lengths pass their lengths as arrays,
which are inputs like tokens (`model/cache/row_view.py`, `kernels/ragged_mask.py`). Full and partial sliding windows are
captured separately.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.dist.reduce import Reducer, Reduction
from phalanx.errors import EngineError
from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.ragged_cache import RaggedKV
from phalanx.model.cache.row_view import RowView
from phalanx.model.graphs import Graphs, Replayed
from phalanx.model.stage import Stage, call_model

log = logging.getLogger("phalanx.model")

MAX_TOKENS = 32
"""Largest captured call, in rows x tokens per row. Building larger ones is a small part of their time."""
MIN_LENGTH = 1
"""Fewest tokens in a row's cache before a captured call: an empty row is at the start of its prompt."""
CAPTURE_AFTER = 6
"""Capture the sixth equal call, which takes as long as building two. Once the call with one token per row is captured,
calls of the same rows with drafts are captured at once: the measured cost of drafts must not include building."""
MAX_GRAPHS = 16
"""Each captured graph holds the memory of its results, some hundred kilobytes per token."""


class GraphKey(NamedTuple):
    """Calls with equal keys differ only in position and tokens, so they share a graph."""

    slots: int  # rows of the arena
    capacity: int  # tokens per slot
    start: int  # first slot of the call
    rows: int
    length: int  # tokens per row
    samples: bool  # whether logits are a result
    ragged: bool  # rows may have different lengths
    full_windows: int  # number of sliding windows that are shorter than the rows
    hidden: mx.Dtype | None  # dtype of received hidden states


class CapturedGraph(NamedTuple):
    """A call that can be replayed."""

    replay: Any
    summed: list[Reduction]  # the call's all-reduces


class GraphCache(Graphs):
    """The captured graphs of one model.

    Args:
        ops: the native operations.
        model: an mlx-lm model, its weights in memory.
        mask_dims: dimensions of attention masks, as in `RowView`.
        reducer: all-reduces the layers' results.
        stage: the layers of this pipeline stage; None for all. Received hidden states are an input, like tokens.
    """

    max_tokens = MAX_TOKENS

    def __init__(self, ops: Any, model: Module, mask_dims: int, reducer: Reducer, stage: Stage | None = None) -> None:
        self._ops = ops
        self._model = model
        self._stage = stage
        self._reducer = reducer
        self._mask_dims = mask_dims
        self._seen: Counter[GraphKey] = Counter()
        self._captured: dict[GraphKey, CapturedGraph | None] = {}  # None: refused
        self.captured = 0
        """Calls that were captured or refused."""
        self.replayed = 0
        """Calls that were replayed."""
        self.refusals: list[str] = []
        """The distinct reasons why calls were refused."""

    def call(
        self,
        arena: ArenaBuffers,
        view: RowView,
        tokens: Sequence[Sequence[int]],
        *,
        samples: bool = True,
        hidden: mx.array | None = None,
    ) -> Replayed | None:
        key = self._key(arena, view, samples, hidden)
        if key is None:
            return None
        if key not in self._captured:
            self._seen[key] += 1
            if self._seen[key] < CAPTURE_AFTER and not self._one_token_is_captured(key):
                return None
            self._evict_when_full()
            self.captured += 1
            self._captured[key] = self._capture(arena, key)
            arena.resume(view)
        return self._run(arena, view, key, mx.array([list(row) for row in tokens], dtype=mx.int32), hidden)

    def call_in_flight(self, arena: ArenaBuffers, view: RowView, tokens: mx.array) -> mx.array | None:
        key = self._key(arena, view, True, None)
        if key is None or key not in self._captured:
            return None
        mx.async_eval(ids := tokens.astype(mx.int32))  # type: ignore[no-untyped-call]
        result = self._run(arena, view, key, ids)
        return result.logits if result is not None else None

    def reset(self) -> None:
        """Free the memory of all captured graphs. Calls with the same keys are then captured again at once."""
        self._captured = {key: None for key, graph in self._captured.items() if graph is None}

    def _key(self, arena: ArenaBuffers, view: RowView, samples: bool, hidden: mx.array | None) -> GraphKey | None:
        """The key of a call. None for calls that are never captured: prefill, packed rows, large calls."""
        if view.prefill or view.shortest < MIN_LENGTH or view.slots is not None:
            return None
        full = sum(view.need > window for window in arena.windows) if view.uniform else 0
        rows = view.stop - view.start
        dtype = None if hidden is None else hidden.dtype
        ragged = not view.uniform
        key = GraphKey(arena.rows, arena.capacity, view.start, rows, view.length, samples, ragged, full, dtype)
        return key if key.rows * key.length <= MAX_TOKENS else None

    def _run(
        self, arena: ArenaBuffers, view: RowView, key: GraphKey, tokens: mx.array, hidden: mx.array | None = None
    ) -> Replayed | None:
        """Replay a call. None if it was refused, or if the position is outside the captured range."""
        graph, position = self._captured[key], view.need - view.length
        if graph is None or not graph.replay.low <= position <= graph.replay.high:
            return None
        inputs = [tokens, *view.lengths, *self._reducer.tags()]
        if hidden is not None:
            inputs.append(hidden)
            mx.eval(hidden)  # needed only if it was cast; else this takes 0.25 us
        results = graph.replay.run(inputs, arena.arrays(), position)
        self._reducer.replayed(graph.summed)
        self.replayed += 1
        return Replayed(results.pop() if key.samples else None, results)

    def _one_token_is_captured(self, key: GraphKey) -> bool:
        """Whether the same rows' call with one token each is captured."""
        return any(graph and other.length == 1 and other[:4] == key[:4] for other, graph in self._captured.items())

    def _evict_when_full(self) -> None:
        if len(self._captured) >= MAX_GRAPHS:
            self._captured.clear()
            self._seen.clear()

    def _capture(self, arena: ArenaBuffers, key: GraphKey) -> CapturedGraph | None:
        """Build the call at its lowest and highest position and capture it. None, with the reason noted, if refused."""
        # A position is the number of tokens in a row before the call. Attention reads a full window whole.
        full = [] if key.ragged else [window - key.length for window in arena.windows]
        lowest = max([MIN_LENGTH, *(last + 1 for last in full[: key.full_windows])])
        highest = min([key.capacity - 1 - key.length, *full[key.full_windows :]])
        try:
            if arena.recurrent:
                raise ValueError("it keeps recurrent state")
            if lowest >= highest:
                raise ValueError("there are no two positions to compare")
            if not self._reducer.repeats:
                raise ValueError("its all-reduces are not repeatable")
            (low, summed), (high, _) = (self._build(arena, key, position) for position in (lowest, highest))
            return CapturedGraph(self._ops.Replay(low, high, arena.arrays()), summed)
        except TypeError:  # MLX raises this if the model passes it the traced position
            self._refuse(key, "the model computes with the position")
        except (ValueError, RuntimeError, LookupError, EngineError) as error:
            self._refuse(key, str(error).partition("\n")[0])
        return None

    def _refuse(self, key: GraphKey, why: str) -> None:
        """Note and log a reason, once."""
        if why not in self.refusals:
            self.refusals.append(why)
            log.debug("decoding %d x %d tokens is built anew in each step: %s", key.rows, key.length, why)

    def _build(self, arena: ArenaBuffers, key: GraphKey, position: int) -> tuple[Any, list[Reduction]]:
        """Build the call at a position without computing it. Returns it and its all-reduces; buffers do not change."""
        view = RowView(key.start, [position] * key.rows, key.length, mask_dims=self._mask_dims, ragged=key.ragged)
        if key.ragged:
            view.give(*(self._ops.placeholder([key.rows], mx.int32) for _ in view.lengths))
        traces = view.trace()
        leaves = [leaf for leaf in arena.leaves if isinstance(leaf, RaggedKV)]
        buffers = [(leaf.keys, leaf.values) for leaf in leaves]
        tokens = self._ops.placeholder([key.rows, key.length], mx.int32)
        tags = [self._ops.placeholder([], mx.float32) for _ in self._reducer.tags()]
        inputs = [tokens, *view.lengths, *tags]
        hidden = None
        if self._stage is not None and key.hidden is not None:
            hidden = self._ops.placeholder([key.rows, key.length, self._stage.width], key.hidden)
            inputs.append(hidden)
        try:
            for leaf, (keys, values) in zip(leaves, buffers, strict=True):
                leaf.keys, leaf.values = copy.copy(keys), copy.copy(values)  # the graph writes to these copies
                leaf.open(view)
            with self._reducer.tracing(tags):
                logits = call_model(self._model, self._stage, tokens, list(arena.caches), hidden)
                results = [*self._reducer.finish(), *([logits] if key.samples else [])]
                summed = self._reducer.summed()
            results += arena.arrays()
        finally:
            for leaf, (keys, values) in zip(leaves, buffers, strict=True):
                leaf.close()
                leaf.keys, leaf.values = keys, values
        if any(trace.used for trace in traces):
            raise ValueError("the model computes with the position")
        return self._ops.Call(inputs, results, position), summed
