"""The stream that pages watch: a snapshot, then what changed; shared work, none without viewers, an end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from phalanx.errors import QueueFull
from phalanx.http import overview_stream
from phalanx.http.overview_stream import MAX_VIEWERS, OverviewStream


class World:
    """Parts that a test changes, and how often they were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overview_stream, "TICK_S", 0.001)
        monkeypatch.setattr(overview_stream, "QUIET_S", 0.003)
        self.parts: dict[str, Any] = {"server": {"phase": "ready"}}
        self.asked: list[str | None] = []
        self.over = False
        self.now = 0.0
        self.refused: set[str | None] = set()
        self.stream = OverviewStream(self._parts, lambda owner: self.over or owner in self.refused, self._clock)

    def _parts(self, owner: str | None) -> dict[str, Any]:
        self.asked.append(owner)
        return dict(self.parts)

    def _clock(self) -> float:
        self.now += 1.0  # every look is a tick later
        return self.now


async def following(events: Any) -> tuple[str, Any]:
    """The next event; signs of life are passed over."""
    async for piece in events:
        if piece.startswith(b"event: "):
            head, data = piece.decode().strip().split("\n")
            return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))
    raise AssertionError("the stream has ended")


def run(scenario: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(limited())


def test_a_snapshot_comes_first_and_then_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def scenario() -> None:
        events = world.stream.open("me").events
        assert await following(events) == ("snapshot", {"server": {"phase": "ready"}})
        world.parts["requests/a"] = {"state": "queued"}
        assert await following(events) == ("change", {"set": {"requests/a": {"state": "queued"}}, "drop": []})
        world.parts["requests/a"] = {"state": "<b>\n\ndata: x"}
        del world.parts["server"]
        changed = {"set": {"requests/a": {"state": "<b>\n\ndata: x"}}, "drop": ["server"]}
        assert await following(events) == ("change", changed)
        assert set(world.asked) == {"me"}

    run(scenario())


def test_nothing_is_made_before_there_is_a_viewer_nor_after_the_last_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def scenario() -> None:
        stream = world.stream.open(None)
        assert world.asked == []
        await following(stream.events)
        stream.close()
        await stream.events.aclose()
        n = len(world.asked)
        await asyncio.sleep(0.02)
        assert len(world.asked) == n

    run(scenario())


def test_viewers_with_equal_rights_share_what_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(world.stream, "_clock", lambda: 5.0)

    async def scenario() -> None:
        for owner in ("me", "me", "you", None, "you"):
            await following(world.stream.open(owner).events)
        assert world.asked == ["me", "you", None]

    run(scenario())


def test_a_quiet_stream_says_that_it_goes_on_and_ends_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def scenario() -> None:
        events = world.stream.open(None).events
        await anext(events)
        assert (await anext(events)).startswith(b": ")
        world.over = True
        assert [piece async for piece in events if piece.startswith(b"event")] == []

    run(scenario())


def test_a_stream_ends_when_its_owners_key_is_not_accepted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def scenario() -> None:
        mine, yours = (world.stream.open(owner).events for owner in ("me", "you"))
        await following(mine)
        await following(yours)
        world.refused.add("me")
        world.parts["server"] = {"phase": "restarting"}
        assert [piece async for piece in mine if piece.startswith(b"event")] == []
        assert await following(yours) == ("change", {"set": {"server": {"phase": "restarting"}}, "drop": []})

    run(scenario())


@pytest.mark.parametrize("owner", [None, "", "me"])
def test_there_may_be_only_so_many_viewers(monkeypatch: pytest.MonkeyPatch, owner: str | None) -> None:
    world = World(monkeypatch)
    streams = [world.stream.open(owner) for _ in range(MAX_VIEWERS)]
    with pytest.raises(QueueFull):
        world.stream.open(owner)
    streams[0].close()
    world.stream.open(owner)


def test_an_owner_with_all_places_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for _ in range(MAX_VIEWERS):
        world.stream.open("me")
    for owner in ("you", None):
        world.stream.open(owner)
        world.stream.open(owner)
    with pytest.raises(QueueFull):
        world.stream.open("me")


def test_what_was_made_for_an_owner_is_dropped_with_its_last_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)

    async def scenario() -> None:
        streams = [world.stream.open(owner) for owner in ("me", "me", "you")]
        for stream in streams:
            await following(stream.events)
        for stream, left in zip(streams, ({"me", "you"}, {"you"}, set()), strict=True):
            await stream.events.aclose()
            stream.close()
            assert set(world.stream._last) == left

    run(scenario())
