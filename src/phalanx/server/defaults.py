"""Sampling defaults from a model directory's generation_config.json, as in `vllm serve`.

If a request has no temperature, the choice of the model's authors is better than OpenAI's 1.0. `do_sample` is ignored,
as in vLLM: a request for greedy output sets temperature 0. Does not know requests or any other file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.errors import ModelError
from phalanx.server.parsed import GenerationDefaults

FILE = "generation_config.json"


class _GenerationConfig(Struct):
    """The fields that are used. Other fields are ignored; null means absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_defaults(model_dir: Path) -> GenerationDefaults:
    """The file's values, and OpenAI's defaults for fields that it does not have.

    Raises:
        ModelError: the file is not JSON or has values of wrong types; names the file.
    """
    path = model_dir / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return GenerationDefaults()
    try:
        config = msgspec.json.decode(data, type=_GenerationConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", remedy="Repair or delete the file.") from error
    values = msgspec.structs.asdict(config)
    return GenerationDefaults(**{name: value for name, value in values.items() if value is not None})
