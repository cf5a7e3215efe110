"""One request by hand: the test sees what is written as it is written; the client can leave, or stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from support.serving import LoopClient

FEW_BYTES = 4096  # that the kernel takes in the place of a client that does not read


class Connection:
    """Asks at once. Of HTTP/1.0, whose answers have no framing: what comes behind their heads is the answer.

    Args:
        more: headers.
    """

    def __init__(self, client: LoopClient, path: str, body: dict[str, Any], more: Mapping[str, str] = {}) -> None:
        self.left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._received = b""
        self._expected = 0  # bytes up to the end of what was expected last
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(data)), **more}
        lines = [f"POST {path} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items())]
        self.task = asyncio.create_task(self._ask(client.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + data))

    @property
    def text(self) -> str:
        """All that was written behind the head."""
        return self._received.partition(b"\r\n\r\n")[2].decode()

    async def expect(self, text: str) -> None:
        """Wait until the server has written this after what was expected last."""
        wanted = text.encode()
        while (at := self._received.find(wanted, self._expected)) < 0:
            assert not self.task.done(), f"{text!r} was never written, but {self.text}"
            await asyncio.sleep(0.001)
        self._expected = at + len(wanted)

    async def _ask(self, port: int, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FEW_BYTES)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, request)
            leaving = asyncio.create_task(self.left.wait())
            while not leaving.done():
                await self.reading.wait()
                reading = asyncio.create_task(loop.sock_recv(connection, FEW_BYTES))
                await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    await asyncio.wait([reading])
                elif data := reading.result():
                    self._received += data
                else:
                    leaving.cancel()
                    return


async def status_of_endless(client: LoopClient, path: str, pieces: Iterable[bytes], **headers: str) -> int:
    """The status of the answer to a body in chunks, of which these come before the answer, and none after it."""
    source, out = await asyncio.open_connection("127.0.0.1", client.port)
    named = {"Host": "localhost", "Content-Type": "application/json", "Transfer-Encoding": "chunked", **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in named.items())]
    out.write("\r\n".join(lines).encode() + b"\r\n\r\n")
    for piece in pieces:
        out.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    status = int((await source.readline()).split()[1])
    out.close()
    return status
