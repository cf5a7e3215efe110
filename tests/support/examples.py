"""The number of examples of a property test: more under `make soak`, which sets SOAK and runs tests marked `grows`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

SOAK = os.environ.get("SOAK") == "1"


def examples(usual: int, *, soak: int, **more: Any) -> Callable[[Any], Any]:
    """hypothesis's `settings` without a deadline: `usual` examples in `make test`, `soak` in `make soak`."""

    def decorate(test: Any) -> Any:
        chosen = settings(max_examples=soak if SOAK else usual, deadline=None, **more)
        return pytest.mark.grows(chosen(test))

    return decorate


def run_machine(machine: Any, *, usual: int, soak: int, steps: int = 40) -> None:
    """Run a state machine with random steps. The test that calls it is marked `grows`."""
    chosen = settings(max_examples=soak if SOAK else usual, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(machine, settings=chosen)
