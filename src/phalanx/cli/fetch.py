"""`phalanx fetch`: have a model on this machine."""

from __future__ import annotations

from typing import Annotated

from phalanx.cli.setting_flags import flag
from phalanx.config import EngineConfig
from phalanx.model.loading.resolve import resolve


def command(
    model: Annotated[str, flag(EngineConfig, "model")],
    revision: Annotated[str | None, flag(EngineConfig, "revision")] = None,
) -> int:
    """Download a model unless it is here already; prints where it is."""
    print(resolve(model, revision=revision))
    return 0
