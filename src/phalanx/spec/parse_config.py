"""`--speculative-config`: JSON text into a `SpeculativeConfig`, or an error that names the field.

The fields are documented in `phalanx/speculation_config.py`.
"""

from __future__ import annotations

import msgspec

from phalanx.errors import ConfigError
from phalanx.speculation_config import NgramSpeculation, Speculation, SpeculativeConfig

FLAG = "--speculative-config"
EXAMPLE = """Methods are ngram, suffix, draft_model and random; '{"method": "ngram"}' is an example."""


def parse(text: str) -> SpeculativeConfig:
    """vLLM's JSON object: `method` (ngram, suffix, draft_model, random) and the fields of that method.

    Raises ConfigError, which names the field: not JSON, unknown, a wrong type, out of range, or a contradiction."""
    try:
        config: SpeculativeConfig = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: {_named(str(error))}", remedy=EXAMPLE) from error
    except (ValueError, RecursionError) as error:  # of msgspec, also for invalid UTF-8
        raise ConfigError(f"{FLAG} is not JSON: {text[:80]!r} ({error}).", remedy=EXAMPLE) from error
    _check_control(config)
    if isinstance(config, NgramSpeculation) and config.prompt_lookup_min > config.prompt_lookup_max:
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        raise ConfigError(f"{FLAG}: prompt_lookup_min {least} is larger than prompt_lookup_max {most}.")
    return config


def _check_control(config: Speculation) -> None:
    """A field of a control that is not chosen would be accepted and ignored."""
    for field, value, control in (("floor", config.floor, "floor"), ("probe_share", config.probe_share, "cost")):
        if value is not None and config.control != control:
            problem = f'{field} belongs to "control": "{control}", but that is "{config.control}".'
            raise ConfigError(f"{FLAG}: {problem}", remedy=f"Leave {field} out, or change the control.")


def _named(problem: str) -> str:
    """msgspec's message with the field in front: "Expected `int` <= 16 - at `$.k`" -> "k: expected `int` <= 16."."""
    what, at, field = problem.removesuffix("`").rpartition(" - at `$.")
    return f"{field}: {what[:1].lower()}{what[1:]}." if at else f"{problem}."
