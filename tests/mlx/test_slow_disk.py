"""A disk as slow as the test likes, with a stream beside it: no step waits for it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models import make_model
from support.speculation import Engine, load

from phalanx.kernels import install
from phalanx.model import runner as runner_module
from phalanx.model.cache.buffers import ArenaBuffers, Snapshot
from phalanx.model.cache.layer_layout import Heads, KvLayout
from phalanx.model.disk_blocks import BlockLayout, DiskBlocks
from phalanx.prefix_store import store as store_module
from phalanx.prefix_store.store import PrefixStore
from phalanx.sched import disk_prefixes
from phalanx.sched.disk_index import DiskIndex
from phalanx.sched.plan import DiskBlock, DiskOutcome, DropBlocks, Evict, WriteBlocks
from phalanx.types import Sampling, SequenceRequest, StopRule, Submit


class SlowDisk:
    """Each call waits until the test lets one pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        for owner, name in ((store_module, "_write_at"), (os, "preadv")):
            monkeypatch.setattr(owner, name, self._slow(getattr(owner, name)))

    def _slow(self, call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            self.begun.release()
            assert self.allowed.acquire(timeout=120)
            return call(*args)

        return wrapped

    def wait_for_call(self) -> None:
        """Until one more call has begun."""
        assert self.begun.acquire(timeout=120)

    def wait_for(self, outcomes: list[DiskOutcome]) -> list[DiskOutcome]:
        """Until there is an outcome."""
        for _ in range(2400):
            if outcomes:
                return outcomes
            time.sleep(0.05)
        raise AssertionError("no outcome")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Engine, list[DiskOutcome]]]:
    runner, vocab = load(make_model("llama", tmp_path / "llama"))
    engine = Engine(runner, vocab)
    outcomes: list[DiskOutcome] = []
    layout = BlockLayout(runner.facts.layouts)
    store = PrefixStore(tmp_path / "cache", "model", layout.sizes)
    runner.disk = DiskBlocks(store, layout, 0, 1 << 24, outcomes.append)
    engine.scheduler.disk.open(DiskIndex(b"secret", 100), 1)
    yield engine, outcomes
    runner.disk.close()


def submit(engine: Engine, name: str, prompt: list[int], n: int) -> None:
    request = SequenceRequest(
        id=name, group=name, prompt=prompt, sampling=Sampling(temperature=0.0), stop=StopRule(max_tokens=n)
    )
    engine.take(Submit(request))


def test_streams_get_their_tokens_while_blocks_are_written_and_read(
    made: tuple[Engine, list[DiskOutcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, outcomes = made
    monkeypatch.setattr(disk_prefixes, "MIN_PATIENCE_S", 600.0)
    prompt, answers, disk = [7 * i % 400 + 5 for i in range(600)], engine.post.answers, SlowDisk(monkeypatch)

    def tokens_of(n: int) -> int:
        """What the stream beside the disk gets in `n` steps."""
        before = len(answers["stream"].tokens)
        for _ in range(n):
            engine.step()
        return len(answers["stream"].tokens) - before

    def finish(name: str) -> list[int]:
        while name not in answers or answers[name].finished is None:
            engine.step()
        return answers[name].tokens

    def let_pass(calls: int) -> DiskOutcome:
        for _ in range(calls):
            disk.allowed.release()
        (outcome,) = disk.wait_for(outcomes)
        engine.scheduler.disk.take(outcomes.pop())
        return outcome

    submit(engine, "stream", [5, 6, 7], 900)
    submit(engine, "first", prompt, 4)
    first = finish("first")
    engine.step()
    disk.wait_for_call()
    assert tokens_of(40) == 40 and not outcomes, "the first block is still being written"
    assert let_pass(3).bad is None, "two blocks, and the index"
    assert len(engine.scheduler.disk.index) == 2
    engine.scheduler.layout.ops.extend(Evict(entry) for entry in engine.scheduler.prefix.clear())
    for _ in range(2):
        disk.wait_for_call()
    submit(engine, "again", prompt, 4)
    engine.step()
    disk.wait_for_call()
    assert tokens_of(40) == 40 and not outcomes and "again" not in answers, "it waits for its first block"
    assert engine.scheduler.disk.held
    assert let_pass(2).bad is None
    disk.allowed.release(100)  # what is noted of the use
    assert finish("again") == first
    finished = answers["again"].finished
    assert finished is not None and finished.disk_tokens == 512


def test_blocks_that_are_dropped_are_written_before_and_no_others(
    made: tuple[Engine, list[DiskOutcome]], tmp_path: Path
) -> None:
    """A write that came after would keep them. A full disk drops some with every write."""
    kernels = pytest.importorskip("phalanx_cpu")
    heads = Heads(2, 64, mx.float32)
    layouts = [KvLayout(heads, heads, None)] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "operations", lambda: kernels.ops)
        arena = ArenaBuffers(layouts)
        arena.resize(2, 512)
        for slot in range(2):
            arena.admit(slot)
        entries = {number: arena.save(number, 256) for number in range(2)}
        outcomes: list[DiskOutcome] = []
        layout = BlockLayout(layouts)
        store = PrefixStore(tmp_path / "drops", "model", layout.sizes)
        disk = DiskBlocks(store, layout, 0, 1 << 24, outcomes.append)
        for number, name in enumerate((b"a" * 16, b"b" * 16)):
            block = DiskBlock(name, b"", bytes(4 * 256), b"owner")
            disk.apply(WriteBlocks(number, 0, (block,)), entries, lambda _: arena)
        disk.begin_writes()
        assert [len(entry.copied) for entry in entries.values()] == [0, 0]
        disk.apply(DropBlocks((b"b" * 16,)), entries, lambda _: arena)
        assert [len(entry.copied) for entry in entries.values()] == [0, 2]
        disk.close()
    assert [block.name for block in store.blocks] == [b"a" * 16]


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside a stream", "alone"])
def test_no_stream_waits_until_a_prefix_is_copied_to_be_written(
    is_beside: bool, made: tuple[Engine, list[DiskOutcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, it is written before the engine sleeps, which would run no further step."""
    engine, outcomes = made
    kernels = pytest.importorskip("phalanx_cpu")
    monkeypatch.setattr(install, "operations", lambda: kernels.ops)  # rows in pages: their prefixes are copied later
    monkeypatch.setattr(runner_module, "SAVED_PER_STEP", 1)  # a layer per step
    original, missing = ArenaBuffers.copy_saved, []

    def copy_saved(arena: ArenaBuffers, max_bytes: float = math.inf, *, only: Snapshot | None = None) -> None:
        if only is not None:
            missing.append(len(arena.leaves) - len(only.copied))  # layers that are copied in one step
        original(arena, max_bytes, only=only)

    monkeypatch.setattr(ArenaBuffers, "copy_saved", copy_saved)
    if is_beside:
        submit(engine, "stream", [5, 6, 7], 900)
    submit(engine, "first", [7 * i % 400 + 5 for i in range(600)], 4)
    while not engine.scheduler.idle and not missing:
        engine.step()
    for _ in range(2400):
        if outcomes:
            break
        time.sleep(0.05)
    assert outcomes.pop().bad is None and missing == [0]
