"""The same model on every host: copied through ssh, interrupted and resumed, verified (L2)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from clusters import ask, cluster, phalanx
from rig import Rig
from support.gguf_files import write_tiny

MB = 1 << 20


def make(hosts: Rig, megabytes: int) -> Path:
    """A model of incompressible files at the desk."""
    folder = hosts["desk"].home / "models" / "big"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for part in range(4):
        with (folder / f"model-{part}.safetensors").open("wb") as file:
            for _ in range(megabytes // 4):
                file.write(os.urandom(MB))
    return folder


def arrived(hosts: Rig, name: str) -> int:
    folder = hosts[name].home / "models" / "big"
    return sum(file.stat().st_size for file in folder.glob("*")) if folder.exists() else 0


def interrupted_push(hosts: Rig, megabytes: int) -> None:
    folder = make(hosts, megabytes)
    words = ["phalanx", "model", "push", "models/big", "--hosts", "a,b,c"]
    sending = hosts["desk"].popen(words)
    while min(arrived(hosts, name) for name in "abc") < megabytes * MB // 3:
        assert sending.poll() is None, sending.stdout.read()
        time.sleep(0.01)
    (pid,) = (pid for pid, args in hosts["desk"].processes("model push").items() if "nsenter" not in args)
    hosts["desk"].run(["kill", "-KILL", str(pid)])
    sending.wait()
    while any(hosts[name].processes("host take") for name in "abc"):
        time.sleep(0.05)
    half = {name: arrived(hosts, name) for name in "abc"}
    assert all(megabytes * MB // 3 <= size < megabytes * MB for size in half.values())
    wrong = phalanx(hosts["desk"], "model", "verify", "models/big", "--hosts", "a,b,c", check=False)
    assert wrong.returncode != 0 and wrong.stdout.count("are missing or differ") == 3
    said = phalanx(hosts["desk"], "model", "push", "models/big", "--hosts", "a,b,c", timeout=600)
    assert "5 files" in said.stdout and "verified on 3 hosts" in said.stdout
    for name in "abc":
        there = hosts[name].home / "models" / "big"
        assert sorted(file.name for file in there.iterdir()) == sorted(file.name for file in folder.iterdir())
        for file in folder.iterdir():
            assert (there / file.name).read_bytes() == file.read_bytes()
    right = phalanx(hosts["desk"], "model", "verify", "models/big", "--hosts", "a,b,c")
    assert right.stdout.count("all 5 files are the same") == 3


def test_a_push_that_was_interrupted_goes_on(hosts):
    interrupted_push(hosts, 96)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_gigabyte_that_was_interrupted_goes_on(hosts):
    interrupted_push(hosts, 1024)


def test_a_pushed_model_is_served(hosts):
    """Only what serving reads of it was pushed; for the checks of `up` that is the same model."""
    copied = hosts["a"].home / "models" / "tiny"
    copied.mkdir(parents=True)
    hosts["a"].run(["sh", "-c", "cp $(phalanx pull demo)/* models/tiny/"])
    (copied / "pytorch_model.bin").write_bytes(bytes(MB))
    phalanx(hosts["a"], "model", "push", "models/tiny", "--hosts", "b", "--needed")
    assert (hosts["b"].home / "models/tiny/config.json").exists()
    assert not (hosts["b"].home / "models/tiny/pytorch_model.bin").exists()
    assert "are the same" in phalanx(hosts["a"], "model", "verify", "models/tiny", "--hosts", "b", "--needed").stdout
    whole = phalanx(hosts["a"], "model", "verify", "models/tiny", "--hosts", "b", check=False)
    assert whole.returncode != 0
    assert "2 of 7 files are missing or differ: MODEL_CARD.md, pytorch_model.bin" in whole.stdout
    serve = ("models/tiny", "--served-model-name", "demo", "--host", "0.0.0.0", "--memory-guard-gb", "1")
    with cluster(hosts, 2, "ring", serve=serve) as url:
        assert ask(hosts["desk"], url)


def test_pull_downloads_on_the_first_host_and_copies_to_the_others(hosts):
    """No hub is reached from here: a directory of the first host stands for what it has downloaded."""
    folder = hosts["a"].home / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said = phalanx(hosts["desk"], "model", "pull", "models/m", "--hosts", "a,b,c").stdout
    assert "a$ phalanx pull models/m" in said and "verified on 2 hosts" in said
    assert (hosts["c"].home / "models/m/config.json").read_text() == "{}"
    none = phalanx(hosts["desk"], "model", "pull", "./none", "--hosts", "a,b", check=False)
    assert none.returncode != 0 and "a:" in none.stderr and "No such directory" in none.stderr


def test_an_imported_gguf_model_is_pushed_and_served_by_its_name(hosts):
    """The file is on the first host alone: `up` with it says what to do."""
    file = hosts["a"].home / "tiny.gguf"
    write_tiny(file)
    made = Path(phalanx(hosts["a"], "pull", "tiny.gguf").stdout.strip())
    small = ("--host", "0.0.0.0", "--memory-guard-gb", "1")
    refused = phalanx(hosts["desk"], "up", "2.json", "--", "tiny.gguf", *small, check=False)
    assert refused.returncode != 0 and "tiny.gguf is not imported here" in refused.stdout + refused.stderr
    phalanx(hosts["a"], "model", "push", "tiny.gguf", "--hosts", "b")
    assert "are the same" in phalanx(hosts["a"], "model", "verify", made.name, "--hosts", "b").stdout
    assert made.name in phalanx(hosts["b"], "list").stdout
    serve = (made.name, "--served-model-name", "demo", *small)
    with cluster(hosts, 2, "ring", serve=serve) as url:
        assert ask(hosts["desk"], url)
    assert phalanx(hosts["b"], "rm", made.name).returncode == 0
