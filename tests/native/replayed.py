"""Decodes with replayed calls and with calls that are built each time; prints in what they differ, as JSON.

python tests/native/replayed.py FAMILY[+WINDOW][/BITS][@DTYPE] ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import quantize_model
from support.families import WEIGHTS, Weights
from support.models import build, make_config

from phalanx.kernels import install
from phalanx.model import registry
from phalanx.model.cpu.repack import repackable
from phalanx.model.graph_cache import GraphCache
from phalanx.model.graphs import Graphs
from phalanx.model.mla import absorb_short_queries
from phalanx.model.runner import Runner
from phalanx.sched.plan import Admit, Forward, Resize, RowOp

PROMPT = (7, 11, 30, 5, 80, 41, 9, 100, 23)


def repack(model: Any) -> None:
    """As they are when they have been loaded."""
    parameters = dict(tree_flatten(model.parameters()))
    mx.eval(parameters)
    names = repackable(model, lambda name: False)
    model.update(tree_unflatten([(name, install.repack(parameters[name])) for name in names]))


class Twins:
    """Two runners over one model, of which one replays; everything is done with both."""

    def __init__(self, name: str) -> None:
        name, _, dtype_name = name.partition("@")
        dtype: mx.Dtype = getattr(mx, dtype_name or "float32")
        name, _, bits = name.partition("/")
        family, _, window = name.partition("+")
        config = make_config(family, **({"sliding_window": int(window)} if window else {}))
        model = build(config, WEIGHTS.get(family, Weights()), dtype)
        if bits:
            model, config = quantize_model(model, config, group_size=32, bits=int(bits))
            repack(model)
        absorb_short_queries(model)
        facts = registry.inspect(model, config)
        self.recurrent = facts.recurrent
        self.replaying, self.plain = Runner(model, facts, dtype), Runner(model, facts, dtype)
        self.plain._graphs = Graphs()
        self.wrong: list[str] = []

    def apply(self, *ops: RowOp) -> None:
        for runner in (self.replaying, self.plain):
            runner.apply(ops)

    def feed(self, start: int, rows: list[tuple[int, ...]], kv_len: list[int], *, sample: bool = True) -> list[int]:
        """The greedy token behind each row."""
        valid = tuple(len(row) for row in rows)
        forward = Forward(0, start, tuple(range(len(rows))), tuple(rows), valid, sample)
        found = [self._logits(runner, forward, kv_len) for runner in (self.replaying, self.plain)]
        if not np.array_equal(found[0], found[1], equal_nan=True):
            self.wrong.append(f"logits of {len(rows)} x {valid[0]} at {kv_len}")
        return [int(row[-1].argmax()) if sample else 0 for row in found[1]]

    def _logits(self, runner: Runner, forward: Forward, kv_len: list[int]) -> Any:
        logits = runner.forward(forward, kv_len)
        if logits is None:
            return np.zeros((len(kv_len), 1))
        mx.eval(logits, runner.written_caches())
        return np.array(logits.astype(mx.float32))

    def compare_buffers(self) -> None:
        arenas = zip(self.replaying._arenas[0].arrays(), self.plain._arenas[0].arrays(), strict=True)
        if not all(mx.array_equal(a, b, equal_nan=True) for a, b in arenas):
            self.wrong.append("keys or values")


def decode(twins: Twins) -> None:
    """Rows alone and together, one token and several, back to where a row was, and in longer buffers."""
    twins.apply(Resize(0, 2, 40), Admit(0, 0, 0), Admit(0, 1, 1))
    for row in range(2):
        twins.feed(row, [PROMPT[row:]], [0], sample=False)
    at = len(PROMPT)
    (token,) = twins.feed(0, [(3,)], [at])
    for n in range(1, 20):
        (token,) = twins.feed(0, [(token,)], [at + n])
    twins.compare_buffers()
    if twins.recurrent:
        return
    for n in range(10):  # from the beginning again, three tokens at once
        twins.feed(0, [(token, n + 5, 60)], [at + 2 * n])
    tokens = [5, 6]
    for n in range(10):
        tokens = twins.feed(0, [(token,) for token in tokens], [at + n, at + n])
    twins.apply(Resize(0, 2, 72))
    for n in range(60):  # up to the last place
        (token,) = twins.feed(1, [(token,)], [12 + n])
    for n in range(10):  # rows of two lengths, one of them going back
        tokens = twins.feed(0, [(token,) for token in tokens], [at + 10 + n, 20 + n])
    for n in range(10):
        twins.feed(0, [(token, n, 7) for token in tokens], [at + 10 - n, 30 + 2 * n])
    twins.compare_buffers()


def rest(twins: Twins) -> tuple[int, int]:
    """After a rest: of ten calls that had been kept those that are replayed; bytes more than before, though calls of
    another kind were kept in between."""

    def active(width: int) -> int:
        for n in range(10):
            twins.feed(1, [(n,) * width], [12 + n])
        for runner in (twins.replaying, twins.plain):
            runner.reset()
        return mx.get_active_memory()

    before, done = active(1), twins.replaying._graphs.replayed
    active(4)
    more = active(1) - before
    return twins.replaying._graphs.replayed - done, more


def ahead(twins: Twins) -> tuple[int, int]:
    """Forwards that one runner hands over before their turn: of those that come, of those that are forgotten."""
    runner = twins.replaying
    came = forgotten = 0

    def step(tokens: list[int], kv_len: list[int], *, right: bool = True) -> list[int]:
        nonlocal came, forgotten
        before, handed = runner._graphs.replayed, runner.has_in_flight
        drawn = twins.feed(0, [(token,) for token in tokens], kv_len)
        came += handed and runner._graphs.replayed == before
        forgotten += handed and runner._graphs.replayed != before
        runner.dispatch_next(mx.array(drawn if right else [token + 1 for token in drawn], dtype=mx.uint32))
        return drawn

    twins.apply(Resize(0, 2, 40), Admit(0, 0, 2), Admit(0, 1, 3))
    for row in range(2):
        twins.feed(row, [PROMPT[row:]], [0], sample=False)
    at = len(PROMPT)
    tokens = [5]
    for n in range(12):
        tokens = step(tokens, [at + n])
    for n in range(4):  # another token than expected, or a step back
        tokens = step(tokens, [at + 12 + n], right=n % 2 == 0)
    tokens = step(tokens, [at + 3])
    for n in range(12):
        tokens = step([*tokens, 8][:2], [at + 4 + n, at - 1 + n])
    twins.apply(Resize(0, 2, 48))
    for n in range(23):  # to the last place, in other buffers
        tokens = step(tokens, [at + 16 + n, at + 11 + n])
    assert not runner.has_in_flight
    twins.compare_buffers()
    runner.reset()
    return came, forgotten


def main() -> None:
    mx.disable_compile()  # as the engine does
    assert install.install("exact", 2) is not None
    found = {}
    for name in sys.argv[1:]:
        twins = Twins(name)
        decode(twins)
        replays = twins.replaying._graphs
        assert isinstance(replays, GraphCache)
        replayed = replays.replayed
        handed = sorted({op for kept in replays._captured.values() if kept for op in kept.replay.handed})
        again, more = (0, 0) if twins.recurrent else rest(twins)
        came, forgotten = (0, 0) if twins.recurrent else ahead(twins)
        found[name] = {
            "replayed": replayed, "again": again, "more": more, "handed": handed, "refusals": replays.refusals,
            "wrong": twins.wrong, "came": came, "forgotten": forgotten,
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
