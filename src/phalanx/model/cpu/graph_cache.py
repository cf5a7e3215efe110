"""Decoding steps replayed: a model call that comes again and again is built twice and then never again.

Building a step's graph takes Python, and finding its order takes MLX, up to half of the time of a small model's token;
and they take it from the processors that compute. The native kernels can keep a call instead and do it again for other
tokens at other positions (`native/ext/replay.h`), with the same operations, so the same bits.

That a call is the same at every position is not assumed: it is built at the lowest and at the highest one, for tokens
that are not known and with a position that notices whether the model computes with it. What differs and is not
understood is refused, and that call goes on being built each time: recurrent state, attention by hand. Rows of
different lengths say theirs in arrays, which are inputs like tokens (`cache.py`, `kernels/ragged.py`). A window that is
full is another call than one that is not.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from phalanx.dist.reduce import Reducer, Summed
from phalanx.errors import EngineError
from phalanx.kernels import install
from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.ragged import RaggedKV, RowView
from phalanx.sched.forwards import REPLAYED

log = logging.getLogger("phalanx.model")

LOWEST = 1
"""A row without tokens is a prompt's."""
WORTH = 6
"""Calls with one token per row before they are kept, which takes as long as building two. With more tokens they are
kept from the first one on, once those are: what drafts cost must not look like what building costs."""
MOST_KINDS = 16
"""Each keeps the memory of its results, some hundred kilobytes a token."""


class GraphKey(NamedTuple):
    """What must be alike for a call to be the same but for its position and tokens."""

    slots: int
    capacity: int
    start: int
    rows: int
    length: int
    samples: bool
    ragged: bool  # rows may have different lengths
    filled: int  # windows that are smaller than the rows


class CapturedGraph(NamedTuple):
    """A call to be replayed."""

    replay: Any
    summed: list[Summed]  # over ranks


class Answer(NamedTuple):
    """What a replayed call gave, not evaluated."""

    logits: mx.array | None  # None: not asked for
    sums: list[mx.array]  # as from `Reducer.finish`


