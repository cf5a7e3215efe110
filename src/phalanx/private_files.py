"""Files and directories of this user alone: others can neither read them nor put something into their place."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write_private(file: Path, data: bytes) -> None:
    """Write a new file of mode 0600.

    Raises:
        OSError: a file, or a link, has this name already; or the file cannot be written.
    """
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)


def why_not_private(folder: Path) -> str:
    """Why a directory is not this user's alone; empty if it is."""
    try:
        found = folder.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link or no directory"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may enter it" if found.st_mode & 0o077 else ""


def is_open_to_others(folder: Path) -> bool:
    """Whether another user could rename or replace what this one makes in a directory.

    The sticky bit, as /tmp has it, keeps them from that.

    Raises:
        OSError: the directory is not there.
    """
    found = folder.stat()
    own = found.st_uid in (0, os.geteuid()) and not found.st_mode & stat.S_IWOTH
    return not own and not found.st_mode & stat.S_ISVTX
