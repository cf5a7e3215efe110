"""The runner's buffer operations, its limits, and that nothing large is ever copied."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.active_memory import active_memory
from support.families import Weights
from support.models import build, make_config

from phalanx.errors import EngineError
from phalanx.model import registry
from phalanx.model.cache.ragged_cache import RaggedKV
from phalanx.model.runner import Runner
from phalanx.sched.plan import Admit, Evict, Forward, Free, Move, Resize, Restore, Share, Store, Swap

PROMPT = [7, 11, 30, 5, 80, 41, 9, 100, 23, 3, 64, 18]


def make_runner(family: str = "llama", **overrides: object) -> Runner:
    config = make_config(family, **overrides)
    model = build(config, Weights())
    return Runner(model, registry.inspect(model, config), mx.float32)


def feed(
    runner: Runner, start: int, rows: list[list[int]], kv_len: list[int], *, arena: int = 0, sample: bool = True
) -> mx.array:
    """Forward rows of one length; the logits, evaluated."""
    forward = Forward(
        arena=arena,
        start=start,
        seqs=tuple(range(len(rows))),
        tokens=tuple(map(tuple, rows)),
        valid=tuple(map(len, rows)),
        sample=sample,
    )
    logits = runner.forward(forward, kv_len)
    if logits is None:
        return mx.zeros((0,))
    mx.eval(logits, runner.written_caches())
    return logits


def stock(runner: Runner, tokens: list[int]) -> mx.array:
    """mlx-lm's logits after `tokens`, the last one fed alone."""
    caches = make_prompt_cache(runner.model)
    runner.model(mx.array([tokens[:-1]]), cache=caches)
    logits: mx.array = runner.model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
    return logits


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a, b, rtol=1e-4, atol=1e-4).item())


def admitted(runner: Runner, rows: int, capacity: int, arena: int = 0) -> None:
    runner.apply([Resize(arena, rows, capacity), *[Admit(arena, slot, slot) for slot in range(rows)]])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_rows_survive_every_operation(family: str) -> None:
    """A prefix is stored, restored, shared, moved, swapped, grown, sent to another arena, and predicts the same."""
    runner = make_runner(family)
    admitted(runner, 4, 16)
    feed(runner, 0, [PROMPT[:-1]], [0], sample=False)
    n = len(PROMPT) - 1
    runner.apply([Store(0, 0, 1, n), Admit(0, 2, 7), Restore(0, 2, 1, 5)])
    feed(runner, 2, [PROMPT[5:-1]], [5], sample=False)
    runner.apply([Share(0, 2, 0, 3, 7), Free(0, 2), Move(0, 3, 0, 1), Resize(0, 4, 32), Swap(0, 0, 1)])
    feed(runner, 0, [PROMPT[7:-1]], [7], sample=False)
    runner.apply([Resize(1, 1, 64), Move(0, 0, 1, 0), Restore(0, 3, 1, n), Evict(1)])
    expected = stock(runner, PROMPT)
    assert close(feed(runner, 0, [PROMPT[-1:]], [n], arena=1)[0, -1], expected)
    assert close(feed(runner, 3, [PROMPT[-1:]], [n])[0, -1], expected)
    assert close(feed(runner, 1, [PROMPT[-1:]], [n])[0, -1], expected)
    assert runner.prefix_bytes == 0


def test_recurrent_state_moves_with_its_row() -> None:
    """A hybrid: snapshots at their exact length, swaps and growth carry state and keys together."""
    runner = make_runner("qwen3_next")
    admitted(runner, 2, 16)
    n = len(PROMPT) - 1
    feed(runner, 0, [PROMPT[:6]], [0], sample=False)
    runner.apply([Store(0, 0, 1, 6), Restore(0, 1, 1, 6), Swap(0, 0, 1), Resize(0, 3, 32)])
    for slot in (0, 1):
        feed(runner, slot, [PROMPT[6:-1]], [6], sample=False)
    runner.apply([Move(0, 0, 0, 2)])
    expected = stock(runner, PROMPT)
    logits = feed(runner, 1, [PROMPT[-1:]] * 2, [n, n])
    assert close(logits[0, -1], expected)
    assert close(logits[1, -1], expected)


