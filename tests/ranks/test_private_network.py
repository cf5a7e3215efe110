"""On one machine nobody outside can connect to a group: neither to its ranks, nor to Open MPI's daemon.

Real groups of both backends are looked at in `test_faults.py`, before they fail.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from groups import network

from phalanx.dist import private_network
from phalanx.dist.collective_backend import is_private_network_possible
from phalanx.dist.private_network import REFUSED, in_private_network

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")


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
