"""On one machine nobody outside can connect to a group: neither to its ranks, nor to Open MPI's daemon."""

from __future__ import annotations

import asyncio
import ipaddress
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.driver import PATIENT, Driver, ask

from phalanx.config import EngineConfig
from phalanx.dist import private_network
from phalanx.dist.backend import is_private_network_possible
from phalanx.dist.private_network import REFUSED, in_private_network
from phalanx.supervision.process import EngineProcess

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")


def network(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def reachable(process: psutil.Process) -> list[str]:
    """Addresses on which a process listens in this network, other than loopback."""
    if network(process.pid) != network("self"):
        return []
    listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [f"{process.name()} {at.ip}:{at.port}" for at in listening if not ipaddress.ip_address(at.ip).is_loopback]


@LINUX
@pytest.mark.parametrize("backend", ["mpi", "ring"])
def test_nothing_but_loopback_listens(group_model, backend):
    config = EngineConfig(
        model=str(group_model),
        kv_cache_gb=0.1,
        prefix_cache_gb=0.0,
        tensor_parallel_size=2,
        backend=backend,
        **PATIENT,
    )

    async def main() -> tuple[list[str], list[str], list[int]]:
        engine = EngineProcess(config)
        driver = Driver(engine)
        await engine.start()
        try:
            await driver.until(lambda: driver.ready.is_set() or driver.downs)
            (tokens,) = await driver.generate(ask("a", [5, 6, 7], 4))
            family = psutil.Process().children(recursive=True)
            return [one.name() for one in family], [at for one in family for at in reachable(one)], tokens
        finally:
            await engine.close()

    names, found, tokens = asyncio.run(main())
    assert ("prterun" in names) == (backend == "mpi") and len(names) >= 2
    assert found == []
    assert len(tokens) == 4


@LINUX
def test_a_system_that_refuses_late_leaves_the_process_in_its_network(monkeypatch):
    """Ubuntu 24.04 allows an ordinary user the namespaces, and then neither to map users nor to raise loopback."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("fcntl.ioctl", refuse)
    before = network("self")
    assert not private_network.enter()
    assert network("self") == before


@LINUX
def test_a_system_that_allows_no_private_network_says_so_and_runs_the_command():
    """A user namespace may be forbidden to have further ones."""
    limits = " ".join(f"/proc/sys/user/max_{kind}_namespaces" for kind in ("user", "net"))
    script = f"echo 0 | tee {limits} && exec {shlex.join(in_private_network(['/bin/echo', 'ran']))}"
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script]
    limited = subprocess.run(command, capture_output=True, text=True)
    if "ran" not in limited.stdout:
        pytest.skip(f"no user namespaces here: {limited.stderr}")
    assert limited.returncode == 0 and REFUSED in limited.stderr
    probe = f"echo 0 | tee {limits} && {shlex.join(in_private_network([]))}"
    assert subprocess.run([*command[:-1], probe], capture_output=True).returncode == 1


@LINUX
def test_whether_a_private_network_is_possible_is_known_before():
    said = subprocess.run(in_private_network(["/bin/true"]), capture_output=True, text=True).stderr
    assert is_private_network_possible() == (REFUSED not in said)
