"""Native CPU kernels against stock MLX in one process, and against the machine's read bandwidth.

A product of few rows reads every weight once and computes little, so memory limits it (GB/s against the read limit). A
product of many rows is limited by arithmetic (GFLOP/s). Both figures are printed; the number of rows decides which one
is the limit. Times are medians over turns, in which native kernels and stock MLX alternate. A turn evaluates several
results at once, as a model does: a single result would include waking the threads.

    python benchmarks/kernels.py [--threads 2] [--repeats 15] [--only qmm]

Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import phalanx_cpu  # before mlx.core

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

ops = phalanx_cpu.ops
library = ctypes.CDLL(str(phalanx_cpu.LIBRARY))
TURN_SECONDS = 0.05
"""A turn evaluates as many results as fit into this, and at least one."""
STOCK_SECONDS = 1.0
"""If stock MLX takes longer than this for one result, it is measured once."""


@dataclass
class Case:
    """One operation. `make(i)` is the lazy result on the i-th of several copies, which together exceed the caches."""

    name: str
    ours: Callable[[int], mx.array]
    stock: Callable[[int], mx.array]
    bytes: int
    flops: int
    copies: int


def quantised(rows: int, inner: int, outer: int, bits: int, group: int, precision: str) -> Case:
    """x [rows, inner] with w [outer, inner], scales of 16 bits, x of 32."""
    size = outer * inner * bits // 8 + 4 * outer * inner // group
    copies = max(2, (128 << 20) // size)
    w = mx.random.randint(0, 1 << 31, (copies, outer, inner * bits // 32)).astype(mx.uint32)
    scales, biases = (mx.random.normal((copies, outer, inner // group)).astype(mx.float16) for _ in range(2))
    x = mx.random.normal((rows, inner))
    # separate arrays, as a model's weights: MLX copies views of larger ones
    ws, ss, bs = ([mx.array(np.array(part)) for part in whole] for whole in (w, scales, biases))
    mx.eval(x)
    return Case(
        f"qmm {bits}-bit g{group} {precision} {rows}x{inner}x{outer}",
        lambda i: ops.quantized_matmul(x, ws[i], ss[i], bs[i], True, group, bits, precision=precision),
        lambda i: mx.quantized_matmul(x, ws[i], ss[i], bs[i], True, group, bits),
        size,
        2 * rows * inner * outer,
        copies,
    )


def experts(rows: int) -> Case:
    """Four of 32 experts for each row."""
    count, chosen, inner, outer = 32, 4, 1024, 384
    w = mx.random.randint(0, 1 << 31, (count, outer, inner // 8)).astype(mx.uint32)
    scales, biases = (mx.random.normal((count, outer, inner // 64)).astype(mx.bfloat16) for _ in range(2))
    x = mx.random.normal((rows, 1, 1, inner))
    which = [mx.argsort(mx.random.normal((rows, count)), axis=-1)[:, :chosen].astype(mx.uint32) for _ in range(8)]
    mx.eval(w, scales, biases, x, which)
    return Case(
        f"gather_qmm 4-bit g64 {rows}x{chosen} of {count}, {inner}x{outer}",
        lambda i: ops.gather_qmm(x, w, scales, biases, None, which[i % 8], precision="exact"),
        lambda i: mx.gather_qmm(x, w, scales, biases, None, which[i % 8], transpose=True),
        min(count, rows * chosen) * (outer * inner * 9 // 16),
        2 * rows * chosen * inner * outer,
        8,
    )


def attention(rows: int, length: int) -> Case:
    """One token in each of `rows` rows: 32 query heads, 8 key heads, 64 wide, `length` keys."""
    q = mx.random.normal((rows, 32, 1, 64))
    keys = [mx.random.normal((rows, 8, length, 64)) for _ in range(16)]
    mx.eval(q, keys)
    return Case(
        f"attention {rows} rows after {length}",
        lambda i: ops.attention(q, keys[i], keys[i - 1], scale=0.125),
        lambda i: mx.fast.scaled_dot_product_attention(q, keys[i], keys[i - 1], scale=0.125),
        2 * keys[0].nbytes,
        4 * rows * 32 * length * 64,
        16,
    )


def dense(rows: int, inner: int, outer: int) -> Case:
    """Weights of 16 bits, activations of 32."""
    weights = [mx.random.normal((outer, inner)).astype(mx.bfloat16) for _ in range(8)]
    x = mx.random.normal((rows, inner))
    mx.eval(x, weights)
    return Case(
        f"matmul bfloat16 {rows}x{inner}x{outer}",
        lambda i: ops.matmul(x, weights[i].T),
        lambda i: x @ weights[i].T,
        weights[0].nbytes,
        2 * rows * inner * outer,
        8,
    )


Row = Callable[[mx.array], mx.array]
ALONG_ROWS: dict[str, tuple[tuple[int, ...], Row, Row]] = {
    "rms_norm": ((8, 2048), lambda x: ops.rms_norm(x, None, 1e-5), lambda x: mx.fast.rms_norm(x, None, 1e-5)),
    "layer_norm": (
        (8, 2048), lambda x: ops.layer_norm(x, None, None, 1e-5), lambda x: mx.fast.layer_norm(x, None, None, 1e-5)
    ),
    "rope": (
        (8, 32, 1, 64),
        lambda x: ops.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=7),
        lambda x: mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=7),
    ),
    "silu": ((8, 8192), lambda x: ops.silu(x, x), lambda x: x * mx.sigmoid(x) * x),
    "gelu": ((8, 8192), ops.gelu, nn.gelu),
    "sigmoid": ((8, 2048), ops.sigmoid, mx.sigmoid),
    "softmax": ((8, 32_000), ops.softmax, lambda x: mx.softmax(x, axis=-1, precise=True)),
    "logsumexp": ((8, 32_000), lambda x: ops.logsumexp(x, False), lambda x: mx.logsumexp(x, axis=-1)),
    "peaks": ((8, 32_000), lambda x: ops.peaks(x)[2], lambda x: mx.argmax(x, axis=-1) + 0 * (x.sum(-1) > x.max(-1))),
    "arg_partition": ((8, 128), lambda x: ops.arg_partition(x, -8), lambda x: mx.argpartition(x, -8, axis=-1)),
    "top_k": ((8, 32_000), lambda x: ops.top_k(x, 50)[1], lambda x: mx.argsort(-x, axis=-1)[:, :50]),
}  # fmt: skip
"""Name -> shape and operation along each row."""


def along_rows(name: str) -> Case:
    shape, ours, stock = ALONG_ROWS[name]
    copies = [mx.random.normal(shape) for _ in range(16)]
    mx.eval(copies)
    size = copies[0].nbytes
    shown = "x".join(map(str, shape))
    return Case(f"{name} {shown}", lambda i: ours(copies[i]), lambda i: stock(copies[i]), size, copies[0].size, 16)


def cases(only: str) -> Iterator[Case]:
    """Yield the cases one by one: together they would not fit into memory."""
    if "qmm".startswith(only):
        for rows in (1, 8, 512):
            for precision in ("exact", "fast"):
                yield quantised(rows, 2048, 5632, 4, 64, precision)
    if "gather_qmm".startswith(only):
        yield from map(experts, (1, 8))
    if "matmul".startswith(only):
        yield from (dense(rows, 2048, 5632) for rows in (1, 8, 128))
    if "attention".startswith(only):
        yield from (attention(rows, length) for rows, length in ((1, 128), (1, 1024), (8, 1024)))
    yield from (along_rows(name) for name in ALONG_ROWS if name.startswith(only))


def seconds(run: Callable[[int], mx.array], results: int) -> float:
    """Seconds per result, of `results` results evaluated at once."""
    start = time.perf_counter()
    mx.eval([run(i) for i in range(results)])
    return (time.perf_counter() - start) / results


def turn(copies: int, first: float) -> int:
    return max(1, min(copies, int(TURN_SECONDS / first)))


def measure(case: Case, repeats: int) -> tuple[float, float]:
    """Median seconds of the native kernels and of stock MLX."""
    first_ours, first_stock = seconds(case.ours, 1), seconds(case.stock, 1)
    ours, stock = [], []
    for _ in range(repeats):
        ours.append(seconds(case.ours, turn(case.copies, first_ours)))
        if first_stock < STOCK_SECONDS:
            stock.append(seconds(case.stock, turn(case.copies, first_stock)))
    return statistics.median(ours), statistics.median(stock or [first_stock])


class ReadPass(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sum", ctypes.c_uint64),
        ("bytes", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
    ]


AHEAD = (0, 4096)
"""Bytes to prefetch ahead. Some processors read faster with it, others without."""


def read_limit(repeats: int) -> float:
    """Bytes per second that all threads together read of 1 GiB. Some processors have 480 MiB of cache."""
    data = np.ones(1 << 28, np.uint32)
    times: dict[int, list[float]] = {ahead: [] for ahead in AHEAD}
    for _ in range(repeats):
        for ahead, taken in times.items():
            args = ReadPass(data.ctypes.data, 0, data.nbytes, ahead)
            start = time.perf_counter()
            library.kern_read_pass(ctypes.byref(args))
            taken.append(time.perf_counter() - start)
    return data.nbytes / min(map(statistics.median, times.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="threads of our kernels; 0: one per processor")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="the first letters of a kernel's name")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    ops.set_threads(options.threads)
    limit = read_limit(options.repeats)
    print(f"{ops.isa()}, {ops.threads()} threads, read limit {limit / 1e9:.1f} GB/s")
    print(f"{'kernel':44} {'ours ms':>9} {'stock ms':>10} {'times':>7} {'GB/s':>6} {'limit':>6} {'GFLOP/s':>8}")
    results = {}
    for case in cases(options.only):
        ours, stock = measure(case, options.repeats)
        rate = case.bytes / ours
        print(
            f"{case.name:44} {ours * 1e3:9.3f} {stock * 1e3:10.2f} {stock / ours:7.1f} {rate / 1e9:6.1f} "
            f"{rate / limit:6.0%} {case.flops / ours / 1e9:8.1f}",
            flush=True,
        )
        results[case.name] = {"ours_s": ours, "stock_s": stock, "bytes": case.bytes, "flops": case.flops}
    print(json.dumps({"isa": ops.isa(), "threads": ops.threads(), "read_limit": limit, "kernels": results}))


if __name__ == "__main__":
    main()
