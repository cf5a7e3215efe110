"""Temporary directories go with their owner."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.supervision.owned_directory import LOCK, PREFIX, OwnedDirectory

OWNER = """
import sys, time
from pathlib import Path
from phalanx.supervision.owned_directory import OwnedDirectory
directory = OwnedDirectory(Path(sys.argv[1]))
(directory.path / "file").write_text("x")
print(directory.path, flush=True)
time.sleep(600)
"""


def owner(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(base)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    dead, left = owner(tmp_path)
    alive, kept = owner(tmp_path)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert (left / "file").exists()
        mine = OwnedDirectory(tmp_path)
        assert not left.exists()
        assert (kept / "file").exists()
        assert mine.path.stat().st_mode & 0o077 == 0
        mine.remove()
        mine.remove()
        assert [*tmp_path.iterdir()] == [kept]
    finally:
        alive.kill()
        alive.communicate()


def test_what_is_not_phalanxs_stays(tmp_path: Path) -> None:
    foreign = tmp_path / "other"
    foreign.mkdir()
    (foreign / LOCK).touch()
    unlocked = tmp_path / f"{PREFIX}without-a-lock"
    unlocked.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    trap = tmp_path / f"{PREFIX}trap"
    trap.mkdir()
    (trap / LOCK).symlink_to(foreign / LOCK)
    OwnedDirectory(tmp_path).remove()
    assert {file.name for file in tmp_path.iterdir()} == {
        "other", "target", f"{PREFIX}without-a-lock", f"{PREFIX}link", f"{PREFIX}trap",
    }  # fmt: skip


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A rank outlives its killed server for a moment; the directory is swept all the same once both are gone."""
    own = OwnedDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert own._lock is not None
        os.close(own._lock)  # as the system does at the owner's end
        OwnedDirectory(tmp_path).remove()
        assert not own.path.exists()
    finally:
        child.kill()
        child.wait()


def test_a_directory_that_was_cleaned_away_is_made_again_elsewhere(tmp_path: Path) -> None:
    mine = OwnedDirectory(tmp_path)
    first = mine.path
    mine.restore()
    assert mine.path == first, "it is there"
    shutil.rmtree(first)
    first.mkdir(mode=0o777)  # by another user, who has seen its name
    mine.restore()
    assert mine.path != first and mine.path.stat().st_mode & 0o077 == 0
    assert OwnedDirectory(tmp_path).path != mine.path and mine.path.exists(), "locked: not swept"
    mine.remove()
    assert not mine.path.exists()


def test_a_disk_without_room_for_a_file_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("phalanx.supervision.owned_directory._locked", full)
    with pytest.raises(OSError, match="No space left"):
        OwnedDirectory(tmp_path)
    assert not [*tmp_path.iterdir()]
