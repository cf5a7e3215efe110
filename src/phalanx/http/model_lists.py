"""What clients look for in `/v1/models` beside OpenAI's list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def more_of_models(query: Mapping[str, str]) -> dict[str, Any]:
    """What Codex looks for in the list of models; it says its version in the query.

    None is described: a description has to bring instructions, and they would take the place of Codex's own.
    """
    return {"models": []} if "client_version" in query else {}
