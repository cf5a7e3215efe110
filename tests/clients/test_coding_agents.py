"""Coding agents, started by `phalanx launch`: a task of two turns, in which the model calls the agent's own tool."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import httpx
import pytest
from clients.conftest import CLIENT_S, SETTINGS
from clients.environments import variables
from clients.note_server import CONTENT, FILE, FINAL, KEY, TASK

AGENTS = {  # name -> environment, endpoint, arguments
    "claude": ("claude-code", "/v1/messages", ["-p", TASK, "--allowedTools", "Bash"]),
    "codex": (
        "codex",
        "/v1/responses",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
    ),
    "opencode": ("opencode", "/v1/chat/completions", ["run", TASK]),
    "copilot": ("copilot-cli", "/v1/chat/completions", ["-p", TASK, "--allow-all-tools"]),
    "qwen": ("qwen-code", "/v1/chat/completions", ["--approval-mode", "yolo", "-p", TASK]),
    "pi": ("pi", "/v1/chat/completions", ["-p", TASK]),
}
ANSWERS = re.compile(r'^phalanx:http_requests_total\{endpoint="(.+?)",.*status="(\d+)"\} (\d+)', re.MULTILINE)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_task_with_a_tool(agent, note_reader, client_folder, tmp_path):
    name, endpoint, words = AGENTS[agent]
    folder = client_folder(name)
    home = tmp_path / "work"
    home.mkdir()
    (home / FILE).write_text(f"{CONTENT}\n")
    own = {"HOME": str(home), "PWD": str(home), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ended = subprocess.run(
        [sys.executable, "-m", "phalanx", "launch", agent, "--url", note_reader.origin, "--api-key", KEY, "--", *words],
        cwd=home,
        env={**variables(folder), **SETTINGS, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert FINAL in ended.stdout, ended.stderr
    answers = ANSWERS.findall(httpx.get(f"{note_reader.origin}/metrics", headers={"x-api-key": KEY}, timeout=60).text)
    generated = {status: int(count) for path, status, count in answers if path == endpoint}
    assert list(generated) == ["200"] and generated["200"] >= 2
    assert {status for path, status, _ in answers if path != "unknown"} == {"200"}
