"""Frames: whole, broken, foreign."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Any, get_args

import pytest

from phalanx.dist.frames import MAX_FRAME, VERSION, read_frame, receive_frame
from phalanx.dist.peers import Message
from phalanx.errors import EngineError
from phalanx.supervision.agent_protocol import FromAgent, ToAgent
from phalanx.supervision.wire import engine_codec, server_codec
from phalanx.types import Batch, Cancel, Finished, FromEngine, Ping, PromptScored, ToEngine, Tokens

HEADER = struct.Struct("<BI")  # version, length

NAMES = {
    ToEngine: "Submit Cancel Finish Ping ResetPrefixCache KeepOwners Shutdown",
    FromEngine: "Loading Ready Batch Pong Failed",
    Tokens | PromptScored | Finished: "Tokens PromptScored Finished",
    Message: "Hello Admitted Welcome Refused Payload Notice Heartbeat Goodbye",
    ToAgent: "AskPorts RunRank RunDaemon Signal KeepAlive",
    FromAgent: "Welcome Ports Started Output Ended KeepAlive",
}
"""What messages between processes are called on the wire."""


@pytest.mark.parametrize(("messages", "names"), NAMES.items(), ids=NAMES.values())
def test_messages_keep_their_names_on_the_wire_whatever_their_classes_are_called(messages: Any, names: str):
    """A new name needs a new version of its protocol: hosts would call each other strangers, and not say why."""
    assert [kind.__struct_config__.tag for kind in get_args(messages)] == names.split()


def test_messages_survive_the_wire_both_ways():
    batch = Batch(4, [Tokens("a", 0, [1, 2])])
    assert server_codec().decode(engine_codec().encode(batch)[HEADER.size :]) == batch
    assert engine_codec().decode(server_codec().encode(Cancel("a"))[HEADER.size :]) == Cancel("a")


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\xa4type\xa4Nope", b"hello"])
def test_a_foreign_message_is_refused(payload: bytes):
    with pytest.raises(EngineError, match="Unreadable message"):
        engine_codec().decode(payload)


def test_blocking_reader_takes_frames_in_pieces_and_sees_the_end():
    ours, theirs = socket.socketpair()
    frames = b"".join(engine_codec().encode(Ping(i)) for i in range(50))

    def trickle():
        for i in range(0, len(frames), 7):
            theirs.sendall(frames[i : i + 7])
        theirs.sendall(HEADER.pack(VERSION, 5)[:3])  # half a header
        theirs.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    got = [engine_codec().decode(receive_frame(ours)) for _ in range(50)]
    assert got == [Ping(i) for i in range(50)] and receive_frame(ours) is None
    thread.join()
    ours.close()


def test_an_announced_giant_frame_is_refused():
    ours, theirs = socket.socketpair()
    theirs.sendall(HEADER.pack(VERSION, MAX_FRAME + 1))
    with pytest.raises(EngineError, match="limit"):
        receive_frame(ours)
    ours.close(), theirs.close()


def test_async_reader():
    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(engine_codec().encode(Ping(3)) + b"\x01")
        reader.feed_eof()
        assert engine_codec().decode(await read_frame(reader)) == Ping(3)
        assert await read_frame(reader) is None

    asyncio.run(main())
