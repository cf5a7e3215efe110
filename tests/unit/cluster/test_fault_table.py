"""The table of known faults: every one is recognised by its own example, and documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.faults import FAULTS, Fault, by_name, first_fault, markdown, recognise

ROOT = Path(__file__).resolve().parents[3]

SEEN = {
    "[jaccl] Changing queue pair to RTR failed with errno 22": "rdma-bridge-up",
    "RuntimeError: [jaccl] Changing queue pair to RTR failed with errno 60": "rdma-bridge-member",
    "[jaccl] Changing queue pair to RTR failed with errno 96": "rdma-gid-table",
    "[jaccl] Recv failed with errno=2": "coordinator-port",
    "[jaccl] Couldn't allocate protection domain": "rdma-ports-down",
    "libc++abi: [jaccl] The device file should start with an array": "rdma-device-file",
    "zsh:1: command not found: mlx.launch": "mlx-launch-missing",
    "bash: line 1: mlx.launch: command not found": "mlx-launch-missing",
    "rank 2 exited with code 255 while loading": "out-of-memory",
    "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@": "ssh-host-key-changed",
    "me@b: Permission denied (publickey,password,keyboard-interactive).": "ssh-key-refused",
    "ssh: connect to host b port 22: No route to host": "host-unreachable",
    "ssh: connect to host b port 22: Connection refused": "ssh-refused",
    "ssh: Could not resolve hostname b: nodename nor servname provided, or not known": "ssh-name-unknown",
    "/usr/bin/python3: No module named phalanx": "phalanx-missing",
    "ModuleNotFoundError: No module named 'mlx'": "engine-missing",
    "ERROR: Cannot listen on 0.0.0.0 port 8000: Address already in use.": "port-taken",
    "rank 1 was ended by SIGKILL (out of memory, or killed by hand)": "out-of-memory",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_recognised_by_its_example(fault: Fault):
    assert recognise(fault.example) == fault
    assert fault.cause.endswith(".") and fault.remedy.endswith((".", ")"))


@pytest.mark.parametrize(("line", "name"), SEEN.items(), ids=SEEN.values())
def test_lines_that_were_seen(line: str, name: str):
    found = recognise(line)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "line",
    [
        "rank 0: loaded in 0.1 s: mlx.core.float32",
        "rank 1: joined in 0.04 s",
        "22:10:03 INFO phalanx.server.server_process: phalanx is ready",
        "rank 0: self-test passed in 1.3 s: 2 ranks over ring",
        "rank 0 (a, pid 5) crashed: RuntimeError: MPI_Allreduce failed",  # as any rank that has lost another
        "",
    ],
)
def test_ordinary_lines_are_no_faults(line: str):
    assert recognise(line) is None


def test_the_first_one_counts():
    lines = ["all is well", "[Errno 28] No space left on device", "ssh: connect to host b port 22: Connection refused"]
    assert first_fault(lines) == (lines[1], by_name("no-space"))
    assert first_fault(lines[:1]) is None


def test_names_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_the_page_is_current():
    page = (ROOT / "docs" / "errors.md").read_text()
    assert page == markdown(), "run: python -m phalanx.faults > docs/errors.md"
