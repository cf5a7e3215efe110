"""One conformance run: drives a family's tiny model at random on ragged rows and compares it with mlx-lm's caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model
from support.models import make_model
from support.ragged import Driver, make_prompts
from support.reference import reference_here

from phalanx.model import registry
from phalanx.model.cache.layer_layout import CacheFacts
from phalanx.model.runner import Runner

TIE = 1e-4
"""Logits this close count as equal. fp32 rounding differs by about a hundredth of it between one row and several."""


@dataclass
class Outcome:
    """The result of a run."""

    facts: CacheFacts | None = None
    distinct: int = 0  # least number of different tokens in a reference row
    wrong: list[int] = field(default_factory=list)  # prompts whose output differs
    events: dict[str, int] = field(default_factory=dict)
    left: int = 0  # bytes still held after the last row


@dataclass(frozen=True)
class Drive:
    """A model, prompts, and what mlx-lm's caches make of them."""

    model: nn.Module
    facts: CacheFacts
    dtype: mx.Dtype
    prompts: list[list[int]]
    references: list[list[int]]
    seed: int


def prepare(
    family: str,
    folder: Path,
    *,
    prompts: int,
    longest: int,
    tokens: int,
    seed: int = 0,
    quantize: Mapping[str, Any] | None = None,
    dtype: mx.Dtype = mx.float32,
) -> Drive:
    """Build and inspect a model, and compute the references.

    Raises:
        ModelUnsupported: the registry refuses the model.
    """
    path = make_model(family, folder / "model", quantize=quantize, dtype=dtype)
    model, config = load_model(path)
    facts = registry.inspect(model, config)
    wanted = make_prompts(prompts, longest, seed)
    return Drive(model, facts, dtype, wanted, reference_here(path, wanted, tokens, tie=TIE), seed)


def conform(family: str, folder: Path, **settings: Any) -> Outcome:
    """Build, inspect, check and drive a model; arguments of `prepare`.

    Raises:
        ModelUnsupported: the registry refuses the model.
    """
    prepared = prepare(family, folder, **settings)
    registry.check_model(Runner(prepared.model, prepared.facts, prepared.dtype), prepared.model)
    return drive(prepared)


def drive(prepared: Drive, runner_class: type[Runner] = Runner) -> Outcome:
    """Drive a prepared model."""
    runner, references = runner_class(prepared.model, prepared.facts, prepared.dtype), prepared.references
    driver = Driver(runner, prepared.prompts, references, prepared.seed)
    outputs = driver.run()
    pairs = enumerate(zip(outputs, references, strict=True))
    return Outcome(
        facts=runner.facts,
        distinct=min(len(set(row)) for row in references),
        wrong=[i for i, (ours, theirs) in pairs if ours != theirs[: len(ours)]],
        events=driver.counts,
        left=runner.kv_bytes + runner.prefix_bytes,
    )
