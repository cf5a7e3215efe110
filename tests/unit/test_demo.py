"""`phalanx demo`: what it says of the answer whose rank it kills."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console

from phalanx.bench.http_client import TimedExchange
from phalanx.cli import demo

BURST = [0.0] * 10
STOOD_STILL = [*[0.0] * demo.KILL_AFTER, 3.0, 3.1]


def interrupt(monkeypatch: pytest.MonkeyPatch, *arrivals: list[float]) -> tuple[str, list[int]]:
    """What the demo prints if the long answer arrives like this, time after time; and what it killed."""
    killed: list[int] = []
    pids = iter(range(101, 200))
    left = iter(arrivals)
    monkeypatch.setattr("os.kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(demo, "_ranks", lambda _: [{"rank": 0, "pid": 1}, {"rank": 1, "pid": next(pids)}])

    async def answer(prompt: str, show_piece: Any, **_: Any) -> TimedExchange:
        at = [0.0] if prompt == demo.WARM_UP else next(left)
        for _piece in at:
            show_piece("a ")
        return TimedExchange(
            sent=0.0, arrivals=tuple(at), text="a " * len(at), finish_reason="stop", prompt_tokens=1,
            completion_tokens=len(at), ended=at[-1],
        )  # fmt: skip

    console = Console(highlight=False, soft_wrap=True, record=True)
    text = asyncio.run(demo._interrupted_answer(console, "http://x/v1", "Tell me.", answer))
    assert text == "a " * len(STOOD_STILL)
    return console.export_text(), killed


def test_an_answer_that_a_kill_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, killed = interrupt(monkeypatch, STOOD_STILL)
    assert "stood still for 3.0 s" in shown and killed == [101]


def test_an_answer_that_was_here_before_the_kill_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, killed = interrupt(monkeypatch, BURST, BURST[: demo.KILL_AFTER], STOOD_STILL)
    assert shown.count("The whole answer was here before the rank was dead") == 2
    assert shown.count("stood still") == 1 and killed == [101, 102, 103]


def test_bursts_alone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(demo.DemoFailed, match=r"in one burst.*less to do"):
        interrupt(monkeypatch, *[BURST] * demo.TRIES)