def test_recurrent_rows_refuse_what_they_cannot_do() -> None:
    """Rolling back, skipping, padding, a truncated prefix, an empty row beside another."""
    runner = make_runner("mamba2")
    admitted(runner, 2, 16)
    feed(runner, 0, [PROMPT[:6]], [0], sample=False)
    for kv_len in (5, 7):
        with pytest.raises(EngineError, match="recurrent state is that of 6"):
            feed(runner, 0, [[1]], [kv_len])
    with pytest.raises(EngineError, match="fed alone"):
        feed(runner, 0, [[1], [1]], [6, 0])
    padded = Forward(arena=0, start=0, seqs=(0,), tokens=((1, 0),), valid=(1,), sample=True)
    with pytest.raises(EngineError, match="padded"):
        runner.forward(padded, [6])
    with pytest.raises(EngineError, match="keep slot 0 at 5"):
        runner.apply([Store(0, 0, 1, 5)])
    runner.apply([Store(0, 0, 1, 6)])
    with pytest.raises(EngineError, match="cannot serve 4"):
        runner.apply([Restore(0, 1, 1, 4)])


def test_padding_leaves_other_rows_and_the_end_alone() -> None:
    """Two rows of different length, padded to four tokens: same logits as alone, and nothing beyond the region."""
    runner = make_runner()
    admitted(runner, 3, 24)
    feed(runner, 0, [PROMPT[:-1]], [0], sample=False)
    feed(runner, 1, [PROMPT[:4]], [0], sample=False)
    n = len(PROMPT) - 1
    forward = Forward(
        arena=0, start=0, seqs=(0, 1), tokens=((PROMPT[-1], 0, 0, 0), (PROMPT[4], PROMPT[5], 0, 0)), valid=(1, 2),
        sample=True,
    )  # fmt: skip
    logits = runner.forward(forward, [n, 4])
    assert logits is not None
    assert close(logits[0, 0], stock(runner, PROMPT))
    assert close(logits[1, 1], stock(runner, PROMPT[:6]))
    mx.eval(logits, runner.written_caches())
    for buffer in runner.written_caches():
        assert not mx.any(buffer[0, :, n + 4 :]).item()
        assert not mx.any(buffer[1, :, 8:]).item()
        assert not mx.any(buffer[2]).item()


def test_nan_left_behind_does_not_poison_the_next_row() -> None:
    """A slot is zeroed on admission: 0 x NaN behind a mask is NaN (design: Ragged rows)."""
    runner = make_runner()
    admitted(runner, 2, 16)
    for slot in (0, 1):
        feed(runner, slot, [PROMPT[:-1]], [0], sample=False)
    for leaf in runner._arena(0).leaves:
        assert isinstance(leaf, RaggedKV)
        assert leaf.values is not None
        leaf.values[1:2, :, :11] = mx.array(float("nan"))
    runner.apply([Free(0, 1), Admit(0, 1, 9)])
    feed(runner, 1, [PROMPT[:3]], [0], sample=False)
    logits = feed(runner, 0, [PROMPT[-1:], PROMPT[3:4]], [11, 3])
    assert close(logits[1, -1], stock(runner, PROMPT[:4]))


def test_errors_name_what_is_wrong() -> None:
    """A plan about another state stops the rank instead of corrupting a row."""
    runner = make_runner()
    with pytest.raises(EngineError, match="Arena 0 was never sized"):
        runner.apply([Admit(0, 0, 1)])
    runner.apply([Resize(0, 2, 8), Admit(0, 0, 1)])
    with pytest.raises(EngineError, match="needs 9 tokens per row; the buffers hold 8"):
        feed(runner, 0, [[1, 2]], [7])
    packed = Forward(arena=0, start=0, seqs=(1,), tokens=((1, 2),), valid=(2,), sample=True, packed=True)
    with pytest.raises(EngineError, match="Only the native kernels can pack rows, and this rank has none"):
        runner.forward(packed, [0])
    with pytest.raises(EngineError, match="Slot 1 holds no row"):
        feed(runner, 0, [[1], [1]], [0, 0])
    with pytest.raises(EngineError, match="Slot 2 does not exist"):
        runner.apply([Admit(0, 2, 1)])
    with pytest.raises(EngineError, match="entry 5 does not exist"):
        runner.apply([Restore(0, 0, 5, 1)])
    with pytest.raises(EngineError, match="entry 5 does not exist"):
        runner.apply([Evict(5)])


