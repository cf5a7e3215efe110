"""A host's side of `phalanx install`: releases of phalanx below `~/.phalanx`, with one in use.

~/.phalanx/venv -> releases/NAME        what commands run; switched at once
~/.phalanx/previous -> releases/NAME    what `--rollback` switches to
~/.phalanx/releases/NAME                a virtual environment; whole only if it has the file `complete`
~/.phalanx/install/wheels               the wheels, as `file_transfer` received them
~/.phalanx/install/lock                 held while one command changes any of this (`install_lock.py`)
~/.phalanx/install/seed                 what runs this file where phalanx is not installed yet
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import venv
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import psutil
from msgspec import Meta, Struct

from phalanx.cluster.install_lock import InstallLocked, install_lock
from phalanx.cluster.supervisor import RunDirectory
from phalanx.config import RUN_PHALANX
from phalanx.environment import environment
from phalanx.errors import ClusterError
from phalanx.planning.calibration_store import FILE as CALIBRATIONS

WHEELS = ".phalanx/install/wheels"
"""Place of the wheels, relative to a host's home directory."""
LISTED = "requirements.txt"
"""File beside them: the installed packages, with hashes."""
LOCKED = "locked.zip"
"""File beside them: the wheels that are not phalanx's own."""
LAST_LINES = 3  # of pip's in an error


class ReleaseRequest(Struct, frozen=True, kw_only=True):
    """Install a release from the wheels that are here, and use it."""

    name: Annotated[str, Meta(pattern=r"^[0-9a-z][0-9A-Za-z.+-]*$")]
    files: list[str]  # among the wheels; others are of earlier releases


class Releases(Struct, frozen=True, kw_only=True):
    """Names of the release in use and of the one before it; "" for none."""

    current: str = ""
    previous: str = ""


class InstallFolder:
    """`~/.phalanx`, as far as `phalanx install` writes there."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or Path.home()
        self.root = self._home / ".phalanx"
        self.current = self.root / "venv"
        self.previous = self.root / "previous"
        self.releases = self.root / "releases"
        self.wheels = self._home / WHEELS

    def names(self) -> Releases:
        return Releases(current=_target(self.current), previous=_target(self.previous))

    def install(self, request: ReleaseRequest) -> Releases:
        """Make a release, unless it is whole, and switch to it.

        Raises:
            ClusterError: pip or the new release failed; the current release stays in use.
        """
        release = self.releases / request.name
        if not ((release / "complete").exists() and _runs(release)):
            shutil.rmtree(release, ignore_errors=True)
            try:
                self._make(release)
            except OSError as error:
                raise ClusterError(f"{error.filename or release} cannot be written: {error.strerror}.") from error
        self._use(request.name)
        self._remove_old(request.files)
        return self.names()

    def _make(self, release: Path) -> None:
        venv.create(release, symlinks=True, with_pip=False)  # Debian's Python lacks the pip that venv would put there
        unpacked = self.wheels.with_name("unpacked")
        shutil.rmtree(unpacked, ignore_errors=True)
        zipfile.ZipFile(self.wheels / LOCKED).extractall(unpacked)
        (pip,) = unpacked.glob("pip-*.whl")
        command = [
            *(str(release / "bin/python"), str(pip / "pip"), "--isolated", "--disable-pip-version-check", "install"),
            *("--no-index", "--find-links", str(unpacked), "--find-links", str(self.wheels), "--require-hashes"),
            *("--only-binary", ":all:", "--no-cache-dir", "--no-compile", "--quiet"),
            *("-r", str(self.wheels / LISTED)),
        ]
        _run(command, "pip")
        shutil.rmtree(unpacked)
        _run([str(release / "bin/python"), *RUN_PHALANX, "version"], "the new phalanx")
        (release / "complete").touch()

    def rollback(self) -> Releases:
        """Switch to the release before.

        Raises:
            ClusterError: there is none, or another command installs here.
        """
        with self._alone("rollback"):
            before = _target(self.previous)
            if not before or before == _target(self.current) or not (self.releases / before / "complete").exists():
                raise ClusterError(
                    "There is no earlier release here.", remedy="`phalanx install --upgrade` brings one."
                )
            self._use(before)
            return self.names()

    @contextlib.contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        try:
            with install_lock(self.root, f"phalanx host {verb}"):
                yield
        except InstallLocked as error:
            raise ClusterError(
                f"Another command installs here: {error}.", remedy="Wait for its end, then run the same command again."
            ) from error

    def _use(self, name: str) -> None:
        before = _target(self.current)
        if before != name:
            if before:
                _link(self.previous, before)
            _link(self.current, name)

    def _remove_old(self, files: Collection[str]) -> None:
        """Delete wheels but for these, and releases that are neither in use, nor the one before, nor run by a cluster
        that was not restarted."""
        for wheel in self.wheels.iterdir():
            if wheel.name not in files:
                wheel.unlink()
        running = {Path((process.info["cmdline"] or [""])[0]) for process in psutil.process_iter(["cmdline"])}
        names = self.names()
        for release in self.releases.iterdir():
            if release.name not in (names.current, names.previous) and release / "bin/python" not in running:
                shutil.rmtree(release)

    def remove(self) -> Releases:
        """Delete all releases, and what the machine measured. Logs stay. Returns the names of the deleted ones.

        Raises:
            ClusterError: it runs, or another command installs here.
        """
        with self._alone("uninstall"):
            state = RunDirectory(self._home)
            if state.running() or state.gateway.running():
                raise ClusterError("A cluster runs here.", remedy="`phalanx down` ends it.")
            names = self.names()
            for link in (self.current, self.previous):
                link.unlink(missing_ok=True)
            for folder in (self.releases, self.wheels.parent, self.root / "python"):
                shutil.rmtree(folder, ignore_errors=True)
            (self.root / CALIBRATIONS).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # of `up` there may be more
                self.root.rmdir()
            return names


def _target(link: Path) -> str:
    return link.readlink().name if link.is_symlink() else ""


def _link(link: Path, name: str) -> None:
    """Let a link lead to a release, without a moment in which it leads nowhere."""
    new = link.with_name(f"{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(Path("releases") / name)
    new.replace(link)


def _runs(release: Path) -> bool:
    """Whether a release's Python is still there: an update of the system may have taken it away."""
    with contextlib.suppress(OSError):
        return subprocess.run([release / "bin/python", "-c", ""], capture_output=True, check=False).returncode == 0
    return False


def _run(command: list[str], what: str) -> None:
    """Run a command without the variables by which the seed was found.

    Raises:
        ClusterError: it failed; has its last lines.
    """
    variables = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables, check=False)
    if done.returncode:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise ClusterError(
            f"{what} failed on {socket.gethostname()}, with {sys.executable}: {' / '.join(lines[-LAST_LINES:])}",
            remedy="What was in use stays in use. Run the same command again once that is mended.",
        )
