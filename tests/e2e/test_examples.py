"""The files of `examples/` run as they stand. (`two_hosts.sh` needs hosts: `hosts/test_lifecycle.py`.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.serving import MODEL, Running

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=400
    )


def test_client_streams_an_answer_and_shows_a_refusal(fake_server: Running):
    done = run("client.py", fake_server.base_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{MODEL}: ")
    assert "tokens in the prompt, " in done.stdout
    refusal = done.stdout.splitlines()[-1]
    assert refusal.startswith("As it should be, a temperature of -1 was refused (400): ") and "temperature" in refusal


def test_client_without_a_server_says_how_to_start_one():
    done = run("client.py", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "phalanx serve demo" in done.stderr


def test_client_with_an_address_without_v1_says_so(fake_server: Running):
    done = run("client.py", fake_server.base_url.removesuffix("/v1"))
    assert done.returncode == 1
    assert done.stderr == "There is no such API at this address. It ends in /v1, as http://127.0.0.1:8000/v1.\n"


def test_offline_answers_without_a_server():
    done = run("offline.py")
    assert done.returncode == 0, done.stderr
    continued, what, two = done.stdout.splitlines()
    assert continued.startswith("'phalanx serves one' -> ' ")
    assert "several machines" in what
    assert "4" in two
