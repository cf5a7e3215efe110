"""`phalanx install` on hosts that have sshd, Python and nothing else, and no network.

The wheels of others come from pip's index, once, before the rig is asked; without one these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from clusters import ask, health, phalanx, up, wait_for
from rig import CHECKOUT, HOME, Host, Rig

from phalanx import __version__
from phalanx.cluster.host_platform import HostPlatform
from phalanx.cluster.installer import BareHost
from phalanx.cluster.ssh import ANSWER
from phalanx.cluster.wheelhouse import backend_script, fetch, kernel_pythons, own_wheel, wheels_for
from phalanx.errors import ClusterError
from tools.wheels import BESIDE

KEPT = Path(sys.prefix) / "wheels"
"""Wheels of others, which later runs need not fetch again."""
INSTALLED = "a b c d".split()
OF_INSTALL = {"venv", "previous", "releases", "install"}
OLD_PYTHON = """case "$2" in *version_info*) exit 1 ;; *) echo 'Python 3.9.18' ;; esac"""


@pytest.fixture(scope="module")
def wheels(bare_rig: Rig) -> Path:
    """The folder of `make wheels` at the desk, with all that the hosts need."""
    KEPT.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(KEPT)]
    subprocess.run([*command, str(CHECKOUT)], check=True)
    for file in (*BESIDE, *CHECKOUT.glob("dist/phalanx_cpu-*.whl")):
        shutil.copy2(file, KEPT)
    command = BareHost("localhost", kernel_pythons(KEPT), backend_script(KEPT)).command("host", "facts")
    (answer,) = bare_rig["a"].run(command).stdout.splitlines()
    try:
        fetch(wheels_for(msgspec.json.decode(answer.removeprefix(ANSWER), type=HostPlatform), KEPT))
    except ClusterError as error:
        pytest.skip(str(error))
    return KEPT


def changed(wheels: Path, folder: Path, name: str, text: str) -> Path:
    """Another folder of wheels, with another text in a file of phalanx's. All others are the same files."""
    subprocess.run(["cp", "-al", str(wheels), str(folder)], check=True)
    shutil.rmtree(folder / "hosts", ignore_errors=True)
    shutil.copytree(wheels / "hosts", folder / "hosts", copy_function=os.link)
    wheel = own_wheel(folder)
    with zipfile.ZipFile(wheel) as old:
        files = {each: old.read(each) for each in old.namelist()}
    wheel.unlink()
    record = next(each for each in files if each.endswith("/RECORD"))
    lines = [line for line in files[record].decode().splitlines() if not line.startswith(f"{name},")]
    files |= {name: text.encode(), record: "\n".join([*lines, f"{name},,", ""]).encode()}
    with zipfile.ZipFile(wheel, "w") as new:
        for each, data in files.items():
            new.writestr(each, data)
    return folder


def install(rig: Rig, names: str, wheels: Path, *flags: str, check: bool = True) -> dict[str, list[str]]:
    """Host -> the cells of its row."""
    done = phalanx(rig["desk"], "install", names, "--wheels", str(wheels), *flags, check=check, timeout=900)
    _, *rows = done.stdout.splitlines()
    return {row.split()[0]: row.split(maxsplit=3) for row in rows}


def release(host: Host) -> str:
    """The one in use."""
    return (host.home / ".phalanx/venv").readlink().name


def files_of(host: Host) -> set[str]:
    """What lies in its home directory, but for what was there before."""
    return {path.name for path in host.home.iterdir()} - {".ssh", *HOME_OF_PYTHON}


HOME_OF_PYTHON = Path(sys.base_prefix).relative_to(HOME).parts[:1] if Path(sys.base_prefix).is_relative_to(HOME) else ()


