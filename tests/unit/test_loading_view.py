"""What a start shows without a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cli import terminal
from phalanx.cli.terminal import LoadingView
from phalanx.supervision.client import EngineState, LoadProgress


def test_no_progress_is_shown_of_an_engine_that_became_ready_meanwhile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would stand behind the line that says so."""
    monkeypatch.setattr(terminal, "POLL_S", 0.0)
    loading = [EngineState(phase="loading", progress=LoadProgress(name, 0, 1)) for name in ("first", "second")]
    states = [loading[0], loading[1], loading[1], EngineState(phase="ready"), EngineState(phase="ready")]

    class Engine(SimpleNamespace):
        @property
        def state(self) -> EngineState:
            return states.pop(0) if len(states) > 1 else states[0]

    engine: Any = Engine()
    LoadingView(engine)._lines()
    assert capsys.readouterr().err == "second: 0%\n"
