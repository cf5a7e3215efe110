"""`phalanx install`: brings phalanx to hosts that have Python and sshd, and need no network.

A host answers in three steps. Its Python runs `host_facts.py`, whose source is in the command; this machine fetches the
wheels for that platform, once; the host gets a seed, phalanx and two packages unpacked, which receives the wheels as
`model push` sends files, and installs them (`releases.py`). No text from a host becomes part of a command.
"""

from __future__ import annotations

import asyncio
import getpass
import inspect
import io
import os
import shlex
import socket
import zipfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from phalanx.cluster import host_facts, install_lock
from phalanx.cluster.distribution import Progress, push_to
from phalanx.cluster.file_transfer import Manifest, manifest
from phalanx.cluster.host_platform import MIN_PYTHON, HostPlatform
from phalanx.cluster.releases import WHEELS, ReleaseRequest, Releases
from phalanx.cluster.ssh import Remote, failure, run
from phalanx.cluster.wheelhouse import WheelSet, fetch, wheels_for
from phalanx.errors import ClusterError

INSTALL_S = 1800.0  # pip, on a slow disk
SEED_S = 600.0  # for 1.5 MB
SEED = ".phalanx/install/seed"
LEFT_OUT = "phalanx/demo/model/"  # of the seed: most of its bytes
FIND_PYTHON = r"""
export PATH="$PATH:$HOME/.local/bin:/usr/local/bin:/opt/homebrew/bin"
right='import sys, venv; sys.exit(sys.version_info < (MINIMUM) or sys.implementation.name != "cpython")'
find() { for py in NAMES python3 "$HOME"/.phalanx/python/*/bin/python3; do "$py" -c "$right" && return; done; }
bring() { UV_PYTHON_INSTALL_DIR="$HOME/.phalanx/python" uv --no-cache python install --no-bin LATEST && find; }
{ find || bring; } >/dev/null 2>&1 || {
    has=$(python3 -c 'import platform; print("Python", platform.python_version())' 2>/dev/null || echo 'no Python')
    echo "error: It has $has; phalanx needs Python LEAST or newer." >&2
    echo 'Install one there (apt install python3.12, brew install python), or uv, which fetches one.' >&2
    exit 1
}
""".replace("MINIMUM", ", ".join(map(str, MIN_PYTHON))).replace("LEAST", ".".join(map(str, MIN_PYTHON)))
"""For sh: sets `py` to a Python that fits, or ends with an error."""
UNPACK = f"""
import io, pathlib, shutil, sys, zipfile
seed = pathlib.Path.home() / {SEED!r}
shutil.rmtree(seed, ignore_errors=True)
zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read())).extractall(seed)
"""
RUN_VERB = f"""
import pathlib, sys
sys.path.insert(0, str(pathlib.Path.home() / {SEED!r}))
from phalanx.cluster.host_verbs import run_verb
from phalanx.errors import PhalanxError
try:
    sys.exit(run_verb(sys.argv[1]))
except PhalanxError as error:
    sys.exit(f"error: {{error.message}}\\n{{error.remedy}}")
"""
WITHOUT_SEED = f"""[ -d "$HOME/{SEED}" ] || {{ echo 'phalanx-answer:{{}}'; exit 0; }}"""  # nothing was installed

Phase = Callable[[str, str, int], None]
"""(host, its next step, bytes that will be sent to it)"""


