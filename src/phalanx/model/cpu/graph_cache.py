"""The graph cache: a decode call is built twice, captured, and from then on replayed.

Building a step's graph takes Python, and ordering it takes MLX, up to half of the time of a small model's token; both
take it from the processors that compute. The native kernels can keep a call and run it again with other tokens at
other positions (`native/ext/replay.h`): the same operations, so the same bits.

That a call is the same at every position is not assumed. The cache builds it at the lowest and at the highest position,
with placeholders for tokens and with a position that notices whether the model computes with it. Where the two graphs
differ in a way that is not understood, the cache refuses, and the runner builds that call in every step: recurrent
state, attention by hand. Rows of different lengths pass their lengths as arrays, which are inputs like tokens
(`model/cache/ragged.py`, `kernels/ragged.py`). Full and partial sliding windows are captured separately.
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
from phalanx.model.cache.ragged import RaggedKV, RowView
from phalanx.model.graphs import Graphs, Replayed

log = logging.getLogger("phalanx.model")

MAX_TOKENS = 32
"""Largest call that is captured, in rows x tokens per row: building a larger one is a small part of its time."""
MIN_LENGTH = 1
"""Tokens in a row's cache before a captured call: a row without any is at the start of its prompt."""
CAPTURE_AFTER = 6
"""Calls with one token per row before they are captured, which takes as long as building two. Once those are captured,
calls of the same rows with drafts are captured at once: the cost of drafts must not include the cost of building."""
MAX_GRAPHS = 16
"""Each keeps the memory of its results, some hundred kilobytes per token."""


class GraphKey(NamedTuple):
    """Calls with equal keys differ in position and tokens only, so that they share a graph."""

    slots: int
    capacity: int
    start: int
    rows: int
    length: int
    samples: bool
    ragged: bool  # rows may have different lengths
    full_windows: int  # sliding windows that are smaller than the rows


class CapturedGraph(NamedTuple):
    """A call that can be replayed."""

    replay: Any
    summed: list[Reduction]  # over ranks


