"""phalanx: one large language model, served from several machines that you own.

`LLM`, its parameters and its outputs are imported when they are first used: `import phalanx` loads nothing.
"""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "phalanx.offline.llm",
    "SamplingParams": "phalanx.offline.sampling_params",
    "StructuredOutputsParams": "phalanx.offline.sampling_params",
    "RequestOutput": "phalanx.offline.outputs",
    "CompletionOutput": "phalanx.offline.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
