"""One ASGI request by hand: the test sees what is written as it is written; the client can leave, or stop reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


class Connection:
    """Asks at once. `app` is called in this event loop, as a task.

    Args:
        more: headers.
    """

    def __init__(self, app: Any, path: str, body: dict[str, Any], more: Mapping[str, str] = {}) -> None:
        self.left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._sent = b""
        self._expected = 0  # bytes up to the end of what was expected last
        named = {"content-type": "application/json", **more}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "app": app}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        """All that was written."""
        return self._sent.decode()

    async def expect(self, text: str) -> None:
        """Wait until the app has written this after what was expected last."""
        wanted = text.encode()
        while (at := self._sent.find(wanted, self._expected)) < 0:
            assert not self.task.done(), f"{text!r} was never written, but {self.text}"
            await asyncio.sleep(0.001)
        self._expected = at + len(wanted)

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        self._sent += message.get("body", b"")
