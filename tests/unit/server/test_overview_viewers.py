"""Viewers of a server's overview that do harm: one that does not read, and one key that takes all places."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from support.connection import FEW_BYTES
from support.serving import CONFIG, LoopClient, fake_engine, served, serving

from phalanx.http import overview_stream
from phalanx.http.connection import HttpConnection
from phalanx.http.overview_stream import MAX_VIEWERS
from phalanx.server.endpoints.overview import ServerOverview
from phalanx.server.server_app import create_app

PIECE = 100_000  # bytes of a change
CHANGES = 100
KEYED = replace(CONFIG, api_key=("one", "two"), admin_key="admin-key")


async def viewer(client: LoopClient, key: str = "") -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    """The status of a new viewer, and its connection, which takes little before it is read."""
    with socket.socket() as connecting:
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FEW_BYTES)
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", client.port))
        reader, writer = await asyncio.open_connection(sock=connecting.dup(), limit=FEW_BYTES)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET /v1/overview/events HTTP/1.1\r\nHost: 127.0.0.1\r\n{authorization}\r\n".encode())
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    return status, reader, writer


def test_a_viewer_that_does_not_read_holds_little_and_gets_the_newest_when_it_reads(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_stream, "TICK_S", 0.001)
    version, written = [0], Counter[HttpConnection]()

    def parts(self: ServerOverview, owner: str | None) -> dict[str, Any]:
        version[0] += 1
        return {"server": {"version": version[0]}, "requests/a": f"{version[0]} " * (PIECE // 5)}

    note_written = HttpConnection.note_written

    def note(self: HttpConnection, n_bytes: int) -> None:
        written[self] += n_bytes
        note_written(self, n_bytes)

    monkeypatch.setattr(ServerOverview, "parts", parts)
    monkeypatch.setattr(HttpConnection, "note_written", note)

    async def main() -> None:
        app = create_app(CONFIG, fake_engine(tokenizer), tokenizer)
        async with asyncio.timeout(120), served(app, send_buffer=FEW_BYTES) as client:
            status, slow, slow_writer = await viewer(client)
            assert status == 200
            async with client.stream("GET", "/v1/overview/events") as answer:
                n = 0
                async for line in answer.aiter_lines():
                    n += line.startswith("data: ")
                    if n == CHANGES:
                        break
            assert max(written.values()) > CHANGES * PIECE // 2
            assert min(written.values()) < 6 * PIECE, "what a viewer does not read is not made"
            seen, newest = b"", version[0]
            while True:
                seen = (seen + await slow.read(1 << 16))[-3 * PIECE :]
                numbers = [int(one.split(b"}")[0]) for one in seen.split(b'{"version":')[1:] if b"}" in one[:20]]
                if numbers and numbers[-1] >= newest:
                    break
            slow_writer.close()

    asyncio.run(main())


def test_one_key_with_five_hundred_viewers_keeps_no_other_out(tokenizer: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(240), serving(tokenizer, fake_engine(tokenizer), KEYED) as client:
            viewers = await asyncio.gather(*(viewer(client, "one") for _ in range(500)))
            assert Counter(status for status, *_ in viewers) == {200: MAX_VIEWERS, 429: 500 - MAX_VIEWERS}
            others = [await viewer(client, key) for key in ("two", "admin-key", "two")]
            assert [status for status, *_ in others] == [200, 200, 200]
            refused = await client.get("/v1/overview/events", headers={"authorization": "Bearer one"})
            assert refused.status_code == 429 and "pages watch already" in json.dumps(refused.json())
            for _, _, writer in viewers:
                writer.close()
            while (again := await viewer(client, "one"))[0] != 200:
                again[2].close()
                await asyncio.sleep(0.01)
            for _, _, writer in (*others, again):
                writer.close()

    asyncio.run(main())
