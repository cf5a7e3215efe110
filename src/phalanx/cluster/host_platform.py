"""Decides which wheels fit a host's Python and system, and which lines of a lock apply. Pure.

`installer.py` asks the hosts, `wheelhouse.py` collects the wheels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

from phalanx.errors import ClusterError

MIN_PYTHON = (3, 11)
Number = Annotated[int, Meta(ge=0, le=999)]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+-]{0,64}$")]
"""A host's word that becomes a part of a file's name here: nothing in it means anything to a shell or a path."""


class HostPlatform(Struct, frozen=True, kw_only=True):
    """A host's answer to the first question, before phalanx is there."""

    python: tuple[Number, Number, Number]
    system: Word  # as Python's `platform.system()`
    machine: Word
    libc: tuple[Number, Number] | None = None  # glibc's version
    macos: tuple[Number, Number] | None = None
    mlx: Literal["metal", "cpu", "cuda12", "cuda13"]  # of tools/mlx_backend.sh
    current: Word = ""  # the release in use
    previous: Word = ""  # the one to which `--rollback` leads

    @property
    def minor(self) -> str:
        """Python's version without the last number."""
        return f"{self.python[0]}.{self.python[1]}"

    @property
    def name(self) -> str:
        """Name of the folder with this platform's wheels."""
        system = f"glibc{self.libc[0]}.{self.libc[1]}" if self.libc else f"macos{self.macos[0]}" if self.macos else ""
        return f"cp{self.python[0]}{self.python[1]}-{system}-{self.machine}-{self.mlx}"


def platforms(host: HostPlatform) -> list[str]:
    """The platform tags of wheels that run on a host, best first.

    Raises:
        ClusterError: phalanx runs on no such system.
    """
    if host.system == "Linux" and host.libc is not None and host.libc[0] == 2:
        return [f"manylinux_2_{minor}_{host.machine}" for minor in range(host.libc[1], 4, -1)] + [
            f"manylinux2014_{host.machine}", f"linux_{host.machine}",
        ]  # fmt: skip
    if host.system == "Darwin" and host.macos is not None:
        return list(mac_platforms(host.macos, host.machine))
    raise ClusterError(
        f"phalanx does not run on {host.system} on {host.machine}.", remedy="It runs on macOS and on Linux with glibc."
    )


def tags(host: HostPlatform) -> frozenset[Tag]:
    """The tags of all wheels that run on a host."""
    version, found = host.python[:2], platforms(host)
    interpreter = f"cp{version[0]}{version[1]}"
    return frozenset([
        *cpython_tags(version, [interpreter], found),
        *compatible_tags(version, interpreter, found),
    ])  # fmt: skip


def fits(wheel: str, host: HostPlatform) -> bool:
    """Whether a wheel runs on a host, by its name."""
    return not tags(host).isdisjoint(parse_wheel_filename(wheel)[3])


def entries(lock: str) -> Iterator[str]:
    """The requirements of a lock, each on one line with its hashes."""
    for entry in re.sub(r"\\\n", " ", lock).splitlines():
        if entry.strip() and not entry.startswith("#"):
            yield re.sub(r"\s+", " ", entry.strip())


def applying(locks: Iterable[str], host: HostPlatform) -> list[str]:
    """The requirements of locks that a host needs, without their conditions, which pip would take for this machine."""
    found = []
    for entry in (entry for lock in locks for entry in entries(lock)):
        words, separator, hashes = entry.partition(" --hash")
        wanted = Requirement(words)
        if wanted.marker is None or wanted.marker.evaluate(_environment(host)):
            found.append(f"{wanted.name}{wanted.specifier}{separator}{hashes}")
    return found


def _environment(host: HostPlatform) -> dict[str, str]:
    """A host's values of the variables in requirements' conditions."""
    return {
        "implementation_name": "cpython",
        "implementation_version": ".".join(map(str, host.python)),
        "os_name": "posix",
        "platform_machine": host.machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": host.system,
        "platform_version": "",
        "python_full_version": ".".join(map(str, host.python)),
        "python_version": host.minor,
        "sys_platform": host.system.lower(),
    }
