"""Rows in address space that is reserved once (native/ext/region.h)."""

from __future__ import annotations

import resource
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from phalanx_cpu import ops
from regions import address_space, resident

pytestmark = pytest.mark.any_isa
MB = 1 << 20


def filled(region: mx.array, row: int, tokens: int, value: float) -> None:
    """The first tokens of a row of [rows, heads, tokens, dim] become `value`."""
    for start in range(0, tokens, 64):  # what is written is memory, too
        count = min(64, tokens - start)
        mx.eval(ops.write_rows(region, mx.full((1, region.shape[1], count, region.shape[3]), value), start, row))


def test_what_is_reserved_takes_memory_only_where_it_is_written() -> None:
    """Sixteen thousand rows of a quarter of a GiB."""
    before = resident()
    region = ops.reserve([1 << 14, 4, 1 << 18, 64], mx.float32)
    assert region.nbytes > 1 << 41 and resident() - before < MB
    filled(region, 9000, 1 << 14, 1.0)
    assert 16 * MB <= resident() - before < 18 * MB
    mapped = address_space()
    del region
    assert resident() - before < 2 * MB and mapped - address_space() > 1 << 41


def test_beyond_two_thousand_million_elements_rows_are_written_read_and_attended_to() -> None:
    region = ops.reserve([40, 2, 1 << 20, 64], mx.float32)
    assert region.size > 1 << 32
    keys = mx.random.normal((1, 2, 3, 64), key=mx.random.key(5))
    last = (1 << 20) - 3
    mx.eval(ops.write_rows(region, keys, last, 39))
    mx.eval(ops.write_rows(region, keys * 2, mx.array([7], dtype=mx.int32), 38))
    assert mx.array_equal(region[39:, :, last:], keys)
    assert mx.array_equal(region[38:39, :, 7:10], keys * 2)
    seen, query = region[38:39, :, :10], mx.random.normal((1, 4, 1, 64), key=mx.random.key(6))
    copies = mx.concatenate([mx.zeros((1, 2, 7, 64)), keys * 2], axis=2)
    assert mx.array_equal(ops.attention(query, seen, seen, scale=0.1), ops.attention(query, copies, copies, scale=0.1))


@pytest.mark.parametrize("shape", [[3, 2, 64, 16], [3, 2, 1024, 16], [3, 3, 50, 7], [2, 1, 1, 5000]])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_that_is_cleared_is_zero_and_no_other_changes(shape: list[int], dtype: mx.Dtype) -> None:
    region = ops.reserve(shape, dtype)
    for row in range(shape[0]):
        filled(region, row, shape[2], row + 1.0)
    ops.clear_row(region, 1)
    values = np.array(region.astype(mx.float32))
    assert not values[1].any() and (values[0] == 1).all() and (values[2:] == 3).all()


def test_a_row_that_is_cleared_gives_its_memory_back() -> None:
    before = resident()
    region = ops.reserve([2, 4, 1 << 14, 64], mx.float32)
    filled(region, 0, 1 << 14, 1.0)
    assert resident() - before >= 16 * MB
    ops.clear_row(region, 0)
    assert resident() - before < 2 * MB


@pytest.mark.parametrize("shape", [[4, 2, 64, 16], [4, 2, 1024, 16], [4, 3, 50, 7], [4, 1, 1, 5000]])
def test_rows_that_are_exchanged_keep_what_they_hold(shape: list[int]) -> None:
    """Rows that begin with a page, and such that do not; the last row, whose neighbour is the space behind it."""
    region = ops.reserve(shape, mx.float32)
    for row in range(3):
        filled(region, row, shape[2], row + 1.0)
    for a, b, expected in [(0, 2, [3, 2, 1, 0]), (3, 0, [0, 2, 1, 3]), (1, 1, [0, 2, 1, 3]), (2, 1, [0, 1, 2, 3])]:
        ops.swap_rows(region, a, b, shape[2])
        values = np.array(region)
        assert [sorted(set(row.ravel().tolist())) for row in values] == [[n] for n in expected]


def test_exchanging_rows_takes_no_memory() -> None:
    before = resident()
    region = ops.reserve([3, 4, 1 << 14, 64], mx.float32)
    filled(region, 0, 1 << 14, 1.0)
    used = resident() - before
    for _ in range(21):  # each time around
        ops.swap_rows(region, 0, 2, 1 << 14)
        ops.swap_rows(region, 1, 2, 1 << 14)
    assert resident() - before < used + MB
    assert [float(row.min().item()) for row in region] == [1.0, 0.0, 0.0]


def test_a_process_with_little_address_space_is_told() -> None:
    code = (
        "import resource, phalanx_cpu; import mlx.core as mx\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({8 << 30}, {8 << 30}))\n"
        "phalanx_cpu.ops.reserve([64, 4, 1 << 18, 64], mx.float32)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "reserve: no " in done.stderr and "Cannot allocate memory" in done.stderr


@pytest.mark.parametrize("shape", [[], [0, 1], [2, -1], [2, 0]])
def test_an_impossible_shape_is_an_error(shape: list[int]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"reserve|incompatible"):
        ops.reserve(shape, mx.float32)


def test_rows_that_are_not_there_and_copies_are_refused() -> None:
    region = ops.reserve([2, 1, resource.getpagesize(), 1], mx.float32)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="does not have that row"):
            ops.clear_row(region, row)
        with pytest.raises(ValueError, match="does not have that row"):
            ops.swap_rows(region, 0, row, 1)
    for copy in (region + 1, mx.zeros((2, 1, 8, 4))):
        with pytest.raises(RuntimeError, match="is a copy"):
            ops.clear_row(copy, 0)
        with pytest.raises(RuntimeError, match="is a copy"):
            ops.swap_rows(copy, 0, 1, 1)