def test_bytes_are_those_of_the_buffers() -> None:
    """`kv_bytes` is rows x capacity x bytes per token, `prefix_bytes` what entries hold; freeing gives both back."""
    for family in ("llama", "gemma3_text", "deepseek_v3", "qwen3_next"):
        runner = make_runner(family)
        facts = runner.facts
        runner.apply([Resize(0, 3, 40), Resize(1, 1, 100), Admit(0, 0, 1)])
        assert runner.kv_bytes == 220 * facts.bytes_per_token + 4 * facts.bytes_per_row
        feed(runner, 0, [PROMPT], [0], sample=False)
        runner.apply([Store(0, 0, 3, len(PROMPT))])
        assert runner.prefix_bytes == len(PROMPT) * facts.bytes_per_token + facts.bytes_per_row
        runner.apply([Evict(3), Resize(0, 0, 0), Resize(1, 0, 0)])
        assert (runner.kv_bytes, runner.prefix_bytes) == (0, 0)


def test_one_row_models_give_padded_logits_in_place() -> None:
    """Rows computed one after the other: the same interface, zeros where there is padding."""
    runner = make_runner("llama:dynamic")
    assert runner.facts.one_row
    admitted(runner, 2, 16)
    feed(runner, 0, [PROMPT[:-1]], [0], sample=False)
    feed(runner, 1, [PROMPT[:4]], [0], sample=False)
    forward = Forward(arena=0, start=0, seqs=(0, 1), tokens=((18, 0), (80, 41)), valid=(1, 2), sample=True)
    logits = runner.forward(forward, [11, 4])
    assert logits is not None
    assert close(logits[0, 0], stock(runner, PROMPT))
    assert close(logits[1, 1], stock(runner, PROMPT[:6]))
    assert not mx.any(logits[0, 1]).item()


# Nothing is copied ----------------------------------------------------------------------------------------------

