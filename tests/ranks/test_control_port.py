"""Real rank processes that meet on a TCP port, as on several machines, while strangers and impostors knock at it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.driver import Driver, ask
from support.reference import job, reference_greedy

from phalanx.dist.collective_backend import ring_hostfile
from phalanx.dist.ports import free_ports
from phalanx.errors import ExitCode
from phalanx.supervision.attach import AttachedEngine
from phalanx.tls.certificates import make_credentials
from phalanx.tls.host_credentials import Credentials, write_credentials

WAIT_S = 120.0
NOISE = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\xff" * 5000]
FOREIGN = "shows a certificate that is not of this group"


class Ranks:
    """Ranks of one start of two on a ring, each started by hand."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.socket = directory / "engine.sock"
        self._directory = directory
        self.port, *ring = free_ports(3)
        hostfile = directory / "ring.json"
        hostfile.write_text(ring_hostfile([f"127.0.0.1:{port}" for port in ring]))
        config = {"model": str(model), "kv_cache_gb": 0.1, "prefix_cache_gb": 0.0, "tensor_parallel_size": 2}
        config["heartbeat_timeout_seconds"] = 30.0
        group = {"size": 2, "backend": "ring", "nonce": 5, "control": f"127.0.0.1:{self.port}", "ranks_here": 2}
        self._command = [sys.executable, "-m", "phalanx", "rank", str(model), "--socket", str(self.socket)]
        self._command += ["--group", json.dumps(group)]
        self._config = config
        self._variables = {**os.environ, "MLX_HOSTFILE": str(hostfile)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, rank: int, credentials: Credentials, join_seconds: float = WAIT_S) -> None:
        file = self._directory / f"{name}.credentials"
        write_credentials(file, credentials)
        words = ["--rank", str(rank), "--credentials", str(file)]
        words += ["--config", json.dumps({**self._config, "join_seconds": join_seconds})]
        with (self._directory / name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*self._command, *words], env={**self._variables, "MLX_RANK": str(rank)}, stderr=log
            )

    def log(self, name: str) -> str:
        return (self._directory / name).read_text(errors="replace")

    def logged(self, name: str, line: str) -> None:
        """Wait until a process has logged this."""
        deadline = time.monotonic() + WAIT_S
        while line not in self.log(name):
            assert self.processes[name].poll() is None and time.monotonic() < deadline, self.log(name)
            time.sleep(0.02)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def strangers(port: int) -> Iterator[None]:
    """Processes connect to a port again and again, say something, and stay."""
    over = threading.Event()

    def knock(noise: bytes) -> None:
        while not over.wait(0.01):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stray:
                stray.sendall(noise)
                while not over.is_set() and stray.recv(4096):
                    pass

    threads = [threading.Thread(target=knock, args=(noise,)) for noise in NOISE]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def ranks(group_model: Path, tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(group_model, tmp_path)
    yield ranks
    ranks.close()


def test_strangers_keep_no_rank_out_and_no_impostor_gets_in(group_model: Path, ranks: Ranks):
    own, others = make_credentials(["a", "b"]), make_credentials(["a", "b"])
    thief = Credentials(key=others[1].key, place=1, certificates=(own[0].certificates[0], others[1].certificates[1]))

    async def main() -> list[int]:
        engine = AttachedEngine(ranks.socket, stall_s=WAIT_S)
        driver = Driver(engine)
        await engine.start()
        try:
            ranks.start("leader", 0, own[0])
            ranks.start("another cluster's", 1, others[1], join_seconds=10.0)
            ranks.start("thief", 1, thief, join_seconds=10.0)
            await asyncio.to_thread(ranks.logged, "leader", FOREIGN)  # before noise fills what the log has room for
            with strangers(ranks.port):
                for line in ("sent an HTTP request", "does not speak TLS"):
                    await asyncio.to_thread(ranks.logged, "leader", line)
                ranks.start("worker", 1, own[1])
                await driver.until(lambda: driver.ready.is_set() or driver.downs)
                assert driver.ready.is_set(), ranks.log("leader")
                (tokens,) = await driver.generate(ask("a", [5, 6, 7], 20))
            ranks.processes["worker"].send_signal(signal.SIGKILL)
            await driver.until(lambda: bool(driver.downs))
            return tokens
        finally:
            await engine.close()

    tokens = asyncio.run(main())
    ends = {name: process.wait(WAIT_S) for name, process in ranks.processes.items()}
    assert [tokens] == reference_greedy(group_model, [job([5, 6, 7], 20)])
    assert ends["leader"] == ExitCode.PEER_LOST
    assert "rank 1 (" in ranks.log("leader") and "lost its connection" in ranks.log("leader")
    assert ends["thief"] == ends["another cluster's"] == ExitCode.GROUP
    assert f"the process there {FOREIGN}" in ranks.log("another cluster's")
    assert "does not accept the certificate of this end" in ranks.log("thief")


@pytest.mark.parametrize(
    ("control", "credentials", "said"),
    [
        ("127.0.0.1:1", None, "each needs credentials"),
        ("127.0.0.1:1", 0, "are those of host 0 of 2, but this is rank 1 of 2"),
        ("/nowhere/control", 1, "the ranks meet on /nowhere/control. Leave them out"),
    ],
)
def test_a_rank_without_its_own_credentials_does_not_start(tmp_path, group_model, control, credentials, said):
    words = [sys.executable, "-m", "phalanx", "rank", str(group_model), "--socket", str(tmp_path / "s"), "--rank", "1"]
    words += ["--group", json.dumps({"size": 2, "backend": "ring", "nonce": 1, "control": control})]
    if credentials is not None:
        write_credentials(tmp_path / "c", make_credentials(["a", "b"])[credentials])
        words += ["--credentials", str(tmp_path / "c")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == ExitCode.CONFIG and said in " ".join(done.stderr.split())
