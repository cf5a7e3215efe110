"""Collects the wheels for hosts: phalanx's own from the folder that `make wheels` wrote, all others by pip, once.

pip takes only files whose hashes are in the locks beside phalanx's own wheels.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

from msgspec import Struct

from phalanx import __version__
from phalanx.catalog.package_index import run_installer
from phalanx.cluster.file_transfer import digest
from phalanx.cluster.host_platform import HostPlatform, applying, fits, platforms
from phalanx.cluster.releases import LISTED, LOCKED
from phalanx.errors import ClusterError, ConfigError

MINORS = ("3.12", "3.13", "3.11", "3.14")  # the newest has the fewest wheels
NAME_CHARS = 12  # of the hash in a release's name
ALSO = (
    "charset-normalizer", "protobuf", "regex", "requests", "safetensors", "sentencepiece", "transformers", "urllib3"
)  # fmt: skip
"""Packages of requirements-dev.lock that hosts get as well: pip installs what others ask for, and some tokenizers can
be read by transformers only."""
MAKE = "Run `make wheels` in phalanx's checkout, or name the folder with its wheels: --wheels."


class WheelSet(Struct, frozen=True, kw_only=True):
    """The wheels of one platform."""

    host: HostPlatform
    folder: Path  # of this platform
    own: tuple[Path, ...]  # phalanx's wheels
    locked: tuple[str, ...]  # requirements for pip, with hashes
    lost: str = ""  # parts that this platform lacks

    @property
    def fetched(self) -> Path:
        """Folder of the wheels that pip has fetched."""
        return self.folder / "fetched"

    @property
    def sent(self) -> Path:
        """Folder with what hosts get: phalanx's wheels, the others in one file, and what is to be installed."""
        return self.folder / "sent"

    @property
    def requirements(self) -> str:
        """The text of `LISTED`, whose hash names the release."""
        own = (f"{file.name.split('-')[0]}=={__version__} --hash=sha256:{_sha256(file)}" for file in self.own)
        return "\n".join([*own, *self.locked]) + "\n"

    @property
    def release(self) -> str:
        """The release's name on hosts."""
        return f"{__version__}-{hashlib.sha256(self.requirements.encode()).hexdigest()[:NAME_CHARS]}"

    @property
    def seed(self) -> list[Path]:
        """The wheels that a host needs to receive the others: phalanx, and what its part of the transfer imports."""
        found = [file for name in ("msgspec", "psutil") for file in self.fetched.glob(f"{name}-*.whl")]
        return [self.own[0], *found]


def own_wheel(source: Path) -> Path:
    """The wheel of this version of phalanx in a folder.

    Raises:
        ConfigError: it is not there.
    """
    found = sorted(source.glob(f"phalanx-{__version__}-*.whl"))
    if not found:
        raise ConfigError(f"{source} has no wheel of phalanx {__version__}.", remedy=MAKE)
    return found[0]


def kernel_wheels(source: Path) -> list[Path]:
    """The wheels of the native kernels of this version, newest first."""
    found = source.glob(f"phalanx_cpu-{__version__}-*.whl")
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def kernel_pythons(source: Path) -> list[str]:
    """Versions of Python to look for on hosts, best first: those that there are native kernels for."""
    names = " ".join(file.name for file in kernel_wheels(source))
    return sorted(MINORS, key=lambda minor: f"-cp{minor.replace('.', '')}-" in names, reverse=True)


def backend_script(source: Path) -> str:
    """The text of tools/mlx_backend.sh, which says on a host what MLX computes on.

    Raises:
        ConfigError: it is not in the folder.
    """
    return _text(source / "mlx_backend.sh")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", remedy=MAKE) from error


def wheels_for(host: HostPlatform, source: Path) -> WheelSet:
    """Choose the wheels for a host's platform.

    Raises:
        ConfigError: the folder lacks this version's wheel, or a lock.
        ClusterError: phalanx runs on no such platform.
    """
    platforms(host)  # raises for other systems
    own, lost = [own_wheel(source)], ""
    if host.mlx == "cpu":
        kernels = [file for file in kernel_wheels(source) if fits(file.name, host)]
        own += kernels[:1]
        if not kernels:
            lost = f"no native kernels for Python {host.minor} on {host.machine}: models compute several times slower"
    names = ["requirements.lock", *([] if host.mlx == "metal" else [f"requirements-{host.mlx}.lock"])]
    locked = applying((_text(source / name) for name in names), host)
    locked += [one for one in applying([_text(source / "requirements-dev.lock")], host) if one.split("==")[0] in ALSO]
    return WheelSet(host=host, folder=source / "hosts" / host.name, own=tuple(own), locked=tuple(locked), lost=lost)


def fetch(wanted: WheelSet) -> None:
    """Collect the wheels for hosts in the folder. Fetches no wheel that is there with the right hash. Waits while
    another command fetches them.

    Raises:
        ClusterError: pip could not fetch a wheel, or the folder cannot be written.
    """
    try:
        wanted.folder.mkdir(parents=True, exist_ok=True)
        with (wanted.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _fetch(wanted)
    except OSError as error:
        raise ClusterError(
            f"{error.filename or wanted.folder} cannot be written: {error.strerror}.", remedy="Look at --wheels."
        ) from error


def _fetch(wanted: WheelSet) -> None:
    listed = wanted.sent / LISTED
    if listed.exists() and listed.read_text() == wanted.requirements:
        return
    shutil.rmtree(wanted.sent, ignore_errors=True)
    wanted.sent.mkdir()
    wanted.fetched.mkdir(exist_ok=True)
    there = set(_by_hash(wanted.fetched))
    if missing := [one for one in wanted.locked if not _hashes(one) & there]:
        _download(wanted, missing)
    for file in wanted.own:
        shutil.copy(file, wanted.sent)
    _pack(wanted)
    listed.write_text(wanted.requirements)


def _hashes(requirement: str) -> set[str]:
    return {part.strip() for part in requirement.split("--hash=sha256:")[1:]}


def _by_hash(folder: Path) -> dict[str, Path]:
    return {_sha256(file): file for file in sorted(folder.glob("*.whl"))}


def _download(wanted: WheelSet, missing: list[str]) -> None:
    names = wanted.folder / "missing.txt"
    names.write_text("\n".join(missing) + "\n")
    major, minor, _ = wanted.host.python
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"),
        *("--require-hashes", "--only-binary", ":all:", "--dest", str(wanted.fetched), "-r", str(names)),
        *("--implementation", "cp", "--python-version", wanted.host.minor),
        *(word for abi in (f"cp{major}{minor}", "abi3", "none") for word in ("--abi", abi)),
        *(word for name in platforms(wanted.host) for word in ("--platform", name)),
    ]
    temporary = wanted.folder / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)  # of a command that was killed
    temporary.mkdir()
    failed = run_installer(command, str(temporary))
    shutil.rmtree(temporary, ignore_errors=True)
    if failed:
        raise ClusterError(
            f"The wheels for {wanted.host.name} cannot be fetched: {failed}.",
            remedy=f"Run it again where pip reaches an index; it goes on. Or copy {wanted.folder} from such a machine.",
        )


def _pack(wanted: WheelSet) -> None:
    """One file of what the locks name, the same whenever it is packed: a connection for each wheel would take long."""
    there = _by_hash(wanted.fetched)
    with zipfile.ZipFile(wanted.sent / LOCKED, "w") as packed:
        for found in sorted(set().union(*map(_hashes, wanted.locked)) & set(there)):  # others are of an earlier lock
            packed.writestr(zipfile.ZipInfo(there[found].name), there[found].read_bytes())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return digest(stream)
