"""As the engine does: no run-time compilation on the CPU, where it starts a C++ compiler and gains nothing."""

from __future__ import annotations

import mlx.core as mx

if mx.default_device() == mx.Device(mx.cpu):
    mx.disable_compile()
