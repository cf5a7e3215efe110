"""Temporary directories that go with the process that made them, even if it is killed: the next one sweeps them away.

A process holds a lock on a file in its directory, which the system frees at its end. Does not know what is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "phalanx-"
LOCK = "owner.lock"


class OwnedDirectory:
    """A new directory that this user alone may enter. Making it sweeps those whose owner is gone.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, base: Path) -> None:
        _sweep(base)
        self._lock: int | None = None
        while self._lock is None:  # until no other process swept it between the two steps
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock = _locked(self.path / LOCK, create=True)

    def remove(self) -> None:
        """Delete the directory and all that is in it. Safe to call twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


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
    """A descriptor that holds the lock of this file; None if another process holds it, or there is no file."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except OSError:  # another process holds it, or has deleted the file
        pass
    os.close(descriptor)
    return None
