"""How a rank overlaps its own work with the device's: one rule, decided when its model is loaded.

After a token has been drawn, the processor commits it, plans the next step and builds the model call, while the device
would be idle. A rank that is alone therefore prepares the next step's forward before its plan exists. A rank that sums
with others cannot, because they execute plans only; it saves one of a step's two waits instead.
"""

from __future__ import annotations

from enum import Enum


class Overlap(Enum):
    """A rank's work while the device computes a step."""

    NONE = "none"
    """Nothing: every forward waits for its plan."""
    REPLAY = "replay"
    """It dispatches the next forward if a graph of it is captured (`graph_cache.py`). With other ranks, sums are judged
    after the wait for the tokens, and before the tokens are used."""
    BUILD = "build"
    """It builds the next forward from tokens that are being drawn, and dispatches it when they have arrived. With other
    ranks as `REPLAY`."""


def overlap_of(*, native: bool, on_gpu: bool) -> Overlap:
    """The rule.

    Args:
        native: whether native operations are installed, which can replay graphs.
        on_gpu: whether MLX computes on a GPU. On a CPU, building takes a processor from the computation.
    """
    if native:
        return Overlap.REPLAY
    return Overlap.BUILD if on_gpu else Overlap.NONE
