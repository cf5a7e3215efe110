"""Weights that are repacked, as MLX arrays and in models that are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import phalanx_cpu  # before mlx.core

# isort: split
import mlx.core as mx
import numpy as np
import pytest

ops = phalanx_cpu.ops
SCRIPT = Path(__file__).with_name("repacked_models.py")
TURNS = ops.repacks(96, 256, "affine", 64, 4)
repacking = pytest.mark.skipif(not TURNS, reason="rows are not repacked with this instruction set")


def quantised(shape, mode="affine", group=64, bits=4):
    parts = mx.quantize(mx.random.normal(shape), group, bits, mode=mode)
    mx.eval(parts)
    return list(parts)


def repacked(parts):
    copies = [mx.array(np.array(part)) for part in parts]
    mx.eval(copies)
    return [ops.repack_rows(part) for part in copies]


@repacking
@pytest.mark.parametrize("precision", ["exact", "fast"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products(rows, precision):
    x, q = mx.random.normal((rows, 256)), quantised((96, 256))
    found = ops.quantized_matmul(x, *repacked(q), precision=precision)
    wanted = ops.quantized_matmul(mx.repeat(x, 8, axis=0), *q, precision=precision)[::8]
    assert mx.array_equal(found, wanted)


@repacking
def test_experts():
    x, q = mx.random.normal((5, 1, 1, 256)), quantised((4, 32, 256))
    pick = mx.array([[0, 3], [1, 1], [2, 0], [3, 2], [0, 1]])
    found = ops.gather_qmm(x, *repacked(q), rhs_indices=pick)
    assert mx.allclose(found, ops.gather_qmm(x, *q, rhs_indices=pick), atol=1e-4)


@repacking
@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64])
def test_decoded_rows(dtype):
    q = quantised((96, 256))
    rows = mx.array([[3, 95, 3], [0, 16, 17]]).astype(dtype)
    for some in (rows, rows[:, ::2]):
        assert mx.array_equal(ops.dequantize_rows(*repacked(q), some), ops.dequantize_rows(*q, some))


@repacking
def test_repacked_codes_are_no_codes_to_mlx():
    x, lying = mx.random.normal((2, 256)), repacked(quantised((96, 256)))
    assert [part.dtype for part in lying] == [mx.int32, mx.float32, mx.float32]
    with pytest.raises(ValueError, match="uint32"):
        mx.quantized_matmul(x, *lying)
    with pytest.raises(ValueError, match="transposed"):
        ops.quantized_matmul(mx.random.normal((2, 96)), *lying, transpose=False)


def test_what_does_not_lie_repacked_anywhere_is_refused():
    x, (codes, *scales) = mx.random.normal((2, 256)), quantised((20, 256))
    with pytest.raises(ValueError, match="cannot be repacked"):
        ops.quantized_matmul(x, codes.view(mx.int32), *scales)


@pytest.mark.parametrize(
    "array", [mx.zeros((20, 4)), mx.zeros((16,)), mx.zeros((16, 2), mx.uint64), mx.zeros((16, 8)).T.T[:, ::2]]
)
def test_only_whole_sixteens_of_rows_are_repacked(array):
    mx.eval(array)
    with pytest.raises(ValueError, match="whole sixteens of rows"):
        ops.repack_rows(array)


@repacking
def test_loaded_models_lie_repacked_and_compute_the_same():
    dense = ["llama/4", "gemma3_text/4", "llama/8@bfloat16", "llama/2"]
    mixed = ["qwen3_moe/4", "deepseek_v3/4", "gpt_oss/mxfp4", "mixtral/nvfp4", "llama/3"]
    command = [sys.executable, str(SCRIPT), *dense, *mixed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        limit = 0.05 if "bfloat16" in name else 1e-5
        assert found["distance"] <= limit and found["plain distance"] <= limit, name
        assert bool(found["repacked"]) == (name != "llama/3"), name
        assert found["refused"], name  # rows that are cut out of a repacked table
        if name in dense:
            assert found["not"] == [] and any("embed_tokens" in path for path in found["repacked"]), name
            assert found["same"] and found["same alone"], name
        else:  # experts meet few rows, and those add up in another order where they are not repacked
            assert name == "llama/3" or any("mlp" in path or "experts" in path for path in found["repacked"]), name
            assert not any("embed_q" in path or "unembed_out" in path for path in found["repacked"]), name


@repacking
def test_factors_take_the_place_of_scales():
    units = mx.random.normal((3, 64, 2, 1)).astype(mx.float16).astype(mx.float32)
    scales = (units * mx.random.randint(0, 64, (3, 64, 2, 8))).reshape(3, 64, 16)
    codes = mx.random.randint(0, 1 << 30, (3, 64, 64)).astype(mx.uint32)
    w, *lying = repacked([codes, scales, -scales])
    factors = [ops.buffer([3, 64, 20], mx.uint8) for _ in lying]
    assert all(ops.factor_rows(part, out) for part, out in zip(lying, factors, strict=True))
    x, pick, how = (
        mx.random.normal((5, 1, 1, 512)),
        mx.array([[0, 2], [1, 1], [2, 0], [0, 1], [1, 2]]),
        {"group_size": 32},
    )
    for dtype in (mx.float32, mx.bfloat16):
        found, wanted = (
            ops.gather_qmm(x.astype(dtype), w, *some, rhs_indices=pick, **how) for some in (factors, lying)
        )
        assert found.dtype == mx.float32 and mx.array_equal(found, wanted)
    found, wanted = (ops.dequantize_rows(w[0], *(one[0] for one in some), mx.array([3, 40]), **how)
                     for some in (factors, lying))  # fmt: skip
    assert found.dtype == mx.float32 and mx.array_equal(found, wanted)
    others = mx.random.normal((3, 64, 16))
    mx.eval(others)
    assert not ops.factor_rows(others, factors[0])
    with pytest.raises(ValueError, match="bytes for the factors"):
        ops.factor_rows(lying[0], mx.zeros((3, 64, 16), mx.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        ops.quantized_matmul(x, w, factors[0][..., :16], factors[1][..., :16], **how)


@repacking
def test_an_imported_model_has_factors_and_computes_the_same(tmp_path: Path):
    command = [sys.executable, str(SCRIPT.with_name("factored_model.py"))]
    variables = {**os.environ, "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] and found["factored"] and found["bytes"] < 0.8 * found["plain bytes"]
