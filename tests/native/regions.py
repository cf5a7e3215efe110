"""Regions with content, for tests of operations that write to them."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import mlx.core as mx
import phalanx_cpu

ops = phalanx_cpu.ops


def region_of(values: mx.array) -> mx.array:
    """A region that holds these values, [rows, heads, tokens, dim]."""
    made: mx.array = ops.write_rows(ops.reserve(list(values.shape), values.dtype), values, 0, 0)
    mx.eval(made)
    return made


def address_space() -> int:
    """Bytes that this process has mapped."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident() -> int:
    """Bytes of memory that only this process has, without those of files."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
