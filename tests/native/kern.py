"""libkern through ctypes: arrays of numpy in and out, without MLX. The structs are those of native/include/kern."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Pointer, Int64, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

F32, F16, BF16 = 0, 1, 2
"""Element types (`kern_type`). bfloat16 travels as uint16: numpy has none."""
EPS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
"""Half a unit in the last place, relative."""


def _find() -> str:
    """The library to test: `KERN_LIBRARY`, else the installed one, without importing its package and MLX."""
    if "KERN_LIBRARY" in os.environ:
        return os.environ["KERN_LIBRARY"]
    package = importlib.util.find_spec("phalanx_cpu")
    assert package is not None and package.origin is not None
    return os.fspath(Path(package.origin).with_name("libkern.so"))


def smallest(kind: int) -> float:
    """What rounding to the smallest numbers can leave."""
    return 2.0**-24 if kind == F16 else 1e-37


library = ctypes.CDLL(_find())
library.kern_isa.restype = ctypes.c_char_p
library.kern_isas.restype = ctypes.c_char_p


def call(name: str, args: ctypes.Structure) -> int:
    """The status an entry point returns."""
    return int(getattr(library, name)(ctypes.byref(args)))


def pointer(array: Array | None) -> int | None:
    """Of an array's first element; keep the array alive during the call."""
    return None if array is None else array.ctypes.data


def encode(values: Array, kind: int) -> Array:
    """float64 to what a kernel reads, rounded to nearest."""
    single = np.asarray(values, np.float32)
    if kind == F32:
        return single
    if kind == F16:
        with np.errstate(over="ignore"):
            return single.astype(np.float16)
    bits = single.view(np.uint32).astype(np.uint64)
    half = np.uint64(16)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> half) & np.uint64(1))) >> half).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def decode(array: Array, kind: int) -> Array:
    """What a kernel wrote, as float64."""
    if kind == BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def unaligned(array: Array, offset: int) -> Array:
    """A copy that starts `offset` elements behind a 64-byte boundary."""
    size = array.itemsize
    room = np.zeros(array.nbytes + 64 + offset * size, np.uint8)
    start = -room.ctypes.data % 64 + offset * size
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
