"""The socket on which a server waits for the leader of an external launcher."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.dist.frames import read_frame
from phalanx.errors import ConfigError
from phalanx.supervision import engine_connection
from phalanx.supervision.attach import AttachedEngine
from phalanx.supervision.fake_engine import FAKE_INFO
from phalanx.supervision.wire import engine_codec
from phalanx.types import Batch, EngineStats, ModelInfo, Pong, Ready


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "engine.sock"


def modes_while_listening(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The permissions of the socket at every call that lets others connect."""
    found: list[int] = []
    listen = socket.socket.listen

    def observed(self: socket.socket, *backlog: int) -> None:
        found.append(stat.S_IMODE(path.stat().st_mode))
        listen(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", observed)
    return found


def test_it_is_private_before_anybody_can_connect(path, monkeypatch):
    modes = modes_while_listening(path, monkeypatch)

    async def main() -> None:
        engine = AttachedEngine(path, stall_s=1.0)
        await engine.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.close()
        assert await reader.read() == b""
        await engine.close()

    before = os.umask(0)
    try:
        asyncio.run(main())
    finally:
        os.umask(before)
    assert modes and set(modes) == {0o600}
    assert not path.exists()


def test_what_lies_there_is_named_and_kept(path):
    path.write_text("mine")

    async def start_and_close() -> None:
        engine = AttachedEngine(path, stall_s=1.0)
        with pytest.raises(ConfigError, match=r"--attach .*engine\.sock"):
            await engine.start()
        await engine.close()

    asyncio.run(start_and_close())
    assert path.read_text() == "mine"


def test_a_leader_that_disconnects_is_lost_at_once_and_down_once_it_is_known_why(path):
    told: list[tuple[str, str]] = []
    engine = AttachedEngine(path, stall_s=60.0)
    engine.when_lost.append(lambda: told.append(("lost", engine.state.phase)))

    class Listener:
        def on_batch(self, batch: Batch) -> None:
            told.append(("batch", engine.state.phase))

        def on_ready(self, info: ModelInfo) -> None:
            told.append(("ready", engine.state.phase))

        def on_down(self, reason: str, will_restart: bool) -> None:
            told.append((reason, engine.state.phase))

    async def main() -> None:
        engine.subscribe(Listener())
        await engine.start()
        for sent in (b"", engine_codec().encode(Ready(FAKE_INFO, 1))):  # one that never served is not lost
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(sent)
            writer.close()
            while not (told and told[-1][0] == "the engine disconnected"):
                await asyncio.sleep(0.001)
            told.append(("again", engine.state.phase))
        await engine.close()

    asyncio.run(main())
    down, again = ("the engine disconnected", "restarting"), ("again", "restarting")
    assert told == [down, again, ("ready", "ready"), ("lost", "restarting"), down, again]


def test_a_leader_that_tells_tokens_and_answers_no_ping_is_stuck(path, monkeypatch):
    """As where one rank executes plans and withholds its report."""
    now = [100.0]
    monkeypatch.setattr(engine_connection, "PING_PERIOD_S", 0.01)
    monkeypatch.setattr(engine_connection, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    engine = AttachedEngine(path, stall_s=60.0)
    codec = engine_codec()

    async def main() -> None:
        await engine.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(codec.encode(Ready(FAKE_INFO, 1)))
        first = codec.decode(await read_frame(reader))
        writer.write(codec.encode(Pong(first.nonce, EngineStats())))
        second = codec.decode(await read_frame(reader))
        for passed in range(4):
            assert engine.state.phase == "ready" and engine.state.last_pong_age_s == 20 * passed
            now[0] += 20
            writer.write(codec.encode(Batch(passed, [])))
            await asyncio.sleep(0.05)
        while engine.state.phase == "ready":
            await asyncio.sleep(0.001)
        assert second.nonce != first.nonce
        assert engine.state.reason == "the engine did not answer for 80 s"
        writer.close()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_ping_that_waits_for_the_next_report_is_no_silence(path, monkeypatch):
    """Ranks report, which answers the pings of before; those that came meanwhile have the next report."""
    now = [100.0]
    monkeypatch.setattr(engine_connection, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(engine_connection, "PING_PERIOD_S", 1e6)
    engine = AttachedEngine(path, stall_s=60.0)
    codec = engine_codec()

    async def main() -> None:
        await engine.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(codec.encode(Ready(FAKE_INFO, 1)))
        while engine.state.phase != "ready":
            await asyncio.sleep(0.001)
        early, late = asyncio.create_task(engine.ping()), asyncio.create_task(engine.ping())
        nonces = [codec.decode(await read_frame(reader)).nonce for _ in range(2)]
        now[0] += 20
        assert engine.state.last_pong_age_s == 20
        writer.write(codec.encode(Pong(nonces[0], EngineStats())))
        await early
        now[0] += 5
        assert not late.done() and engine.state.last_pong_age_s == 5
        writer.write(codec.encode(Pong(nonces[1], EngineStats())))
        await late
        writer.close()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
