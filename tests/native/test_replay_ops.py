"""Calls that are kept and done again (`native/ext/replay.h`): the same bits at every position, or a refusal."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import phalanx_cpu  # before mlx.core

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from regions import address_space, region_of
from support.active_memory import active_memory

ops = phalanx_cpu.ops
CAPACITY, LENGTH, DIM = 24, 2, 8
LOW, HIGH = 1, CAPACITY - LENGTH - 1
WEIGHTS = mx.random.normal((DIM, DIM), key=mx.random.key(1))
mx.eval(WEIGHTS)

Twist = Callable[[mx.array, mx.array, int], mx.array]
"""Result, keys read, position -> another result."""


def model(tokens: mx.array, keys: mx.array, at: int, twist: Twist = lambda y, seen, at: y) -> list[mx.array]:
    """One layer of attention over what it writes into `keys`, and those."""
    x = tokens.astype(mx.float32)[:, None, :, None] * WEIGHTS[0]
    x = ops.rope(x, DIM, traditional=False, base=100.0, scale=1.0, offset=at)
    keys = ops.write_rows(keys, x, at, 0)
    seen = keys[:, :, : at + LENGTH]
    y = ops.attention(x, seen, seen, scale=0.5, mask="causal") @ WEIGHTS.T
    return [twist(ops.silu(y + x), seen, at), keys]


def buffer() -> mx.array:
    return region_of(mx.random.normal((1, 1, CAPACITY, DIM), key=mx.random.key(2)))


def captured(keys: mx.array, build: Callable[..., list[mx.array]] = model, **arguments: Any) -> Any:
    def call(at: int) -> Any:
        tokens = ops.placeholder([1, LENGTH], mx.int32)
        return ops.Call([tokens], build(tokens, copy.copy(keys), at, **arguments), at)

    return ops.Replay(call(LOW), call(HIGH), [keys])


def test_a_replayed_call_gives_the_same_bits_at_every_position():
    keys = buffer()
    expected = region_of(mx.array(np.array(keys)))
    replay = captured(keys)
    assert (replay.low, replay.high) == (LOW, HIGH) and len(replay) > 8
    for at in [*range(LOW, HIGH + 1), 5, 5, 1]:
        tokens = mx.array([[at % 5, 3]], dtype=mx.int32)
        (result,) = replay.run([tokens], [keys], at)
        built, expected = model(tokens, expected, at)
        mx.eval(result, built, expected)
        assert np.array_equal(np.array(result), np.array(built))
        assert np.array_equal(np.array(keys), np.array(expected))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_windows_move_with_the_position(dtype: mx.Dtype):
    def moving(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
        x = (tokens.astype(mx.float32)[:, None, :, None] * WEIGHTS[0]).astype(dtype)
        keys = ops.write_rows(keys, x, at, 0)
        seen = keys[:, :, at + LENGTH - 6 : at + LENGTH]
        return [ops.silu(ops.attention(x, seen, seen, scale=0.5, mask="causal")), keys]

    keys, expected = (region_of(mx.array(buffer()).astype(dtype)) for _ in range(2))

    def call(at: int) -> Any:
        tokens = ops.placeholder([1, LENGTH], mx.int32)
        return ops.Call([tokens], moving(tokens, copy.copy(keys), at), at)

    replay = ops.Replay(call(4), call(HIGH), [keys])
    for at in (4, 5, 11, HIGH, 7):
        tokens = mx.array([[at, 3]], dtype=mx.int32)
        (result,) = replay.run([tokens], [keys], at)
        built, expected = moving(tokens, expected, at)
        assert mx.array_equal(result, built) and mx.array_equal(keys, expected)


ROW = mx.random.normal((1, 1, 1, DIM), key=mx.random.key(3))
TABLE = mx.random.normal((DIM, DIM), key=mx.random.key(4))
SIMPLE: dict[str, Callable[[mx.array], mx.array]] = {
    "Add": lambda y: y + ROW,
    "Subtract": lambda y: ROW - y,
    "Multiply": lambda y: y * y[..., :1],
    "Divide": lambda y: y / y[..., 1:2],
    "Maximum": lambda y: mx.maximum(y, mx.where(y > 0, y, mx.nan)),
    "Minimum": lambda y: mx.minimum(mx.array(mx.nan), y),
    "Square": mx.square,
    "Negative": lambda y: -y.swapaxes(2, 3),
    "Sum": lambda y: y.sum(-1, keepdims=True) + y.sum(-2, keepdims=True) + y.swapaxes(2, 3).sum(3)[:, :, None],
    "AsType": lambda y: y.astype(mx.bfloat16).astype(mx.float16).astype(mx.float32),
    "Gather": lambda y: TABLE[ops.arg_partition(y, 3)],
    "Gather from the end": lambda y: TABLE.T[ops.arg_partition(y, 3).astype(mx.int32) - DIM],
    "GatherAxis": lambda y: mx.take_along_axis(y[..., ::2], ops.arg_partition(y[..., 4:], 1)[..., :3], axis=-1),
    "Concatenate": lambda y: mx.concatenate([y[..., ::2], y.swapaxes(2, 3)[:, :, :2, :1], mx.ones((1, 1, 2, 3))], -1),
    "Concatenate rows": lambda y: mx.concatenate([y[..., 1:], mx.concatenate([ROW, ROW], 2)[..., 1:], y[..., :-1]], 2),
    "Concatenate numbers": lambda y: TABLE[mx.concatenate([ops.arg_partition(y, 3), ops.arg_partition(y, 2)], -1)],
    "Contiguous": lambda y: mx.contiguous(y.swapaxes(2, 3)),
    "constants": lambda y: y * mx.sqrt(mx.arange(1.0, DIM + 1)).astype(mx.bfloat16).astype(mx.float32) + (1 + ROW),
}
HANDED = {"Maximum": {"Greater", "Select"}, "Gather from the end": {"AsType", "Subtract"}}
"""What it takes to try an operation and is not simple."""


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_simple_operations_have_the_bits_of_mlx_and_are_not_handed_over(name: str, dtype: mx.Dtype):
    def twist(y: mx.array, seen: mx.array, at: int) -> mx.array:
        return ops.silu(SIMPLE[name](y.astype(dtype)).astype(mx.float32))

    keys = buffer()
    expected = region_of(mx.array(np.array(keys)))
    replay = captured(keys, twist=twist)
    assert set(Counter(replay.handed) - Counter(captured(keys).handed)) == HANDED.get(name, set())
    for at in (3, 4, 9, LOW, HIGH):
        tokens = mx.array([[at % 5 - 1, 3]], dtype=mx.int32)
        (result,) = replay.run([tokens], [keys], at)
        built, expected = model(tokens, expected, at, twist)
        assert result.shape == built.shape
        assert np.array_equal(np.array(result), np.array(built), equal_nan=True)


def test_results_can_be_read_without_evaluating_them_first_and_are_not_overwritten():
    keys = buffer()
    replay = captured(keys)
    results = [replay.run([mx.array([[n, n]], dtype=mx.int32)], [keys], 3 + n)[0] for n in range(4)]
    read = [np.array(result) for result in results]
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(read, results, strict=True))
    assert not any(np.array_equal(read[0], other) for other in read[1:])


def test_calls_are_kept_without_what_they_were_built_from():
    keys = ops.reserve([1, 1, 1 << 20, DIM], mx.float32)
    before = active_memory()
    replay = captured(keys)
    replay.run([mx.array([[1, 2]], dtype=mx.int32)], [keys], 7)
    mx.synchronize()
    assert mx.get_active_memory() - before < keys.nbytes // 16
    mapped, size = address_space(), keys.nbytes
    keys = mx.array(0)
    assert mapped - address_space() >= size


def test_buffers_may_lie_elsewhere_each_time():
    keys, others = buffer(), buffer()
    replay = captured(keys)
    for at, place in ((3, keys), (3, others), (5, others), (5, keys), (7, keys), (7, others)):
        replay.run([mx.array([[at, 2]], dtype=mx.int32)], [place], at)
    mx.synchronize()
    assert np.array_equal(np.array(keys), np.array(others))
    assert not np.array_equal(np.array(keys), np.array(buffer()))


def test_a_result_that_is_a_view_is_not_overwritten():
    keys = buffer()
    replay = captured(keys, twist=lambda y, seen, at: y.reshape(1, -1)[:, ::2].T)
    first, second = (replay.run([mx.array([[n, n]], dtype=mx.int32)], [keys], 3 + n)[0] for n in range(2))
    before = np.array(first)
    assert not np.array_equal(before, np.array(second))
    assert np.array_equal(before, np.array(first))


def test_what_attends_to_keys_is_no_result():
    with pytest.raises(ValueError, match="attends to keys is a result"):
        captured(buffer(), twist=lambda y, seen, at: ops.attention(y, seen, seen, scale=1.0))


@pytest.mark.parametrize(
    ("twist", "why"),
    [
        (lambda y, seen, at: y * float(at), "constant changes"),
        (lambda y, seen, at: y * mx.array([at, at + 1] * 4), "constant changes"),
        (lambda y, seen, at: y + mx.arange(at, at + DIM), "Arange changes"),
        (lambda y, seen, at: y + 1 if seen.shape[2] > 10 else y, "stand for the same|graphs differ"),
        (lambda y, seen, at: y + 1 if seen.shape[2] > 10 else y + 2, "constant changes"),
        (lambda y, seen, at: y + seen.sum(), "keys are read by"),
        (lambda y, seen, at: seen, "not computed"),
        (lambda y, seen, at: mx.repeat(y.reshape(-1)[:1], 1 << 24).sum(), "too much memory"),
    ],
)
def test_what_depends_on_the_position_otherwise_is_refused(twist: Twist, why: str):
    with pytest.raises(ValueError, match=why):
        captured(buffer(), twist=twist)


def test_tokens_cannot_be_looked_at_while_a_call_is_built():
    with pytest.raises((ValueError, RuntimeError), match="without a primitive"):
        captured(buffer(), twist=lambda y, seen, at: y + 1 if y.sum().item() > 0 else y)


def writes_elsewhere(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
    result, keys = model(tokens, keys, at)
    return [result, ops.write_rows(keys, mx.zeros((1, 1, 1, DIM)), 4, 0)]


def asks_with_keys(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
    result, keys = model(tokens, keys, at)
    asked = keys[:, :, at : at + LENGTH]
    return [ops.silu(result + ops.attention(asked, result, result, scale=1.0)), keys]


def reads_unalike(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
    result, keys = model(tokens, keys, at)
    recent = keys[:, :, at : at + LENGTH]
    return [ops.silu(result + ops.attention(result, recent, result, scale=1.0)), keys]


def reads_what_it_writes(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
    old = copy.copy(keys)
    result, keys = model(tokens, keys, at)
    seen = old[:, :, : at + LENGTH]
    return [result + ops.attention(result, seen, seen, scale=1.0), keys]


def leaves_another(tokens: mx.array, keys: mx.array, at: int) -> list[mx.array]:
    result, keys = model(tokens, keys, at)
    return [result, keys * 2]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (writes_elsewhere, "not written alike"),
        (asks_with_keys, "keys are read by KernAttention"),
        (reads_unalike, "not read alike"),
        (reads_what_it_writes, "read while they are written"),
        (leaves_another, "used as a whole"),
    ],
)
def test_buffers_that_are_used_otherwise_are_refused(build: Callable[..., list[mx.array]], why: str):
    with pytest.raises(ValueError, match=why):
        captured(buffer(), build)


def test_other_inputs_buffers_and_positions_are_refused():
    keys = buffer()
    replay = captured(keys)
    tokens = mx.array([[1, 2]], dtype=mx.int32)
    for position in (LOW - 1, HIGH + 1):
        with pytest.raises(ValueError, match=f"position {position} is not one of {LOW} to {HIGH}"):
            replay.run([tokens], [keys], position)
    for others in (tokens[:, :1], tokens.astype(mx.float32), tokens + 1):
        with pytest.raises(ValueError, match="not the inputs"):
            replay.run([others], [keys], LOW)
    for buffers in ([], [keys, keys], [keys[:, :, 1:]], [keys.astype(mx.float16)], [keys + 1]):
        with pytest.raises(ValueError, match="not the buffers"):
            replay.run([tokens], buffers, LOW)
    before = np.array(keys)
    assert np.array_equal(before, np.array(keys))