BIG = {"num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2}
"""2 layers x (K, V) x 4 heads x 64 x 4 bytes = 4 KiB per token; 4 rows x 16,384 tokens = 268 MB."""


def big_runner(family: str = "llama", **overrides: object) -> Runner:
    runner = make_runner(family, **{**BIG, **overrides})
    admitted(runner, 4, 16384)
    assert runner.kv_bytes >= 200 << 20
    return runner


def extra_bytes(runner: Runner, steps: int, step: object) -> int:
    """Peak memory above what was active before, over some steps."""
    assert callable(step)
    step(0)
    mx.clear_cache()
    before = active_memory()
    mx.reset_peak_memory()
    for i in range(1, steps):
        step(i)
    return int(mx.get_peak_memory() - before)


@pytest.mark.parametrize("family", ["llama", "llama:dynamic"])
def test_forwards_write_in_place(family: str) -> None:
    """All rows, one row among others, and two forwards whose results are evaluated together: no copy of 268 MB."""
    runner = big_runner(family)

    def decode(i: int) -> None:
        feed(runner, 0, [[1, 2]] * 4, [10 + i, 20 + i, 5, 30])

    def one_slot(i: int) -> None:
        feed(runner, 3, [[1, 2, 3]], [40 + 3 * i], sample=False)

    def both(i: int) -> None:
        forward = Forward(arena=0, start=0, seqs=(0, 1), tokens=((1,), (2,)), valid=(1, 1), sample=True)
        logits = runner.forward(forward, [50 + i, 60 + i])
        feed(runner, 2, [[4, 5]], [70 + 2 * i], sample=False)
        mx.eval(logits, runner.written_caches())

    def two_samples(i: int) -> None:
        outputs = [
            runner.forward(Forward(0, start, (0, 1), ((1,), (2,)), (1, 1), sample=True), [80 + i, 90 + i])
            for start in (0, 2)
        ]
        mx.eval(outputs, runner.written_caches())

    for step in (decode, one_slot, both, two_samples):
        assert extra_bytes(runner, 4, step) < 16 << 20, step.__name__


def test_recurrent_state_is_written_in_place() -> None:
    """State of 4 rows of 25 MB: decoding three of them holds the new state beside the old, and no copy of the rest."""
    runner = make_runner("mamba2", hidden_size=256, intermediate_size=512, num_heads=32, head_dim=64, n_groups=1,
                         state_size=1024, ssm_state_size=1024)  # fmt: skip
    admitted(runner, 16, 16)
    row = runner.facts.bytes_per_row
    assert runner.kv_bytes == 16 * row >= 200 << 20
    for slot in range(3):
        feed(runner, slot, [PROMPT[:3]], [0], sample=False)
    assert extra_bytes(runner, 4, lambda i: feed(runner, 0, [[5], [6], [7]], [3 + i] * 3)) < 16 * row // 2


def test_slot_operations_copy_rows_not_buffers() -> None:
    """Admit, swap, move, share, store and restore of short rows: a little above the rows themselves."""
    runner = big_runner()
    for slot in range(4):
        feed(runner, slot, [PROMPT], [0], sample=False)

    def operate(i: int) -> None:
        ops = [Swap(0, 0, 1), Store(0, 2, i, 12), Free(0, 3), Move(0, 2, 0, 3), Admit(0, 2, 9), Restore(0, 2, i, 7)]
        runner.apply([*ops, Share(0, 0, 0, 2, 5)])

    assert extra_bytes(runner, 4, operate) < 4 << 20


def test_entries_own_their_memory() -> None:
    """A stored prefix does not pin the buffers it came from, not even where a slice of them is contiguous (MLA)."""
    runner = make_runner("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=1)
    admitted(runner, 2, 8192)
    feed(runner, 0, [PROMPT], [0], sample=False)
    runner.apply([Store(0, 0, 1, 12)])
    held = runner.kv_bytes
    before = active_memory()
    runner.apply([Resize(0, 0, 0)])
    assert before - mx.get_active_memory() >= held * 0.99


def test_growth_holds_one_layer_twice_at_most() -> None:
    """Old and new buffers of one layer, not of all (design: Ragged rows)."""
    runner = make_runner("llama", **{**BIG, "num_hidden_layers": 8})
    admitted(runner, 4, 1024)
    feed(runner, 0, [PROMPT], [0], sample=False)
    before = active_memory()
    old = runner.kv_bytes
    mx.reset_peak_memory()
    runner.apply([Resize(0, 4, 2048)])
    grown = runner.kv_bytes - old
    assert grown == old
    assert mx.get_peak_memory() - before <= grown + old // 8 + (4 << 20)


def test_a_snapshot_of_facts_is_immutable(tmp_path: Path) -> None:
    """The engine may keep facts: nobody changes them behind its back."""
    facts = make_runner().facts
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.supports_rollback = False  # type: ignore[misc]


def test_a_rank_that_only_obeys_computes_no_logits() -> None:
    """Its caches are written all the same, prompts and tokens."""
    obeying, sampling = make_runner(), make_runner()
    obeying.samples = False
    for runner in (obeying, sampling):
        admitted(runner, 1, 32)
        feed(runner, 0, [PROMPT], [0], sample=False)
    forward = Forward(arena=0, start=0, seqs=(0,), tokens=((5,),), valid=(1,), sample=True)
    assert obeying.forward(forward, [len(PROMPT)]) is None
    feed(sampling, 0, [[5]], [len(PROMPT)])
    for mine, theirs in zip(obeying._arenas[0].arrays(), sampling._arenas[0].arrays(), strict=True):
        assert mx.array_equal(mine, theirs)
