"""Keeps a Mac awake while it serves."""

from __future__ import annotations

import logging
import os
import platform
import subprocess

log = logging.getLogger(__name__)


def stay_awake() -> None:
    """Keep a Mac from sleeping (-i, on mains also -s) and its disks from stopping (-m) until this process ends.

    macOS's `caffeinate` does it in a process of its own, which ends with this one however that ends (-w).
    """
    if platform.system() != "Darwin":
        return
    command = ["caffeinate", "-ims", "-w", str(os.getpid())]
    nothing = subprocess.DEVNULL
    try:
        subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError as error:
        log.warning("this Mac may go to sleep while it serves: caffeinate: %s", error.strerror or error)