class GraphCache(Graphs):
    """The captured graphs of one model.

    Args:
        ops: the native operations.
        model: an mlx-lm model, its weights in memory.
        mask_dims: as in `RowView`.
        reducer: sums the layers' results over ranks.
    """

    max_tokens = MAX_TOKENS

    def __init__(self, ops: Any, model: Module, mask_dims: int, reducer: Reducer) -> None:
        self._ops = ops
        self._model = model
        self._reducer = reducer
        self._mask_dims = mask_dims
        self._seen: Counter[GraphKey] = Counter()
        self._captured: dict[GraphKey, CapturedGraph | None] = {}  # None: refused
        self.captured = 0
        self.replayed = 0
        """Calls that were replayed."""
        self.refusals: list[str] = []
        """Why calls are built in every step; each reason once."""

    def call(
        self, arena: ArenaBuffers, view: RowView, tokens: Sequence[Sequence[int]], *, samples: bool = True
    ) -> Replayed | None:
        key = self._key(arena, view, samples)
        if key is None:
            return None
        if key not in self._captured:
            self._seen[key] += 1
            if self._seen[key] < CAPTURE_AFTER and not self._one_token_is_captured(key):
                return None
            self._make_room()
            self.captured += 1
            self._captured[key] = self._capture(arena, key)
            arena.resume(view)
        return self._run(arena, view, key, mx.array([list(row) for row in tokens], dtype=mx.int32))

    def call_in_flight(self, arena: ArenaBuffers, view: RowView, tokens: mx.array) -> mx.array | None:
        key = self._key(arena, view, True)
        if key is None or key not in self._captured:
            return None
        mx.async_eval(ids := tokens.astype(mx.int32))  # type: ignore[no-untyped-call]
        result = self._run(arena, view, key, ids)
        return result.logits if result is not None else None

    def reset(self) -> None:
        """Free the memory of all captured graphs. A call that comes again is captured again at once."""
        self._captured = {key: None for key, graph in self._captured.items() if graph is None}

    def _key(self, arena: ArenaBuffers, view: RowView, samples: bool) -> GraphKey | None:
        """None for calls that are never captured: prompts, packed rows, large calls."""
        if view.prefill or view.shortest < MIN_LENGTH or view.slots is not None:
            return None
        full = sum(view.need > window for window in arena.windows) if view.uniform else 0
        rows = view.stop - view.start
        key = GraphKey(arena.rows, arena.capacity, view.start, rows, view.length, samples, not view.uniform, full)
        return key if key.rows * key.length <= MAX_TOKENS else None

    def _run(self, arena: ArenaBuffers, view: RowView, key: GraphKey, tokens: mx.array) -> Replayed | None:
        graph, position = self._captured[key], view.need - view.length
        if graph is None or not graph.replay.low <= position <= graph.replay.high:
            return None
        results = graph.replay.run([tokens, *view.lengths, *self._reducer.tags()], arena.arrays(), position)
        self._reducer.replayed(graph.summed)
        self.replayed += 1
        return Replayed(results.pop() if key.samples else None, results)

    def _one_token_is_captured(self, key: GraphKey) -> bool:
        """Whether the call with one token for each of these rows is captured, with equal or with different lengths."""
        return any(graph and other.length == 1 and other[:4] == key[:4] for other, graph in self._captured.items())

    def _make_room(self) -> None:
        if len(self._captured) >= MAX_GRAPHS:
            self._captured.clear()
            self._seen.clear()

    def _capture(self, arena: ArenaBuffers, key: GraphKey) -> CapturedGraph | None:
        """Build the call at its lowest and highest position and compare; None, with the reason noted, if refused."""
        # Positions count the tokens of a row before the call. A full window is read whole, a partial one in part.
        full = [] if key.ragged else [window - key.length for window in arena.windows]
        lowest = max([MIN_LENGTH, *(last + 1 for last in full[: key.full_windows])])
        highest = min([key.capacity - 1 - key.length, *full[key.full_windows :]])
        try:
            if arena.recurrent:
                raise ValueError("it keeps recurrent state")
            if lowest >= highest:
                raise ValueError("there are no two positions to compare")
            if not self._reducer.repeats:
                raise ValueError("its sums over ranks are not alike")
            (low, summed), (high, _) = (self._build(arena, key, position) for position in (lowest, highest))
            return CapturedGraph(self._ops.Replay(low, high, arena.arrays()), summed)
        except TypeError:  # MLX raises this where it is given a position that is traced
            self._refuse(key, "the model computes with the position")
        except (ValueError, RuntimeError, LookupError, EngineError) as error:
            self._refuse(key, str(error).partition("\n")[0])
        return None

    def _refuse(self, key: GraphKey, why: str) -> None:
        if why not in self.refusals:
            self.refusals.append(why)
            log.debug("decoding %d x %d tokens is built anew in each step: %s", key.rows, key.length, why)

    def _build(self, arena: ArenaBuffers, key: GraphKey, position: int) -> tuple[Any, list[Reduction]]:
        """The call at a position, not computed, and its sums over ranks; the buffers stay as they are."""
        view = RowView(key.start, [position] * key.rows, key.length, mask_dims=self._mask_dims, ragged=key.ragged)
        if key.ragged:
            view.give(*(self._ops.placeholder([key.rows], mx.int32) for _ in view.lengths))
        traces = view.trace()
        leaves = [leaf for leaf in arena.leaves if isinstance(leaf, RaggedKV)]
        buffers = [(leaf.keys, leaf.values) for leaf in leaves]
        tokens = self._ops.placeholder([key.rows, key.length], mx.int32)
        tags = [self._ops.placeholder([], mx.float32) for _ in self._reducer.tags()]
        try:
            for leaf, (keys, values) in zip(leaves, buffers, strict=True):
                leaf.keys, leaf.values = copy.copy(keys), copy.copy(values)  # the graph writes these, not the buffers
                leaf.open(view)
            with self._reducer.tracing(tags):
                logits = self._model(tokens, cache=list(arena.caches))
                results = [*self._reducer.finish(), *([logits] if key.samples else [])]
                summed = self._reducer.summed()
            results += arena.arrays()
        finally:
            for leaf, (keys, values) in zip(leaves, buffers, strict=True):
                leaf.keys, leaf.values = keys, values
        if any(trace.used for trace in traces):
            raise ValueError("the model computes with the position")
        return self._ops.Call([tokens, *view.lengths, *tags], results, position), summed
