"""A short hash of everything that decides a server's tokens.

Servers with equal keys compute the same tokens for the same request, except for effects of the batch's other rows
(design: Keyed sampling). A gateway prefers to move streams between such servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from phalanx import __version__
from phalanx.server.requests.parsed import ApiModel
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.types import ModelInfo


def determinism_key_of(config: ServerConfig, served: ApiModel, tokenizer: str) -> Callable[[ModelInfo], str]:
    """A function that makes a server's key once its model is known.

    Args:
        tokenizer: its fingerprint.
    """
    facts = (
        __version__,
        tokenizer,
        served.defaults,
        sorted(served.template_kwargs.items()),
        served.default_max_tokens,
        served.clamp_max_tokens,
        served.auto_tools,
        config.drops_tools,
        config.tool_call_parser,
        config.reasoning_parser,
    )

    def determinism_key(info: ModelInfo) -> str:
        of_model = (info.identity, info.model_type, info.dtype, info.quantization, info.vocab_size, info.max_model_len)
        return hashlib.blake2b(repr((facts, of_model)).encode(), digest_size=8).hexdigest()

    return determinism_key
