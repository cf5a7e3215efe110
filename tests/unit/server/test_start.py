"""The order of a start, and how one ends that fails half-way: no engine is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from support.serving import CONFIG

from phalanx.errors import ConfigError, ExitCode, ModelUnsupported
from phalanx.http.listening import bind
from phalanx.server.prompts.grammar_checks import GrammarChecks
from phalanx.server.start import ending_signals, serve
from phalanx.supervision.fake_engine import FakeEngine
from phalanx.text.tokenizer import Tokenizer

WAIT_S = 120.0


class Recording(FakeEngine):
    """Says when it is launched, started and closed; ends the server by a signal as soon as it is started."""

    def __init__(self, said: list[str], number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(autostart=False)
        self._said = said
        self._number = number

    async def launch(self) -> None:
        self._said.append("launched")

    async def start(self) -> None:
        self._said.append("started")
        os.kill(os.getpid(), self._number)

    async def close(self) -> None:
        await super().close()
        self._said.append("closed")


@pytest.fixture(autouse=True)
def heeds_signals() -> Iterator[None]:
    """The handlers of a process in a terminal: in the background SIGINT is ignored, under `nohup` SIGHUP is."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_engine_loads_while_the_tokenizer_does(tokenizer: Tokenizer, number: signal.Signals) -> None:
    said: list[str] = []

    def load() -> Tokenizer:
        said.append("tokenizer")
        return tokenizer

    assert serve(CONFIG, Recording(said, number), load) == ExitCode.OK
    assert said == ["launched", "tokenizer", "started", "closed"]


def test_grammars_are_prepared_while_the_engine_loads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(GrammarChecks, "prepare", lambda self: said.append("prepared"))
    assert serve(CONFIG, Recording(said), lambda: tokenizer) == ExitCode.OK
    assert sorted(said) == ["closed", "launched", "prepared", "started"]
    assert said[0] == "launched" and said[-1] == "closed"


def test_a_bad_tokenizer_ends_the_engine(tokenizer: Tokenizer) -> None:
    said: list[str] = []

    def load() -> Tokenizer:
        raise ModelUnsupported("no tokenizer")

    with pytest.raises(ModelUnsupported, match="no tokenizer"):
        serve(CONFIG, Recording(said), load)
    assert said == ["launched", "closed"]


def wait_until_closed(said: list[str]) -> None:
    """For a tokenizer that is still loading when a signal ends the start."""
    deadline = time.monotonic() + WAIT_S
    while "closed" not in said and time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_engine_that_cannot_be_launched_is_closed(tokenizer: Tokenizer) -> None:
    said: list[str] = []

    class Without(Recording):
        async def launch(self) -> None:
            raise ConfigError("--backend mpi: no mpirun")

    with pytest.raises(ConfigError, match="no mpirun"):
        serve(CONFIG, Without(said), lambda: tokenizer)
    assert said == ["closed"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_ends_the_engine(tokenizer: Tokenizer, number: signal.Signals) -> None:
    said: list[str] = []

    def load() -> Tokenizer:
        os.kill(os.getpid(), number)
        wait_until_closed(said)
        return tokenizer

    assert serve(CONFIG, Recording(said), load) == ExitCode.OK
    assert said == ["launched", "closed"]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_second_signal_while_the_engine_is_closed_does_not_end_the_process(tokenizer: Tokenizer) -> None:
    said: list[str] = []

    class Slow(Recording):
        async def close(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await super().close()

    assert serve(CONFIG, Slow(said), lambda: tokenizer) == ExitCode.OK
    assert said == ["launched", "started", "closed"]


def test_nohup_keeps_a_server_when_its_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGTERM,)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ending_signals() == (signal.SIGTERM, signal.SIGHUP)


def test_ctrl_c_during_the_start_ends_the_engine(tokenizer: Tokenizer) -> None:
    said: list[str] = []

    def load() -> Tokenizer:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until_closed(said)
        return tokenizer

    with pytest.raises(KeyboardInterrupt):
        serve(CONFIG, Recording(said), load)
    assert said == ["launched", "closed"]


def test_a_taken_port_is_said_before_an_engine_is_launched(tokenizer: Tokenizer) -> None:
    said: list[str] = []
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="Cannot listen"):
        serve(replace(CONFIG, port=taken.getsockname()[1]), Recording(said), lambda: tokenizer)
    assert said == []
