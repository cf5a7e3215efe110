"""Arrays that are filled from outside (native/ext/memory.h)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from phalanx_cpu import ops
from support.active_memory import active_memory

pytestmark = pytest.mark.any_isa
MB = 1 << 20


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint16, mx.uint32, mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shape", [[1], [3, 5], [2, 1 << 20], [2, 3, 700_001]])
def test_what_is_written_is_what_mlx_reads(shape: list[int], dtype: mx.Dtype) -> None:
    array = ops.buffer(shape, dtype)
    assert array.shape == tuple(shape)
    assert array.dtype == dtype
    view = np.array(array.view(mx.uint8), copy=False).reshape(-1)
    assert view.ctypes.data % 64 == 0, "a vector must not lie in two cache lines"
    view[:] = np.arange(view.size, dtype=np.uint8)
    expected = np.arange(view.size, dtype=np.uint8)
    np.testing.assert_array_equal(np.array(mx.array(array).view(mx.uint8)).reshape(-1), expected)


def test_the_memory_is_counted_and_given_back() -> None:
    before = active_memory()
    array = ops.buffer([32, MB], mx.uint8)
    assert mx.get_active_memory() >= before + 32 * MB
    del array
    assert mx.get_active_memory() < before + MB


def test_an_impossible_shape_is_an_error() -> None:
    with pytest.raises((ValueError, TypeError), match=r"-1|incompatible"):
        ops.buffer([-1, 4], mx.float32)
