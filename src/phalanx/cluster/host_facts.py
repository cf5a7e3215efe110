"""Runs on a host that may have nothing but Python, as `python -c SOURCE MLX`: prints what decides which wheels fit.

Imports the standard library only.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path


def release_behind(link: Path) -> str:
    """The name of the release that a link leads to, if its Python is there."""
    return link.readlink().name if link.is_symlink() and os.access(link / "bin/python", os.X_OK) else ""


def numbers(text: str) -> list[int] | None:
    """The first two numbers of a version."""
    found = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    return [*found, 0][:2] if found else None


if __name__ == "__main__":
    folder = Path.home() / ".phalanx"
    facts = {
        "python": list(sys.version_info[:3]),
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": numbers(platform.libc_ver()[1]) if platform.libc_ver()[0] == "glibc" else None,
        "macos": numbers(platform.mac_ver()[0]),
        "mlx": sys.argv[1],
        "current": release_behind(folder / "venv"),
        "previous": release_behind(folder / "previous"),
    }
    print("phalanx-answer:" + json.dumps(facts), flush=True)