class BareHost(Remote):
    """A host that may lack phalanx: a Python that is found there runs a seed of it.

    Args:
        minors: Python versions to look for, best first.
        backend: text of tools/mlx_backend.sh.
    """

    def __init__(self, name: str, minors: Sequence[str] = (), backend: str = "echo cpu") -> None:
        super().__init__(name)
        names = " ".join(f"python{minor}" for minor in minors)
        self._find = FIND_PYTHON.replace("NAMES", names).replace("LATEST", minors[0] if minors else "3.12")
        self._backend = backend

    def command(self, *words: str, agent: bool = False) -> list[str]:
        """The local command for `host VERB`."""
        verb = shlex.join(words[1:])
        if words[1:] == ("facts",):
            source = shlex.quote(inspect.getsource(host_facts))
            mlx = f"mlx=$(sh -c {shlex.quote(self._backend)} 2>/dev/null) || mlx=cpu"
            return self.shell_command(f'{self._find}\n{mlx}\nexec "$py" -I -c {source} "$mlx"')
        if words[1:] == ("lock",):
            return self.shell_command(f'{self._find}\nexec "$py" -I -c {shlex.quote(inspect.getsource(install_lock))}')
        return self.shell_command(f'{WITHOUT_SEED}\n{self._find}\nexec "$py" -I -c {shlex.quote(RUN_VERB)} {verb}')

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Meanwhile no other command installs there.

        Raises:
            ClusterError: another one does; says which.
        """
        holder = f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}"
        async with aclosing(self.listen("lock", {"holder": holder}, dict[str, str])) as held:
            await anext(held)
            yield

    async def plant(self, wheels: Sequence[Path]) -> None:
        """Send the seed: wheels, unpacked.

        Raises:
            ClusterError: the host could not take it.
        """
        command = self.shell_command(f'{self._find}\nexec "$py" -I -c {shlex.quote(UNPACK)}')
        doing = "unpacking a part of phalanx"
        code, out, err = await run(command, _packed(wheels), SEED_S, self.name, doing=doing)
        if code:
            raise failure(self.name, code, err, out, doing=doing)


def _packed(wheels: Sequence[Path]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as seed:
        for wheel in map(zipfile.ZipFile, wheels):
            for name in wheel.namelist():
                if not name.startswith(LEFT_OUT):
                    seed.writestr(name, wheel.read(name))
    return packed.getvalue()


class Installer:
    """Installs on several hosts at once; fetches the wheels of each platform once."""

    def __init__(self, source: Path, phase: Phase, progress: Progress) -> None:
        self._source = source
        self._phase = phase
        self._progress = progress
        self._fetching: defaultdict[Path, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._manifests: dict[Path, Manifest] = {}

    async def install(self, remote: BareHost, *, upgrade: bool) -> tuple[WheelSet, bool]:
        """Install this machine's phalanx on a host. Returns the installed release, and whether it was there before.

        Raises:
            PhalanxError: names the host, cause and remedy; the host's current release stays in use.
        """
        facts = await remote.call("facts", {}, HostPlatform)
        try:
            wanted = wheels_for(facts, self._source)
            if facts.current == wanted.release:
                return wanted, True
            if facts.current and not upgrade:
                raise ClusterError(
                    f"It has phalanx {facts.current}; this machine has {wanted.release}.",
                    remedy="Run it with --upgrade.",
                )
            self._phase(remote.name, f"fetching wheels for {facts.name}", 0)
            files = await self._fetched(wanted)
        except ClusterError as error:
            raise ClusterError(f"{remote.name}: {error.message}", remedy=error.remedy) from error
        async with remote.locked():
            self._phase(remote.name, "receiving", sum(entry.bytes for entry in files.files))
            await remote.plant(wanted.seed)
            await push_to(wanted.sent, files, remote, self._progress)
            self._phase(remote.name, "installing", 0)
            request = ReleaseRequest(name=wanted.release, files=[entry.path for entry in files.files])
            await remote.call("install", request, Releases, timeout_s=INSTALL_S)
        return wanted, False

    async def _fetched(self, wanted: WheelSet) -> Manifest:
        async with self._fetching[wanted.folder]:
            if wanted.folder not in self._manifests:
                await asyncio.to_thread(fetch, wanted)
                self._manifests[wanted.folder] = await asyncio.to_thread(manifest, wanted.sent, WHEELS)
        return self._manifests[wanted.folder]
