"""Temporary directories that a process removes at its end or, if it is killed, the next process removes.

A process locks a file in its directory; the system frees the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from phalanx.errors import ConfigError

PREFIX = "phalanx-"
LOCK = "owner.lock"


class OwnedDirectory:
    """A new directory that this user alone may enter. Making it sweeps those whose owner is gone.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, base: Path) -> None:
        _sweep(base)
        self._base = base
        self._lock: int | None
        self.path, self._lock = _make(base)

    def restore(self) -> None:
        """Make it again, empty and under another name, if it was deleted: some systems clean /tmp of what is old.

        Raises:
            OSError: it cannot be made.
        """
        if self._lock is not None and not _is_of(self.path / LOCK, self._lock):
            lost, (self.path, self._lock) = self._lock, _make(self._base)
            os.close(lost)

    def remove(self) -> None:
        """Delete the directory and all that is in it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def new_directory(base: Path) -> OwnedDirectory:
    """A directory for sockets, temporary files or shared memory.

    Raises:
        ConfigError: it cannot be made there.
    """
    try:
        return OwnedDirectory(base)
    except OSError as error:
        raise ConfigError(
            f"No directory for sockets and temporary files can be made in {base}: {error.strerror}.",
            remedy="Make room there, or set XDG_RUNTIME_DIR or TMPDIR to a directory of yours with a short path.",
        ) from error


def _make(base: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock."""
    while True:  # until no other process swept it between the two steps
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        try:
            lock = _locked(path / LOCK, create=True)
        except OSError:  # a full disk has room for a directory, perhaps, and for no file
            shutil.rmtree(path, ignore_errors=True)
            raise
        if lock is not None:
            return path, lock


def _sweep(base: Path) -> None:
    """Delete this user's directories below `base` whose owner is gone."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            if (lock := _locked(folder / LOCK, create=False)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _locked(file: Path, *, create: bool) -> int | None:
    """A descriptor that holds the lock of this file; None if another process holds it, or there is no file.

    Raises:
        OSError: the file cannot be made, although its directory is there.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    except OSError:
        if create:
            raise
        return None
    with contextlib.suppress(OSError):  # another process holds it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_of(file, descriptor):
            return descriptor
    os.close(descriptor)
    return None


def _is_of(file: Path, descriptor: int) -> bool:
    """Whether the file is still there, and the one that is open."""
    try:
        return os.path.samestat(file.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False
