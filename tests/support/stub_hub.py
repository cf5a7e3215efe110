"""A model hub on this machine, for huggingface_hub's client: repositories of a few files, and the faults of a network.

Set HF_ENDPOINT to its `url`. Large files are redirected to a second name of this machine, as the hub does to its CDN.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", "tokenizer.json")
"""Endings of the files that the hub keeps apart, by their SHA-256."""


def files_of_a_model(weights: bytes = b"weights") -> dict[str, bytes]:
    """What looks like a model to whatever reads no weights."""
    config = {"model_type": "llama", "max_position_embeddings": 4096, "quantization": {"bits": 4, "group_size": 64}}
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"{}",
        "README.md": b"# not served",
        "model.safetensors": weights,
    }


@dataclass
class StubHub:
    """What it has, what it does wrong, and what it was asked."""

    repositories: dict[str, dict[str, bytes]]
    url: str = ""
    commit: str = COMMIT
    token: str | None = None  # needed for everything
    stops_at: int | None = None  # bytes of a large file after which nothing comes until `go_on`
    sends: dict[str, bytes] = field(default_factory=dict)  # file -> what comes in its place
    announces: dict[str, int] = field(default_factory=dict)  # repository -> bytes that each file has, it says
    etags: dict[str, str] = field(default_factory=dict)  # small file -> the header ETag in the place of its checksum
    lies: dict[str, object] = field(default_factory=dict)  # fields of its answer about a repository and of each file
    fails: bytes | None = None  # the body of a status 500 about every repository
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, the header Range
    leaked: bool = False  # the second name was told the token
    go_on: threading.Event = field(default_factory=threading.Event)

    def ranges(self) -> list[str]:
        """Of the requests for large files."""
        return [asked for method, path, asked in self.asked if method == "GET" and path.startswith("/cdn/")]


def variables_of(hub: StubHub, home: Path) -> dict[str, str]:
    """The environment of a command that knows this hub only, and has its caches in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_CACHE"))}
    own = {"HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "HF_ENDPOINT": hub.url}
    return {**kept, **own, "no_proxy": "*"}


def is_large(name: str) -> bool:
    return name.endswith(LARGE)


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_large(name) else git_hash(data)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, hub = urlsplit(self.path).path, self.hub
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        given = self.headers.get("Authorization")
        if path.startswith("/cdn/"):
            hub.leaked |= given is not None
            self._large(path)
        elif hub.token is not None and given != f"Bearer {hub.token}":
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"} if given is None else {})
        elif path.startswith("/api/models/"):
            self._about(path.removeprefix("/api/models/"))
        elif path.startswith("/api/"):  # what the client asks about itself
            self._answer(404, b"")
        else:
            repository, _, rest = path[1:].partition("/resolve/")
            self._file(repository, *rest.split("/", 1))

    def _about(self, rest: str) -> None:
        repository = "/".join(rest.split("/")[:2])
        files = self.hub.repositories.get(repository)
        revision = rest.split("/")[3] if rest.count("/") > 2 else "main"
        if self.hub.fails is not None:
            self._answer(500, self.hub.fails)
        elif files is None:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", self.hub.commit):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in rest:
            tree = [
                {"type": "file", "path": name, "oid": git_hash(data), "size": len(data)}
                | ({"lfs": {"oid": _etag(name, data), "size": len(data), "pointerSize": 1}} if is_large(name) else {})
                for name, data in files.items()
            ]
            self._answer(200, json.dumps(tree).encode())
        else:
            size = self.hub.announces.get(repository)
            siblings = [
                {"rfilename": name, "size": size or len(data), "blobId": git_hash(data)}
                | (
                    {"lfs": {"sha256": _etag(name, data), "size": len(data), "pointerSize": 1}}
                    if is_large(name)
                    else {}
                )
                for name, data in files.items()
            ]
            lies = self.hub.lies
            for file in siblings:
                file.update({name: lie for name, lie in lies.items() if name in ("blobId", "rfilename", "size")})
                file.update({name: lie for name, lie in lies.items() if name in file and name == "lfs"})
            about = {"id": repository, "sha": self.hub.commit, "siblings": siblings}
            about.update({name: lie for name, lie in lies.items() if name in about})
            self._answer(200, json.dumps(about).encode())

    def _file(self, repository: str, revision: str, name: str) -> None:
        data = self.hub.repositories[repository][name]
        headers = {
            "X-Repo-Commit": self.hub.commit,
            "ETag": f'"{self.hub.etags.get(name) or _etag(name, data)}"',
            "Accept-Ranges": "bytes",
        }
        if is_large(name):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
            port = urlsplit(self.hub.url).port
            headers["Location"] = f"http://localhost:{port}/cdn/{repository}/{name}"
            self._answer(302, b"", headers)
        else:
            self._answer(200, self.hub.sends.get(name, data), headers)

    def _large(self, path: str) -> None:
        _, _, owner, repository, name = path.split("/", 4)
        data = self.hub.sends.get(name, self.hub.repositories[f"{owner}/{repository}"][name])
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(data), int(last) + 1 if last else len(data))
        body, headers = data[start:stop], {}
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        status = 206 if headers else 200
        if self.hub.stops_at is None or len(body) <= self.hub.stops_at:
            self._answer(status, body, headers)
            return
        self._head(status, len(body), headers)
        self.wfile.write(body[: self.hub.stops_at])
        self.wfile.flush()
        self.hub.go_on.wait()
        self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def stub_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[StubHub]:
    hub = StubHub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
