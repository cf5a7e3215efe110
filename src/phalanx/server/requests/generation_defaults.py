"""Sampling defaults from a model directory's generation_config.json, as in `vllm serve`.

If a request has no temperature, the authors' value suits the model better than OpenAI's 1.0. `do_sample` is ignored, as
in vLLM: a request for greedy output sets temperature 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from phalanx.errors import ModelError
from phalanx.server.requests.parsed import GenerationDefaults
from phalanx.text.model_files import read_json

FILE = "generation_config.json"


class _GenerationConfig(Struct):
    """The used fields, with the ranges of a request's. Other fields are ignored; null means absent."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None


def read_defaults(model_dir: Path) -> GenerationDefaults:
    """The file's values, and OpenAI's defaults for fields that it does not have.

    A value out of a request's range is refused, not ignored: otherwise the model would silently ignore its authors'
    setting.

    Raises:
        ModelError: the file cannot be read, or has values of wrong types or out of range; names file and field.
    """
    path = model_dir / FILE
    try:
        config = msgspec.convert(read_json(path), _GenerationConfig)
    except FileNotFoundError:
        return GenerationDefaults()
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}.", remedy="Repair or delete the file.") from error
    values = msgspec.structs.asdict(config)
    return GenerationDefaults(**{name: value for name, value in values.items() if value is not None})
