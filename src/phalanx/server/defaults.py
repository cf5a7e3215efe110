"""Sampling defaults from a model directory's generation_config.json, as `vllm serve` takes them.

Where a request names no temperature, the model's authors' choice is better than OpenAI's 1.0. `do_sample` is ignored
(vLLM does, too): a request that wants greedy output says temperature 0. Knows one file and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.errors import ModelError
from phalanx.server.parsed import GenerationDefaults

FILE = "generation_config.json"


class _File(Struct):
    """The fields we read; others are ignored, null is absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_defaults(model_dir: Path) -> GenerationDefaults:
    """The file's values, or OpenAI's where it has none.

    Raises:
        ModelError: the file is not JSON or has values of wrong types; names the file.
    """
    path = model_dir / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return GenerationDefaults()
    try:
        values = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", remedy="Repair or delete the file.") from error
    given = {name: value for name in _File.__struct_fields__ if (value := getattr(values, name)) is not None}
    return GenerationDefaults(**given)