@pytest.fixture(scope="module")
def installed(bare_rig: Rig, wheels: Path) -> Iterator[Rig]:
    """The rig, with phalanx on four hosts."""
    before = phalanx(bare_rig["desk"], "up", "2.json", "--", "demo", check=False)
    assert before.returncode != 0 and "phalanx-missing" in before.stdout + before.stderr
    assert "phalanx install" in before.stderr
    rows = install(bare_rig, "a,b,c,d", wheels)
    assert set(rows) == set(INSTALLED) and all(row[3].startswith("installed") for row in rows.values())
    yield bare_rig


@contextmanager
def serving(rig: Rig, count: int) -> Iterator[str]:
    yield up(rig, count, "ring")
    phalanx(rig["desk"], "down", f"{count}.json")
    for name in INSTALLED:
        wait_for(lambda name=name: rig[name].processes("phalanx") == {}, f"no process on {name}")


def test_two_and_four_hosts_answer(installed):
    doctor = phalanx(installed["desk"], "doctor", "4.json", "--backend", "ring", check=False)
    assert doctor.returncode in (0, 10), doctor.stdout
    for count in (2, 4):
        with serving(installed, count) as url:
            assert "phalanx" in ask(installed["desk"], url).lower()
            assert all(release(installed["a"]) in args for args in installed["a"].processes("-m phalanx").values())
    (row,) = install(installed, "a", KEPT).values()
    log = (installed["a"].home / ".phalanx/logs/rank-0.log").read_text()
    assert ("kernels: native" in log) != ("no native kernels" in row[3])


def test_again_it_says_that_it_is_there_and_that_is_all(installed):
    inode = (installed["a"].home / ".phalanx/venv").lstat().st_ino
    rows = install(installed, "4.json", KEPT)
    assert all(row[3].startswith("is there") for row in rows.values()) and len(rows) == 4
    assert (installed["a"].home / ".phalanx/venv").lstat().st_ino == inode


def test_nothing_is_written_elsewhere(installed):
    for name in INSTALLED:
        assert files_of(installed[name]) == {".phalanx"}
        assert {path.name for path in (installed[name].home / ".phalanx").iterdir()} <= {*OF_INSTALL, "logs", "run"}


def test_a_host_with_another_version_is_named(installed):
    (file,) = installed["b"].home.glob(".phalanx/venv/lib/python*/site-packages/phalanx/__init__.py")
    text = file.read_text()
    file.write_text(text.replace(f'"{__version__}"', '"0.0.9"'))
    try:
        said = phalanx(installed["desk"], "up", "2.json", "--", "demo", check=False)
    finally:
        file.write_text(text)
    assert said.returncode != 0 and "0.0.9 on b" in said.stderr and "phalanx install --upgrade" in said.stderr


def test_an_upgrade_leaves_a_running_cluster_alone_and_can_be_taken_back(installed):
    desk, a, b = (installed[name] for name in ("desk", "a", "b"))
    newer = changed(KEPT, KEPT.with_name("newer-wheels"), "phalanx/py.typed", "# newer\n")
    old = release(a)
    refused = install(installed, "a,b", newer, check=False)
    assert all(f"It has phalanx {old}" in " ".join(row) and "--upgrade" in " ".join(row) for row in refused.values())
    assert release(a) == old
    with serving(installed, 2) as url:
        ranks = a.processes("phalanx rank")
        rows = install(installed, "a,b", newer, "--upgrade")
        assert all(row[3].startswith("installed") for row in rows.values())
        new = release(a)
        assert new != old == (a.home / ".phalanx/previous").readlink().name
        assert a.processes("phalanx rank") == ranks and "phalanx" in ask(desk, url).lower()
        phalanx(desk, "restart", "2.json")
        assert all(f"releases/{new}/" in args for args in b.processes("-m phalanx").values())
    shutil.rmtree(newer)
    done = phalanx(desk, "install", "a,b", "--rollback").stdout
    assert done.count("in use again") == 2 and release(a) == release(b) == old
    with serving(installed, 2) as url:
        assert all(f"releases/{old}/" in args for args in b.processes("-m phalanx").values())
        assert "phalanx" in ask(desk, url).lower()


