"""Which weights are repacked in memory: sixteen rows beside each other, as the native kernels multiply them.

Integer products need codes of many rows side by side, and to put them there takes as long as multiplying some rows of
activations (docs/log/kernels-quantised.md). So it is done once, when a tensor has been read. Only layers take
part that are known to do nothing else with their weights. Does not read files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from phalanx.kernels import install
from phalanx.model.cpu.weight_only_16bit import WideQuantizedEmbedding
from phalanx.model.loading.parallel import SummedQuantizedLinear

FIELDS = ("weight", "scales", "biases")


class RepackedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A quantised table whose rows are repacked."""

    looked_up: mx.Dtype | None
    """What rows become; None: as MLX has it."""

    def __call__(self, x: mx.array) -> mx.array:
        native = install.operations()
        assert native is not None  # it was they who repacked it
        return native.dequantize_rows(
            self["weight"],
            self["scales"],
            self.get("biases"),
            x,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=self.looked_up,
        )


_MULTIPLIES: tuple[Callable[..., Any], ...] = (
    nn.QuantizedLinear.__call__,
    SummedQuantizedLinear.__call__,
    QuantizedSwitchLinear.__call__,
)
"""What a class computes with that multiplies by all of its weights, transposed."""

_TABLES = {nn.QuantizedEmbedding: None, WideQuantizedEmbedding: mx.float32}
"""A table's class -> what its rows become."""


def repackable(model: Module, computed: Callable[[str], bool]) -> set[str]:
    """Names of parameters to repack when they have been read. Tables change their class.

    Args:
        computed: whether mlx-lm makes a parameter, whose memory may be another one's as well.
    """
    names: set[str] = set()
    for path, module in model.named_modules():
        multiplies = type(module).__call__ in _MULTIPLIES and module.get("global_scale") is None
        if not multiplies and type(module) not in _TABLES:
            continue
        of_module = {f"{path}.{field}" if path else field for field in FIELDS if module.get(field) is not None}
        if any(map(computed, of_module)) or not _repacks(module):
            continue
        names |= of_module
        if not multiplies:
            module.looked_up = _TABLES[type(module)]
            module.__class__ = RepackedEmbedding
    return names


def _repacks(module: Any) -> bool:
    rows, words = module["weight"].shape[-2:]
    return install.repacks(rows, words * 32 // module.bits, module.mode, module.group_size, module.bits)
