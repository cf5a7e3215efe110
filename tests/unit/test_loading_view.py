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
    loading = [EngineState(phase="loading", progress=LoadProgress(name, 1, 2)) for name in ("first", "second")]
    states = [loading[0], loading[1], loading[1], EngineState(phase="ready"), EngineState(phase="ready")]

    class Engine(SimpleNamespace):
        @property
        def state(self) -> EngineState:
            return states.pop(0) if len(states) > 1 else states[0]

    engine: Any = Engine()
    LoadingView(engine)._lines()
    assert capsys.readouterr().err == "second: 50%\n"


def test_a_phase_that_has_only_begun_prints_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most phases are over in a moment: a log file would have one line at 0 % for each."""
    monkeypatch.setattr(terminal, "POLL_S", 0.0)
    engine: Any = SimpleNamespace(state=EngineState(phase="loading", progress=LoadProgress("loading weights", 0, 100)))
    view = LoadingView(engine)
    shown = iter([0, 24, 25, 26, 100])

    def next_state(state: EngineState) -> bool:
        done = next(shown, None)
        engine.state = EngineState(phase="loading", progress=LoadProgress("loading weights", done or 0, 100))
        return done is None

    monkeypatch.setattr(view, "_finished", next_state)
    view._lines()
    assert capsys.readouterr().err == "loading weights: 25%\nloading weights: 100%\n"
