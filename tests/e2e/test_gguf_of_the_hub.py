"""GGUF files of a hub on this machine, by the names of llama.cpp and Ollama: pulled, gone on with, listed, removed."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.gguf_files import HIDDEN, entries_of, tiny_tensors, write_parts, write_tiny
from support.stub_hub import COMMIT, StubHub, stub_hub, variables_of

LIMIT_S = 240.0
NAME = "owner/tiny-GGUF"
PADDING = bytes(1000)  # a file that is no model

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StubHub]:
    folder = tmp_path / "made"
    folder.mkdir()
    write_tiny(folder / "tiny-Q8_0.gguf")
    write_tiny(folder / "tiny-Q4_K_M.gguf", "qwen3", "Q4_K")
    write_parts(folder, "tiny-F16", 3, kind="F16")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if "F16" not in file.name}
    files |= {f"F16/{file.name}": file.read_bytes() for file in folder.iterdir() if "F16" in file.name}
    files |= {"README.md": b"#", "config.json": b"{}", "mmproj-tiny-F16.gguf": PADDING}
    with stub_hub({NAME: files}) as running:
        yield running


@pytest.fixture
def variables(hub: StubHub, tmp_path: Path) -> dict[str, str]:
    return variables_of(hub, tmp_path)


@pytest.fixture
def phalanx(variables: dict[str, str]) -> Run:
    def run(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "phalanx", *words]
        return subprocess.run(
            command, env={**variables, **settings}, capture_output=True, text=True, timeout=LIMIT_S
        )  # fmt: skip

    return run


def imported(variables: dict[str, str]) -> Path:
    return Path(variables["XDG_CACHE_HOME"]) / "phalanx" / "imported"


def refused(ended: subprocess.CompletedProcess[str], *said: str) -> None:
    *_, error, remedy = ended.stderr.splitlines()
    assert ended.returncode and error.startswith("error: ") and remedy.startswith("  "), ended.stderr
    assert ended.stderr.count("error: ") == 1 and "Traceback" not in ended.stderr and ended.stdout == ""
    assert all(text in error for text in said), error


def directory(pulled: subprocess.CompletedProcess[str]) -> Path:
    assert pulled.returncode == 0, pulled.stderr
    return Path(pulled.stdout.strip())


def test_a_quantisation_is_pulled_once_by_every_spelling(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    pulled = phalanx("pull", f"hf.co/{NAME}:q8_0")
    made = directory(pulled)
    assert (
        "GiB of disk, for the file and what is made of it" in pulled.stderr
        and "importing tiny-Q8_0.gguf" in pulled.stderr
    )
    digest = hashlib.sha256(hub.repositories[NAME]["tiny-Q8_0.gguf"]).hexdigest()
    assert entries_of(imported(variables)) == [made.name] == [f"tiny-Q8_0-{digest[:12]}"]
    assert not (made / "source").exists() and not list(Path(variables["HF_HOME"]).rglob("*.gguf")), (
        "the file is not kept"
    )
    n = len(hub.ranges())
    for name in (f"{NAME}:Q8_0", f"huggingface.co/{NAME}:Q8_0", f"{NAME}:tiny-Q8_0.gguf"):
        again = phalanx("pull", name)
        assert directory(again) == made and again.stderr == ""
    assert len(hub.ranges()) == n, "nothing was fetched again"
    assert directory(phalanx("pull", f"{NAME}:Q8_0", HF_HUB_OFFLINE="1")) == made
    assert directory(phalanx("pull", NAME, HF_HUB_OFFLINE="1")) == made, "the only one of the repository"

    file = imported(variables).parent / "copy.gguf"
    file.write_bytes(hub.repositories[NAME]["tiny-Q8_0.gguf"])
    assert directory(phalanx("pull", str(file))) == made, "the same content"
    (row,) = [line.split() for line in phalanx("list").stdout.splitlines() if line.startswith("owner")]
    assert row[0] == f"{NAME}:Q8_0" and row[3] == "llama" and row[-1] in ("yes", "no")
    assert str(made) in phalanx("show", f"{NAME}:Q8_0").stdout
    assert phalanx("rm", f"hf.co/{NAME}:Q8_0").returncode == 0 and entries_of(imported(variables)) == []
    refused(phalanx("show", f"{NAME}:Q8_0"), "is not on this machine")


def test_without_a_quantisation_it_is_q4_k_m(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    made = directory(phalanx("pull", NAME))
    assert made.name.startswith("tiny-Q4_K_M-") and f"{NAME}:Q4_K_M" in phalanx("list").stdout
    asked = ["-p", "hello", "--raw", "--max-tokens", "4", "--temperature", "0", "--memory-guard-gb", "0.2"]
    for name in (NAME, f"hf.co/{NAME}:Q4_K_M"):
        answered = phalanx("generate", name, *asked, "--kv-cache-gb", "0.1")
        assert answered.returncode == 0 and answered.stdout, answered.stderr
    assert entries_of(imported(variables)) == [made.name]


@pytest.mark.full
def test_several_files_in_a_folder_are_one_model(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    made = directory(phalanx("pull", f"{NAME}:F16"))
    assert made.name.startswith("tiny-F16-") and "-of-" not in made.name
    folder = imported(variables).parent / "parts"
    folder.mkdir()
    for name, data in hub.repositories[NAME].items():
        if name.startswith("F16/"):
            (folder / Path(name).name).write_bytes(data)
    assert directory(phalanx("pull", str(folder / "tiny-F16-00002-of-00003.gguf"))) == made, "the same content"
    del hub.repositories[NAME]["F16/tiny-F16-00002-of-00003.gguf"]
    refused(phalanx("pull", f"{NAME}:F16"), f"{NAME} lacks F16/tiny-F16-00002-of-00003.gguf")


@pytest.mark.full
def test_what_the_repository_has_not_is_one_line(phalanx: Run, variables: dict[str, str], hub: StubHub) -> None:
    refused(phalanx("pull", f"{NAME}:Q9_9"), f"{NAME} has no Q9_9; it has F16, Q4_K_M, Q8_0")
    refused(phalanx("pull", "owner/none:Q4_K_M"), "the hub has no such repository")
    refused(phalanx("pull", f"{NAME}:Q8_0", HF_HUB_OFFLINE="1"), "the hub cannot be reached")
    refused(phalanx("serve", f"{NAME}:Q9_9"), "has no Q9_9")
    hub.repositories[NAME] = {"model.safetensors": b"", "config.json": b"{}"}
    refused(phalanx("pull", f"{NAME}:Q8_0"), "has no GGUF files")
    assert entries_of(imported(variables)) == []


@pytest.mark.full
def test_a_model_that_is_not_taken_over_is_refused_by_its_first_bytes(
    phalanx: Run, variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "x.gguf", general__architecture="mamba")
    data = (tmp_path / "x.gguf").read_bytes()
    hub.repositories[NAME] = {"x-Q8_0.gguf": data + bytes(100 << 20)}
    ended = phalanx("pull", f"{NAME}:Q8_0")
    refused(ended, f"{NAME}:Q8_0: x-Q8_0.gguf", "architecture 'mamba'")
    assert entries_of(imported(variables)) == [] and "verifying" not in ended.stderr


@pytest.mark.full
def test_a_disk_that_is_too_small_is_said_before_the_download(
    phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    hub.announces[NAME] = 1 << 60
    refused(phalanx("pull", f"{NAME}:Q8_0"), f"{NAME}:Q8_0 needs 1073741824.00 GiB of disk, but")
    assert entries_of(imported(variables)) == []


@pytest.mark.full
def test_a_file_that_is_not_what_the_hub_says_is_not_imported(
    phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    data = bytearray(hub.repositories[NAME]["tiny-Q8_0.gguf"])
    data[-1] ^= 1
    hub.sends["tiny-Q8_0.gguf"] = bytes(data)
    refused(phalanx("pull", f"{NAME}:Q8_0"), f"tiny-Q8_0.gguf of {NAME} is not what the hub says")
    assert not any(not name.startswith(".") for name in entries_of(imported(variables)))
    hub.sends.clear()
    assert directory(phalanx("pull", f"{NAME}:Q8_0")).exists()


def large(tmp_path: Path) -> bytes:
    """Of 180 MB, more than the beginning that is fetched first."""
    tensors = tiny_tensors("llama", "F16", np.random.default_rng(0))
    embedding = np.random.default_rng(1).standard_normal((350_000, HIDDEN)).astype("<f2")
    write_tiny(tmp_path / "large.gguf", tensors={**tensors, "token_embd.weight": ("F16", embedding)})
    return (tmp_path / "large.gguf").read_bytes()


@pytest.mark.full
def test_a_killed_pull_goes_on_and_is_listed_and_removed(
    phalanx: Run, variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    data = large(tmp_path)
    hub.repositories[NAME]["large-Q5_0.gguf"] = data
    hub.stops_at = 80 << 20
    command = [sys.executable, "-m", "phalanx", "pull", f"{NAME}:Q5_0"]

    def killed_with(least: int) -> Path:
        pulling = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE)
        deadline = time.monotonic() + LIMIT_S
        parts: list[Path] = []
        while not any(part.stat().st_size >= least for part in parts) and time.monotonic() < deadline:
            time.sleep(0.05)
            parts = list(imported(variables).glob(".part-*/source/*.part"))
        pulling.send_signal(signal.SIGKILL)
        pulling.communicate()
        (part,) = parts
        return part

    first = killed_with(100_000_000).stat().st_size
    assert f"not whole: phalanx pull {NAME}:Q5_0" in phalanx("list").stdout
    refused(phalanx("serve", f"{NAME}:Q5_0", HF_HUB_OFFLINE="1"), "the hub cannot be reached")
    assert phalanx("rm", f"{NAME}:Q5_0").returncode == 0 and entries_of(imported(variables)) == []
    have = killed_with(100_000_000).stat().st_size
    assert min(have, first) >= 100_000_000 and max(have, first) < len(data)
    hub.stops_at = None
    hub.go_on.set()
    made = directory(phalanx("pull", f"{NAME}:Q5_0"))
    assert hub.ranges()[-1] == f"bytes={have}-" and entries_of(imported(variables)) == [made.name]
    local = directory(phalanx("pull", str(tmp_path / "large.gguf"), XDG_CACHE_HOME=str(tmp_path / "other")))
    assert (local / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_file_in_the_hubs_cache_is_not_fetched_again_and_stays(
    phalanx: Run, variables: dict[str, str], hub: StubHub
) -> None:
    data = hub.repositories[NAME]["tiny-Q8_0.gguf"]
    folder = Path(variables["HF_HOME"]) / "hub" / f"models--{NAME.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(data)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    made = directory(phalanx("pull", f"{NAME}:Q8_0"))
    assert hub.ranges() == [] and blob.read_bytes() == data and made.exists()


@pytest.mark.full
def test_ollamas_api_pulls_shows_and_deletes_a_quantisation(
    variables: dict[str, str], hub: StubHub, tmp_path: Path
) -> None:
    words = ["serve", "demo", "--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-m", "phalanx", *words], env=variables, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + LIMIT_S
        while "phalanx is ready" not in log.read_text() and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.1)
        url = log.read_text().partition("phalanx is ready: ")[2].split()[0].removesuffix("/v1")
        name = f"hf.co/{NAME}:Q8_0"
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            lines: list[dict[str, Any]] = [
                json.loads(line) for line in client.post("/api/pull", json={"model": name}).text.splitlines()
            ]
            assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}, lines
            assert any(line["status"] == "importing tiny-Q8_0.gguf" for line in lines)
            assert f"{NAME}:Q8_0" in [model["name"] for model in client.get("/api/tags").json()["models"]]
            assert client.post("/api/show", json={"model": name}).json()["details"]["family"] == "llama"
            refusal = client.post("/api/pull", json={"model": f"{NAME}:Q9", "stream": False})
            assert refusal.status_code == 400 and "it has F16, Q4_K_M, Q8_0" in refusal.json()["error"]
            refusal = client.post("/api/pull", json={"model": "hf.co/../etc:Q8_0", "stream": False})
            assert refusal.status_code == 400 and "neither a short name nor a hub id" in refusal.json()["error"]
            assert client.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
        assert entries_of(imported(variables)) == []
    finally:
        server.kill()
        server.wait()
