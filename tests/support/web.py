"""A real HTTP server in a thread, whose answers a test defines."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Any], tuple[int, str]]
"""(path, JSON body or None) -> (status, body). A body that starts with "data:" or ":" is an event stream."""


@contextmanager
def web_server(answer: Answer) -> Iterator[str]:
    """Run the server; yields its base URL, which ends in /v1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: Any) -> None:
            status, text = answer(self.path, body)
            kind = "text/event-stream" if text.startswith(("data:", ":")) else "application/json"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def raw_server(*pieces: bytes, endless: bytes = b"", silent: bool = False) -> Iterator[str]:
    """A server that sends these bytes to every request, and then `endless` until the client leaves. Yields its URL.

    Args:
        silent: it sends nothing, and keeps the connection.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while b"\r\n\r\n" not in self.request.recv(1 << 16):
                pass
            with suppress(OSError):
                if silent:
                    self.request.recv(1)
                for piece in pieces:
                    self.request.sendall(piece)
                while endless:
                    self.request.sendall(endless)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def events(*payloads: Any, done: bool = True) -> str:
    """An event stream of these JSON values."""
    lines = [f"data: {json.dumps(payload)}\n\n" for payload in payloads]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""])


def chunk(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    """A chat completion chunk."""
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """The chunk with the usage, which follows the last one with text."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
