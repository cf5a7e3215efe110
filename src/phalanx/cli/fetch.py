"""`phalanx fetch`: have a model on this machine. Does not know where models are kept."""

from __future__ import annotations

from phalanx.cli.options import Model, Revision
from phalanx.model.loading.resolve import resolve


def command(model: Model, revision: Revision = None) -> int:
    """Download a model unless it is here already; prints where it is."""
    print(resolve(model, revision=revision))
    return 0
