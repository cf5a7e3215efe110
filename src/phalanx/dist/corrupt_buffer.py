"""Injects corrupt buffers like those of a faulty backend (`fault_injection.py`)."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from phalanx.dist.fault_injection import Injection


class CorruptBuffer:
    """Corrupts one reduction on one rank, once. A `reduce.FaultInjector`."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self._previous: mx.array | None = None
        self._armed = False
        self._done = False

    def at_step(self, step: int) -> None:
        """Set the number of the step that begins."""
        self._armed = step >= self._injection.step

    def __call__(self, wire: mx.array, forward: int, site: int) -> mx.array:
        """The buffer to use instead of `wire`."""
        if site != self._injection.layer or self._done:
            return wire
        previous, self._previous = self._previous, wire
        if not self._armed:
            return wire
        match self._injection.kind:
            case "garbage":
                corrupt = mx.random.normal(wire.shape, key=mx.random.key(forward)).astype(wire.dtype) * 10
            case "stale":
                if previous is None or previous.shape != wire.shape:
                    return wire  # corrupt the next forward of the same shape instead
                corrupt = previous
            case "zero":
                corrupt = mx.zeros_like(wire)
            case _:
                corrupt = wire.reshape(-1)[::-1].reshape(wire.shape)
        self._done = True
        # The all-reduce must still run: this rank's next one would pair with the other ranks' present one.
        return cast("mx.array", mx.depends(corrupt, wire))
