"""Real ranks write files, and load compiled code, where no other user can have been first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from groups import assert_gone, identify
from support.driver import PATIENT

from phalanx.dist.collective_backend import find_mpi
from phalanx.private_files import why_not_private
from phalanx.supervision.owned_directory import OwnedDirectory

NOBODY = 65534
BACKEND = "ring" if find_mpi() is None else "mpi"
FLAGS = [word for name, value in PATIENT.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def planted() -> Iterator[Path]:
    """What a stranger made, and the user's variables name."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    (folder / "mlx").mkdir()
    folder.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def ranks_of(server: psutil.Process) -> dict[int, psutil.Process]:
    """rank -> its process, of those that run."""
    found = {}
    for process in server.children(recursive=True):
        try:
            words, variables = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if "--socket" in words and "-np" not in words:  # mpirun's words are its ranks' as well
            at = words.index("--rank") + 1 if "--rank" in words else 0
            found[int(words[at]) if at else int(variables["OMPI_COMM_WORLD_RANK"])] = process
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems show no process its neighbour's variables")
def test_a_groups_temporary_directory_is_its_users_alone_and_goes_with_it(
    group_model: Path, tmp_path: Path, planted: Path
) -> None:
    """Also if a rank is killed, and then the server: as its sockets, by the next start of any phalanx."""
    command = [sys.executable, "-m", "phalanx", "serve", str(group_model), "--tp", "2", "--backend", BACKEND, *FLAGS]
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--port", "0"],
            env={**os.environ, "TMPDIR": str(planted), "XDG_RUNTIME_DIR": str(planted)},
            stdout=output,
            stderr=output,
        )
    seen: dict[int, float] = {}
    try:
        url = wait_ready(server, log)
        ranks = ranks_of(psutil.Process(server.pid))
        seen |= identify(process.pid for process in ranks.values())
        (folder,) = {Path(process.environ()["TMPDIR"]) for process in ranks.values()}
        assert sorted(ranks) == [0, 1]
        assert folder.parent == Path("/tmp") and not why_not_private(folder)
        assert (BACKEND == "mpi") == any(file.name.startswith("ompi.") for file in folder.iterdir()), "its session"

        ranks[1].send_signal(signal.SIGKILL)
        with httpx.Client(timeout=60) as client:
            while client.get(f"{url}/health").json().get("restarts") != 1:
                time.sleep(0.05)
        wait_ready(server, log)
        again = ranks_of(psutil.Process(server.pid))
        seen |= identify(process.pid for process in again.values())
        assert {Path(process.environ()["TMPDIR"]) for process in again.values()} == {folder}
        assert [*planted.iterdir()] == [planted / "mlx"], "nothing went where it could be replaced"
        psutil.wait_procs(ranks.values(), timeout=120)
    finally:
        server.kill()
        server.wait()
        psutil.wait_procs([psutil.Process(pid) for pid in seen if psutil.pid_exists(pid)], timeout=120)
    assert_gone(seen)
    OwnedDirectory(Path("/tmp")).remove()  # as of the next server
    assert not folder.exists()


def wait_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until it serves; its address."""
    while True:
        assert server.poll() is None, log.read_text()
        if found := re.search(r"phalanx is ready: (\S+)/v1", log.read_text()):
            if httpx.get(f"{found[1]}/health", timeout=60).status_code == 200:
                return found[1]
        time.sleep(0.05)