def test_what_was_interrupted_goes_on(installed):
    """First this machine's side dies while files travel, then the host itself while pip installs."""
    desk, c = installed["desk"], installed["c"]
    phalanx(desk, "uninstall", "c")
    part, whole = (c.home / ".phalanx/install/wheels" / name for name in ("locked.zip.part", "locked.zip"))
    sizes = {file.name: file.stat().st_size for file in KEPT.glob("hosts/*/sent/*")}
    size = sizes["locked.zip"]
    words = ["phalanx", "install", "c", "--wheels", str(KEPT)]
    with c.delayed(20):
        first = desk.popen(words)
        wait_for(lambda: part.exists() and part.stat().st_size > size // 4, "a quarter has arrived")
        first.kill()
        first.wait()
        wait_for(lambda: not c.processes("run_verb"), "the other side has ended")
        have = part.stat().st_size
        assert size // 4 < have < size and not whole.exists() and not (c.home / ".phalanx/venv").exists()
    before = received(c)
    second = desk.popen(words)
    wait_for(lambda: list(c.home.glob(".phalanx/releases/*/lib/*/site-packages/*")) != [], "pip installs")
    assert received(c) - before < sum(sizes.values()) - have / 2
    c.kill()
    assert second.wait(120) != 0
    assert not (c.home / ".phalanx/venv").exists()
    c.boot()
    assert install(installed, "c", KEPT)["c"][3].startswith("installed")
    assert release(c) == release(installed["d"])


def test_of_two_installs_at_once_the_second_says_which_one_runs(installed):
    desk, d = installed["desk"], installed["d"]
    phalanx(desk, "uninstall", "d")
    part = d.home / ".phalanx/install/wheels/locked.zip.part"
    with d.delayed(20):
        first = desk.popen(["phalanx", "install", "d", "--wheels", str(KEPT)])
        wait_for(part.exists, "the first has begun")
        row = install(installed, "d", KEPT, check=False)["d"]
        assert "Another command installs here: root@desk, process " in " ".join(row), row
    assert first.wait(600) == 0 and "installed" in first.communicate()[0]
    assert release(d) == release(installed["c"])
    assert install(installed, "d", KEPT)["d"][3].startswith("is there")


def received(host: Host) -> int:
    """Bytes that have come through its cable."""
    (link,) = json.loads(host.run(["ip", "-s", "-j", "link", "show", "eth0"]).stdout)
    return int(link["stats64"]["rx"]["bytes"])


def test_a_host_with_an_old_python_gets_one_line(installed):
    d = installed["d"]
    stand_ins = {f"python3.{minor}": "exit 127" for minor in range(11, 15)} | {"python3": OLD_PYTHON}
    for name, text in stand_ins.items():
        (d.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (d.bin / name).chmod(0o755)
    try:
        done = phalanx(installed["desk"], "install", "c,d", "--wheels", str(KEPT), check=False)
    finally:
        for name in stand_ins:
            (d.bin / name).unlink()
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("d "))
    assert done.returncode == 1 and "It has Python 3.9.18; phalanx needs Python 3.11 or newer." in line
    assert "apt install python3" in line and "c " in done.stdout and "is there" in done.stdout


def test_what_runs_is_not_deleted(installed):
    with serving(installed, 2):
        done = phalanx(installed["desk"], "uninstall", "a,b", check=False)
        assert done.returncode != 0 and done.stdout.count("A cluster runs here. `phalanx down` ends it.") == 2
        assert health(installed)["status"] == "ok"


def test_uninstall_leaves_logs_alone(installed):
    """The last test here."""
    for says in ("deleted", "nothing was installed"):
        rows = phalanx(installed["desk"], "uninstall", "4.json").stdout.splitlines()[1:]
        assert len(rows) == 4 and all(row.endswith(says) for row in rows)
    none = phalanx(installed["desk"], "install", "a", "--rollback").stdout
    assert "nothing is installed" in none
    for name in INSTALLED:
        below = installed[name].home / ".phalanx"
        assert not below.exists() or {path.name for path in below.iterdir()} <= {"logs", "run"}