class GraphCache:
    """The calls of one model that are replayed.

    Args:
        model: an mlx-lm model, its weights in memory.
        mask_dims: as of `RowView`.
        reducer: what its layers sum over ranks with.
    """

    def __init__(self, model: Module, mask_dims: int, reducer: Reducer) -> None:
        self._model = model
        self._reducer = reducer
        self._mask_dims = mask_dims
        self._seen: Counter[GraphKey] = Counter()
        self._captured: dict[GraphKey, CapturedGraph | None] = {}  # None: refused
        self.done = 0
        """Calls that were replayed."""
        self.tried = 0
        """Calls that were built in order to be kept."""
        self.refusals: list[str] = []
        """Why calls are built each time; each reason once."""

    def call(
        self, arena: ArenaBuffers, view: RowView, tokens: Sequence[Sequence[int]], *, samples: bool = True
    ) -> Answer | None:
        """What the model would give for an opened arena, its caches written; None where it has to be called.

        Args:
            samples: whether logits are asked for.
        """
        ops = install.operations()
        if ops is None or (key := self._key(arena, view, samples)) is None:
            return None
        if key not in self._captured:
            self._seen[key] += 1
            if self._seen[key] < WORTH and not self._one_token_is_captured(key):
                return None
            self._make_room()
            self.tried += 1
            self._captured[key] = self._capture(ops, arena, key)
            arena.resume(view)
        return self._run(arena, view, key, mx.array([list(row) for row in tokens], dtype=mx.int32))

    def call_in_flight(self, arena: ArenaBuffers, view: RowView, tokens: mx.array) -> mx.array | None:
        """Logits [rows, L, V] for tokens [rows, L] that are still being computed; None where that is not kept."""
        key = self._key(arena, view, True)
        if key is None or key not in self._captured:
            return None
        mx.async_eval(ids := tokens.astype(mx.int32))  # type: ignore[no-untyped-call]
        answer = self._run(arena, view, key, ids)
        return answer.logits if answer is not None else None

    def _key(self, arena: ArenaBuffers, view: RowView, samples: bool) -> GraphKey | None:
        if view.prefill or view.shortest < LOWEST or view.slots is not None:
            return None
        filled = sum(view.need > window for window in arena.windows) if view.uniform else 0
        rows = view.stop - view.start
        key = GraphKey(arena.rows, arena.capacity, view.start, rows, view.length, samples, not view.uniform, filled)
        return key if key.rows * key.length <= REPLAYED else None

    def _run(self, arena: ArenaBuffers, view: RowView, key: GraphKey, tokens: mx.array) -> Answer | None:
        kept, position = self._captured[key], view.need - view.length
        if kept is None or not kept.replay.low <= position <= kept.replay.high:
            return None
        results = kept.replay.run([tokens, *view.lengths, *self._reducer.tags()], arena.arrays(), position)
        self._reducer.replayed(kept.summed)
        self.done += 1
        return Answer(results.pop() if key.samples else None, results)

    def rest(self) -> None:
        """Keep no calls and so no memory, but know which are worth it: they are kept again when they come again."""
        self._captured = {key: None for key, kept in self._captured.items() if kept is None}

    def _one_token_is_captured(self, key: GraphKey) -> bool:
        """Whether these rows are replayed with one token each, however they say their lengths."""
        return any(kept and other.length == 1 and other[:4] == key[:4] for other, kept in self._captured.items())

    def _make_room(self) -> None:
        if len(self._captured) >= MOST_KINDS:
            self._captured.clear()
            self._seen.clear()

    def _capture(self, ops: Any, arena: ArenaBuffers, key: GraphKey) -> CapturedGraph | None:
        # Tokens of a row before the call. Of a full buffer no part is read, but all.
        full = [] if key.ragged else [window - key.length for window in arena.windows]
        lowest = max([LOWEST, *(last + 1 for last in full[: key.filled])])
        highest = min([key.capacity - 1 - key.length, *full[key.filled :]])
        try:
            if arena.recurrent:
                raise ValueError("it keeps recurrent state")
            if lowest >= highest:
                raise ValueError("there are no two positions to compare")
            if not self._reducer.repeats:
                raise ValueError("its sums over ranks are not alike")
            (low, summed), (high, _) = (self._built(ops, arena, key, position) for position in (lowest, highest))
            return CapturedGraph(ops.Replay(low, high, arena.arrays()), summed)
        except TypeError:  # what MLX says to a position that is traced
            self._refuse(key, "the model computes with the position")
        except (ValueError, RuntimeError, LookupError, EngineError) as error:
            self._refuse(key, str(error).partition("\n")[0])
        return None

    def _refuse(self, key: GraphKey, why: str) -> None:
        if why not in self.refusals:
            self.refusals.append(why)
            log.debug("decoding %d x %d tokens is built anew in each step: %s", key.rows, key.length, why)

    def _built(self, ops: Any, arena: ArenaBuffers, key: GraphKey, position: int) -> tuple[Any, list[Summed]]:
        """The call at a position, not computed, and its sums over ranks; the buffers stay as they are."""
        view = RowView(key.start, [position] * key.rows, key.length, mask_dims=self._mask_dims, ragged=key.ragged)
        if key.ragged:
            view.give(*(ops.placeholder([key.rows], mx.int32) for _ in view.lengths))
        traces = view.trace()
        leaves = [leaf for leaf in arena.leaves if isinstance(leaf, RaggedKV)]
        buffers = [(leaf.keys, leaf.values) for leaf in leaves]
        tokens = ops.placeholder([key.rows, key.length], mx.int32)
        tags = [ops.placeholder([], mx.float32) for _ in self._reducer.tags()]
        try:
            for leaf, (keys, values) in zip(leaves, buffers, strict=True):
                leaf.keys, leaf.values = copy.copy(keys), copy.copy(values)  # to be written by the graph, not by us
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
        return ops.Call([tokens, *view.lengths, *tags], results, position), summed
