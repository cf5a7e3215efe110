"""Who else connects to the ports of a group's backend: strays, ranks of another job, an earlier start (A1, F1)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.driver import PATIENT, Driver, ask

from phalanx.config import EngineConfig
from phalanx.dist.collective_backend import ring_hostfile
from phalanx.dist.ports import free_ports
from phalanx.environment import environment
from phalanx.supervision import rank_launcher
from phalanx.supervision.process import EngineProcess

NOISE = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\xff" * 5000]


@contextmanager
def strays(ports: list[int]) -> Iterator[list[int]]:
    """Something that connects to every port once it is open, says something, and stays. Yields the ports reached."""
    over = threading.Event()
    reached: list[int] = []

    def haunt(port: int, noise: bytes) -> None:
        while not over.wait(0.001):
            with socket.socket() as stray:
                if stray.connect_ex(("127.0.0.1", port)) == 0:
                    reached.append(port)
                    try:
                        stray.sendall(noise)
                        over.wait()
                    except OSError:
                        continue

    threads = [threading.Thread(target=haunt, args=(port, noise)) for port in ports for noise in NOISE]
    for thread in threads:
        thread.start()
    try:
        yield reached
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def known_ports(monkeypatch):
    """The ports that the first start will use; later ones take fresh ones."""
    real, ports = rank_launcher.free_ports, []

    def first_known(count: int) -> list[int]:
        taken, ports[:] = ports[:count], []
        return taken or real(count)

    monkeypatch.setattr(rank_launcher, "free_ports", first_known)

    def choose(count: int) -> list[int]:
        ports[:] = real(count)
        return list(ports)

    return choose


def generate(config: EngineConfig) -> tuple[list[int], list[str]]:
    """Start, answer one request, end: its tokens, and why the engine went down before."""

    async def main() -> tuple[list[int], list[str]]:
        engine = EngineProcess(config)
        driver = Driver(engine)
        await engine.start()
        try:
            await driver.until(lambda: driver.ready.is_set() or (driver.downs and not driver.downs[-1][1]))
            (tokens,) = await driver.generate(ask("a", [5, 6, 7], 20))
            return tokens, [reason for reason, _ in driver.downs]
        finally:
            await engine.close()

    return asyncio.run(main())


def config_for(path, backend: str, ranks: int = 2, **more) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        kv_cache_gb=0.1,
        prefix_cache_gb=0.0,
        tensor_parallel_size=ranks,
        backend=backend,
        **{**PATIENT, **more},
    )


def test_strays_on_a_ring_cost_a_start_and_no_crash_and_the_next_start_takes_other_ports(
    group_model, known_ports, caplog
):
    def play(join_seconds: float) -> list[str]:
        caplog.clear()
        ports[:] = known_ports(2)
        with strays(ports) as reached:
            config = config_for(group_model, "ring", join_seconds=join_seconds, inject="slow:rank=0")
            tokens, downs = generate(config)
        assert reached and len(tokens) == 20 and not downs
        return [record.getMessage() for record in caplog.records if "start again on other" in record.getMessage()]

    ports: list[int] = []
    if len(found := play(12.0)) > 1:  # a start without strays missed the limit as well
        found = play(60.0)
    (said,) = found
    assert "could not join" in said or "could not start" in said or "connected to" in said
    assert "rank " in said and any(f"127.0.0.1:{port}" in said for port in ports)


JOIN = """
import sys, logging
from phalanx.dist.group import join
from phalanx.errors import GroupError
rank, nonce = int(sys.argv[1]), int(sys.argv[2])
try:
    join("ring", rank, 2, nonce, where="here", deadline_s=120)
except GroupError as error:
    print(error)
    sys.exit(75)
"""


def test_two_jobs_that_cross_on_one_ring_notice(tmp_path):
    """MLX connects them without a word (SO_REUSEPORT); the nonce tells. Every ring of the tests joins with one."""
    hostfile = tmp_path / "ring.json"
    hostfile.write_text(ring_hostfile([f"127.0.0.1:{port}" for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, str(rank), str(nonce)],
            env={**environment(), "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, nonce in enumerate((7, 8))
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [75, 75], said
    assert all("another job" in text for text in said)
