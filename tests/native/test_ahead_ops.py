"""How far MLX hands over operations before they are computed (`native/ext/ahead.h`)."""

from __future__ import annotations

import phalanx_cpu  # before mlx.core

# isort: split
import mlx.core as mx
import pytest
from support.active_memory import active_memory

pytestmark = pytest.mark.any_isa
ops = phalanx_cpu.ops
NODES = 120
MB = 1 << 20


def chain(x: mx.array) -> mx.array:
    """A result of `NODES` products, none of which can take the memory of the one before.

    MLX lets a hundred pieces of work wait: a product is two, and what makes its result contiguous is one.
    """
    w = mx.eye(x.shape[-1])
    mx.eval(w)
    for _ in range(NODES):
        x = mx.contiguous(ops.matmul(x, w))
    return x


def held_by_small_ones() -> float:
    """The share of them that had their memory before the large products in front of them were computed."""
    square = mx.random.normal((2048, 2048))
    mx.eval(square)
    before = active_memory()
    slow = [square]
    for _ in range(3):  # kept, 16 MiB each
        slow.append(ops.matmul(slow[-1], square))
    last = chain(slow[-1][:64, :64])
    mx.async_eval(last)
    held = mx.get_active_memory() - before - 48 * MB
    mx.eval(last)
    return float(held / (NODES * 64 * 64 * 4))


def runs_ahead() -> None:
    """A thread that the system does not let run says nothing, hence three tries."""
    assert any(held_by_small_ones() > 0.5 for _ in range(3))


def large_ones_wait() -> None:
    x = mx.ones((1 << 15, 64))
    mx.eval(x)
    before = active_memory()
    mx.reset_peak_memory()
    mx.eval(chain(x))
    assert mx.get_peak_memory() - before < 40 * x.nbytes  # as many as MLX lets wait, and 64 MiB


def test_small_operations_are_handed_over_while_those_before_them_are_computed():
    runs_ahead()


def test_they_are_not_where_it_is_not_allowed():
    ops.run_ahead(False)
    try:
        assert held_by_small_ones() < 0.5
        large_ones_wait()
    finally:
        ops.run_ahead(True)
    runs_ahead()


def test_large_operations_wait_so_that_their_memory_is_bounded():
    large_ones_wait()


def test_what_has_been_computed_does_not_count_any_more():
    for _ in range(2):
        large_ones_wait()
        runs_ahead()


def test_what_failed_does_not_count_any_more():
    x, w = mx.ones((1 << 15, 64)), mx.eye(64)
    numbers = mx.array([7], mx.uint32)  # of matrices that are not there
    for _ in range(4):
        with pytest.raises(RuntimeError, match="KernGatherMM: the kernel refused its arguments"):
            mx.eval(chain(ops.gather_mm(x[None], w[None], numbers, numbers)))
    runs_ahead()
