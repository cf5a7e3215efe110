"""Lets one command at a time install on a host, or take away what is installed there.

As a program, `python -c SOURCE`, it holds the lock for a command on another machine until its stdin ends: with that
command, with its ssh, or with its machine. Imports the standard library only, since the host may have nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 5.0  # for one that is ending


class InstallLocked(Exception):
    """Another command has the lock; says which."""


@contextmanager
def install_lock(root: Path, holder: str) -> Iterator[None]:
    """Hold the lock of a host's `~/.phalanx`.

    Args:
        holder: who holds it, for the errors of others.

    Raises:
        InstallLocked: another one does.
    """
    file = root / "install" / "lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WAIT_S
    with file.open("a+") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    raise InstallLocked(lock.read(200)) from None
                time.sleep(0.1)
        lock.truncate(0)
        lock.write(f"{holder}, since {time.strftime('%H:%M:%S')}, process {os.getpid()} there")
        lock.flush()
        yield


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    try:
        with install_lock(Path.home() / ".phalanx", asked["holder"]):
            print("phalanx-answer:{}", flush=True)
            sys.stdin.read()
    except InstallLocked as error:
        sys.exit(f"error: Another command installs here: {error}.\nWait for its end, then run the same command again.")
    except OSError as error:
        sys.exit(f"error: {error.filename} cannot be written: {error.strerror}.")
