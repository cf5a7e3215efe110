"""A transport that lingers: while a client still sends, for so many bytes and for so long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from phalanx.http import lingering
from phalanx.http.lingering import LINGER_BYTES, LingeringTransport


class Inner(asyncio.Transport):
    """Notes what is done to it."""

    def __init__(self, *, tls: bool = False, is_reset: bool = False) -> None:
        super().__init__({"sslcontext": "one"} if tls else {})
        self.done: list[str] = []
        self._is_reset = is_reset

    def is_closing(self) -> bool:
        return "close" in self.done

    def close(self) -> None:
        self.done.append("close")

    def write(self, data: Any) -> None:
        self.done.append(f"write {data!r}")

    def write_eof(self) -> None:
        self.done.append("write_eof")
        if self._is_reset:
            raise OSError("Transport endpoint is not connected")

    def abort(self) -> None:
        self.done.append("abort")

    def resume_reading(self) -> None:
        self.done.append("resume_reading")

    def pause_reading(self) -> None:
        self.done.append("pause_reading")


def test_a_client_that_has_sent_all_is_closed_at_once():
    inner = Inner()
    transport = LingeringTransport(inner, lambda: False)
    transport.write(b"a")
    transport.close()
    assert inner.done == ["write b'a'", "close"] and transport.is_closing()


@pytest.mark.parametrize("tls", [False, True])
def test_the_rest_is_taken_in_up_to_a_number_of_bytes(tls):
    async def scenario() -> None:
        inner = Inner(tls=tls)
        transport = LingeringTransport(inner, lambda: True)
        transport.drop(LINGER_BYTES)  # what came before does not count
        transport.close()
        before = ["resume_reading"] if tls else ["write_eof", "resume_reading"]
        assert transport.is_closing() and inner.done == before
        transport.write(b"late")
        transport.pause_reading()
        transport.close()
        transport.drop(LINGER_BYTES)
        assert inner.done == before
        transport.drop(1)
        assert inner.done == [*before, "close"]

    asyncio.run(scenario())


def test_the_rest_is_taken_in_for_a_time(monkeypatch):
    monkeypatch.setattr(lingering, "LINGER_S", 0.01)

    async def scenario() -> None:
        inner = Inner()
        LingeringTransport(inner, lambda: True).close()
        while not inner.is_closing():
            await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_a_client_that_has_reset_the_connection_is_closed_at_once():
    """Its reset is not read while reading is paused: without an end the connection would keep its place for ever."""
    inner = Inner(is_reset=True)
    transport = LingeringTransport(inner, lambda: True)
    transport.close()
    assert inner.done == ["write_eof", "abort"] and transport.is_closing()


def test_nothing_is_read_while_either_side_does_not_want_it():
    """aiohttp goes on once its buffers have room; what waits for an answer before does not."""
    inner = Inner()
    transport = LingeringTransport(inner, lambda: True)
    transport.hold_reading(True)
    transport.pause_reading()
    transport.resume_reading()
    assert set(inner.done) == {"pause_reading"}
    transport.hold_reading(False)
    assert inner.done.pop() == "resume_reading"
    transport.pause_reading()
    transport.hold_reading(False)
    assert set(inner.done) == {"pause_reading"}
