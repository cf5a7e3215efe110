"""Installs the native kernels into MLX: the only place where phalanx changes MLX's functions (design: Native kernels).

Models call `mx.fast.rms_norm`, `mx.quantized_matmul`, `x @ w.T` and others. This module replaces each of them, once per
process, with its function of `replacements.py`. So every architecture becomes faster without a change.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from phalanx.config import CpuPrecision
from phalanx.errors import ConfigError
from phalanx.kernels import preload
from phalanx.kernels.agreement import disagreements
from phalanx.kernels.ops import Function, Ops
from phalanx.kernels.replacements import MODES, activations, replacements

FAST_COST = "8-bit activations; on the demo model at 4 bits perplexity +0.04 %, 99.3 % of greedy tokens as exact"
"""Measured by `benchmarks/precision.py` with AVX-512, where it costs most."""


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed kernels.

    Attributes:
        isa: the instruction set in use.
        unbuilt: a wider one that this processor has and the library was built without; empty if there is none.
        threads: per operation.
        precision: of quantised products.
        entry_points: the names of replaced functions.
    """

    isa: str
    unbuilt: str
    threads: int
    precision: str
    entry_points: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.entry_points)
        cost = f" ({FAST_COST})" if self.precision == "fast" else ""
        missed = f" (built without {self.unbuilt}, which this processor has: build it here)" if self.unbuilt else ""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"{self.isa}{missed}, {threads}, precision {self.precision}{cost}: {names}"


def threads_for(ranks_here: int) -> int:
    """Threads per rank: an equal share of the processors that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, allowed // max(1, ranks_here))


def active() -> bool:
    """Whether the native kernels are installed in this process."""
    return bool(_replaced)


def operations() -> Ops | None:
    """The native operations, for callers that need one instead of several of MLX's; None if they are not installed."""
    return preload.OPS if _replaced else None


def buffer(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated array for the caller to fill, completely, before it is read.

    The native allocation is uninitialised memory, in huge pages if the system has them: the first access to a page
    costs more than reading a cached file. Without native kernels it is `mx.zeros`.
    """
    if active():
        uninitialised: mx.array = preload.OPS.buffer(list(shape), dtype)
        return uninitialised
    zeros = mx.zeros(shape, dtype)
    mx.eval(zeros)
    return zeros


def repacks(rows: int, width: int, mode: str, group_size: int, bits: int) -> bool:
    """Whether products with such quantised matrices are faster after `repack`."""
    return active() and mode in MODES and bool(preload.OPS.repacks(rows, width, mode, group_size, bits))


def repack(array: mx.array) -> mx.array:
    """Repack codes, scales or biases [..., rows, columns] of quantised matrices, in place.

    In each group of sixteen rows, the elements of a column become adjacent. Repacked codes are int32: native operations
    recognise them by that, and MLX's own refuse them.

    Args:
        array: evaluated; nothing else may refer to its memory.
    """
    repacked: mx.array = preload.OPS.repack_rows(array)
    return repacked


def factor(numbers: mx.array, out: mx.array) -> bool:
    """Write repacked scales or biases as factors, which products take in their place.

    Args:
        numbers: float32 [..., rows, groups], evaluated.
        out: uint8 [..., rows, groups * 10 / 8]; if not all numbers have factors, it holds nothing of meaning.

    Returns:
        Whether all numbers have factors.
    """
    return bool(preload.OPS.factor_rows(numbers, out))


def install(precision: CpuPrecision, threads: int, *, async_dispatch: bool = True) -> Installed | None:
    """Replace MLX's functions. Returns None if MLX does not compute on the CPU or the kernels are not available.

    Args:
        precision: of quantised products; `auto` is exact. `fast` uses 8-bit activations for prefill and decode alike,
            because a resumed stream is computed again as a prompt and must give the same tokens.
        threads: per operation.
        async_dispatch: dispatch a step's whole graph at once. A rank that shares its processors with other ranks is
            faster if it dispatches a little at a time, while it waits for their part of an all-reduce.

    Raises:
        ConfigError: a kernel disagrees with MLX on this processor. This process cannot return to MLX's
            own kernels, because its float32 products already come from the same library.
        RuntimeError: they were installed before.
    """
    if mx.default_device() != mx.Device(mx.cpu) or preload.OPS is None:
        return None
    if _replaced:
        raise RuntimeError("the native kernels are installed already")
    ops: Ops = preload.OPS
    preload.OPS.set_threads(threads)
    preload.OPS.run_ahead(async_dispatch)
    chosen = "fast" if precision == "fast" else "exact"
    if wrong := disagreements(ops, chosen):
        raise ConfigError(
            f"The native kernels for {preload.OPS.isa()} compute something else than MLX on {socket.gethostname()}: "
            f"{', '.join(wrong)}.",
            remedy="Use --no-cpu-kernels there (or KERN_ISA=scalar), and please report it.",
        )
    names = []
    for owner, functions in replacements(ops, chosen):
        for name, native in functions.items():
            _replaced[owner, name] = getattr(owner, name)
            setattr(owner, name, functools.wraps(getattr(owner, name))(native))
            names.append(name.strip("_"))
    for stock, native in activations(ops):
        _replace_everywhere(stock, functools.wraps(stock)(native))
        names.append(stock.__name__)
    # phalanx differentiates nothing, and each call would be a node of the graph: two per layer of experts.
    _replaced[mx, "stop_gradient"] = mx.stop_gradient
    mx.stop_gradient = functools.wraps(mx.stop_gradient)(lambda a, /, *, stream=None: a)
    return Installed(
        isa=preload.OPS.isa(),
        unbuilt=preload.OPS.unbuilt(),
        threads=preload.OPS.threads(),
        precision=chosen,
        entry_points=tuple(dict.fromkeys(names)),
    )


_replaced: dict[tuple[Any, str], Function] = {}


def _replace_everywhere(stock: Function, native: Function) -> None:
    """Replace a function in every module that imported it by name, as models do with activations."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("mlx.nn", "mlx_lm.models")):
            for name, value in list(vars(module).items()):
                if value is stock:
                    _replaced[module, name] = stock
                    setattr(module, name, native)
