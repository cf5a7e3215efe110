"""One environment per client, installed once at pinned versions: `pins/NAME.txt` for pip, `pins/NAME/` for npm as well.

The pins name every package: pip adds none, so that one may leave out what its client starts without.

A client that cannot be installed is a failure that names it. Does not know what the clients do.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PINS = HERE / "pins"
PROGRAMS = HERE / "programs"
ROOT = Path(os.environ.get("CLIENTS") or HERE.parents[1] / ".venv" / "clients")
"""Folder of the environments. `CLIENTS` names another."""

UNWANTED = (
    "OPENAI_", "ANTHROPIC_", "CLAUDE_", "CODEX_", "OPENCODE_", "COPILOT_", "GH_", "GITHUB_", "QWEN_", "PI_", "OLLAMA_",
    "PHALANX_", "PYTHONPATH",
)  # fmt: skip
"""How settings of the user's begin that would lead a client elsewhere."""
STAMP = ".installed"  # holds the digest of the pins that the environment was made from
INSTALL_S = 900.0  # the largest client downloads several hundred megabytes


class CannotInstall(Exception):
    """pip or npm failed; the message holds what it printed last."""


def environment(name: str) -> Path:
    """The folder of this client's virtual environment, made anew when its pins changed.

    Raises:
        CannotInstall: names the client.
    """
    folder = ROOT / name
    wanted = _digest(name)
    stamp = folder / STAMP
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _run(name, sys.executable, "-m", "venv", str(folder))
        _run(
            name,
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "-q",
            "install",
            "--no-deps",
            "-r",
            str(PINS / f"{name}.txt"),
        )
        if (PINS / name).is_dir():
            shutil.copytree(PINS / name, folder, dirs_exist_ok=True)
            _run(name, str(folder / "bin" / "npm"), "ci", "--no-audit", "--no-fund", cwd=folder)
        stamp.write_text(wanted)
    return folder


def variables(folder: Path) -> dict[str, str]:
    """The process environment of a client: its own programs first, no module path and no setting meant for another."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(UNWANTED)}
    own = (folder / "bin", folder / "node_modules" / ".bin")
    return {**kept, "PATH": os.pathsep.join([*map(str, own), kept.get("PATH", "")])}


def _digest(name: str) -> str:
    files = [PINS / f"{name}.txt", *sorted((PINS / name).glob("*.json"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _run(name: str, *words: str, cwd: Path | None = None) -> None:
    own = variables(ROOT / name)  # npm starts `node`, which lies beside it
    done = subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        shutil.rmtree(ROOT / name, ignore_errors=True)
        raise CannotInstall(f"{name}: {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")
