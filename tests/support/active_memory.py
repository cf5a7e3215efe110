"""MLX's memory in use, as tests of memory must read it."""

import gc

import mlx.core as mx


def active_memory() -> int:
    """Bytes that MLX has given out, less those of objects that only wait for the garbage collector.

    What earlier tests left in cycles would otherwise count in a first reading and be gone from the next.
    """
    gc.collect()
    return int(mx.get_active_memory())
