"""`phalanx launch`: a stand-in for each agent says how it was started; a server that only lists models. No engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.web import web_server

from phalanx.cli.launchers import AGENTS, PI_VARIABLE
from phalanx.errors import ExitCode

STAND_IN = """#!/bin/sh
exec {python} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))' "$@"
"""
LARGE = 'an org/"large"'
MODELS = {
    "data": [
        {"id": "small", "max_model_len": 4096, "tool_call_parser": None},
        {"id": LARGE, "max_model_len": 65536, "tool_call_parser": "hermes"},
        {"id": "of another program"},
    ]
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with web_server(lambda path, body: (200, json.dumps(MODELS)) if path == "/v1/models" else (404, "{}")) as base:
        yield base.removesuffix("/v1")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS:
        (folder / agent).write_text(STAND_IN.format(python=sys.executable))
        (folder / agent).chmod(0o755)
    return folder


def launch(url: str, *words: str, programs: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = "/usr/bin:/bin" if programs is None else f"{programs}:/usr/bin:/bin"
    environment = {**os.environ, "PATH": path}
    command = [sys.executable, "-m", "phalanx", "launch", words[0], "--url", url, "--api-key", "key", *words[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def started(done: subprocess.CompletedProcess[str]) -> tuple[list[str], dict[str, str]]:
    assert done.returncode == 0, done.stderr
    words, variables = json.loads(done.stdout)
    return words, variables


def test_claude_is_told_the_address_the_key_and_that_every_model_is_the_served_one(url: str, programs: Path) -> None:
    words, variables = started(launch(url, "claude", "--model", LARGE, "--", "-p", "say hi", programs=programs))
    assert words == ["-p", "say hi"]
    assert variables["ANTHROPIC_BASE_URL"] == url and variables["ANTHROPIC_AUTH_TOKEN"] == "key"
    assert {variables[name] for name in variables if name.endswith("_MODEL")} == {LARGE}
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"


def test_codex_is_told_a_provider_that_speaks_responses(url: str, programs: Path) -> None:
    words, variables = started(launch(url, "codex", "--model", LARGE, "--", "exec", "say hi", programs=programs))
    assert words[-2:] == ["exec", "say hi"] and set(words[0:-2:2]) == {"-c"}
    settings = tomllib.loads("\n".join(words[1:-2:2]))
    assert settings["model"] == LARGE and settings["model_context_window"] == 65536
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == f"{url}/v1" and provider["wire_api"] == "responses"
    assert variables[provider["env_key"]] == "key"


def test_opencode_is_told_a_provider_with_the_models_context(url: str, programs: Path) -> None:
    _, variables = started(launch(url, "opencode", "--model", LARGE, programs=programs))
    settings = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider = settings["provider"]["phalanx"]
    assert settings["model"] == f"phalanx/{LARGE}" and provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "key"}
    assert provider["models"][LARGE]["limit"]["context"] == 65536


def test_aider_gets_the_key_where_no_other_process_reads_it(url: str, programs: Path) -> None:
    words, variables = started(launch(url, "aider", programs=programs))
    assert words[words.index("--model") + 1] == "openai/small" and f"{url}/v1" in words
    assert variables["OPENAI_API_KEY"] == "key" and "key" not in words


def test_copilot_is_told_a_provider_and_what_the_context_has_room_for(url: str, programs: Path) -> None:
    words, variables = started(launch(url, "copilot", "--model", LARGE, "--", "-p", "say hi", programs=programs))
    assert words == ["-p", "say hi"]
    assert {name: value for name, value in variables.items() if name.startswith("COPILOT_")} == {
        "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
        "COPILOT_PROVIDER_API_KEY": "key",
        "COPILOT_MODEL": LARGE,
        "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(65536 - 8192),
        "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "8192",
    }


def test_qwen_code_is_told_an_api_of_openais_by_variables_and_by_words(url: str, programs: Path) -> None:
    """The user's own settings of provider and model go before variables, and words before both."""
    words, variables = started(launch(url, "qwen", "--model", LARGE, "--", "-p", "say hi", programs=programs))
    assert words == ["--auth-type", "openai", "--model", LARGE, "-p", "say hi"]
    told = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "key", "OPENAI_MODEL": LARGE}
    assert {name: variables[name] for name in told} == told and "key" not in words


def test_pi_is_told_a_provider_by_an_extension(url: str, programs: Path) -> None:
    words, variables = started(launch(url, "pi", "--model", LARGE, "--", "-p", "say hi", programs=programs))
    assert words[2:] == ["--provider", "phalanx", "--model", LARGE, "-p", "say hi"]
    extension = Path(words[1])
    assert words[0] == "--extension" and f"process.env.{PI_VARIABLE}" in extension.read_text()
    provider = json.loads(variables[PI_VARIABLE])
    assert (provider["baseUrl"], provider["apiKey"], provider["api"]) == (f"{url}/v1", "key", "openai-completions")
    (model,) = provider["models"]
    assert (model["id"], model["contextWindow"]) == (LARGE, 65536)


def test_no_variable_or_command_takes_the_place_of_pis_key(url: str, programs: Path) -> None:
    """pi puts variables in the place of `$NAME`, `$` in that of `$$`, and runs what follows a `!` at the beginning."""
    _, variables = started(launch(url, "pi", "--api-key", "!a$HOME!", programs=programs))
    assert json.loads(variables[PI_VARIABLE])["apiKey"] == "$!a$$HOME!"


@pytest.mark.parametrize("agent", AGENTS)
def test_what_is_printed_starts_the_agent_just_so(agent: str, url: str, programs: Path) -> None:
    words, variables = started(launch(url, agent, "--model", LARGE, programs=programs))
    line = launch(url, agent, "--model", LARGE, "--print").stdout
    path = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", line], env=path, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(done.stdout)[0] == words
    told = json.loads(done.stdout)[1]
    given = {name for name in variables if name not in os.environ and name not in ("SHLVL", "_", "OLDPWD")}
    assert given and {name: told.get(name) for name in given} == {name: variables[name] for name in given}


def read(agent: str, text: str) -> Any:
    if agent == "codex":
        return tomllib.loads(text)
    if agent in ("copilot", "qwen"):
        code = f"{text}exec {shlex.quote(sys.executable)} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
        return json.loads(subprocess.run(["sh", "-c", code], capture_output=True, timeout=240, check=True).stdout)
    return dict(line.split(": ", 1) for line in text.splitlines()) if agent == "aider" else json.loads(text)


@pytest.mark.parametrize("agent", AGENTS)
def test_settings_are_written_to_a_new_private_file(agent: str, url: str, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    done = launch(url, agent, "--write", str(file))
    assert done.returncode == 0 and str(file) in done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"{url}" in json.dumps(read(agent, file.read_text()))
    before = file.read_text()
    again = launch(url, agent, "--write", str(file))
    assert again.returncode == ExitCode.CONFIG and "does not exist yet" in again.stderr and file.read_text() == before


def test_settings_in_a_directory_that_is_not_there_are_refused(url: str, tmp_path: Path) -> None:
    done = launch(url, "claude", "--write", str(tmp_path / "none" / "settings"))
    assert done.returncode == ExitCode.CONFIG and "in a directory that does." in done.stderr


def test_a_small_context_is_said_before_the_agent_starts(url: str, programs: Path) -> None:
    assert "small reads 4096 tokens" in launch(url, "claude", programs=programs).stderr
    assert "tokens" not in launch(url, "claude", "--model", LARGE, programs=programs).stderr


def test_that_a_model_has_no_tools_is_said_before_the_agent_starts(url: str, programs: Path) -> None:
    for model, warned in (("small", True), (LARGE, False), ("of another program", False)):
        done = launch(url, "pi", "--model", model, programs=programs)
        assert done.returncode == 0 and (f"{model} cannot call tools" in done.stderr) == warned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["emacs"], "There is no agent 'emacs'. Known are claude, codex, opencode, aider, copilot, qwen, pi."),
        (["claude", "--model", "huge"], "has no model 'huge'. It has small, an org/\"large\", of another program."),
        (["claude"], "claude is not installed. Install it: npm install -g @anthropic-ai/claude-code"),
    ],
)
def test_what_cannot_be_started_is_said_with_what_to_do(words: list[str], said: str, url: str) -> None:
    done = launch(url, *words)
    assert done.returncode == ExitCode.CONFIG and said in " ".join(done.stderr.split())


def test_without_a_server_nothing_is_started(programs: Path) -> None:
    done = launch("http://127.0.0.1:1", "claude", programs=programs)
    assert done.returncode != 0 and "127.0.0.1:1" in done.stderr and not done.stdout


# A server that means harm ---------------------------------------------------------------------------------------------

ODD = "m😀{file:/etc/hostname}{env:HOME}'$(id)\\"


@pytest.fixture(scope="module")
def odd_url() -> Iterator[str]:
    """A server with a model of an odd name."""
    with web_server(lambda path, body: (200, json.dumps({"data": [{"id": ODD, "max_model_len": 65536}]}))) as base:
        yield base.removesuffix("/v1")


def test_a_models_odd_name_reaches_the_agent_as_it_is(odd_url: str, programs: Path) -> None:
    words, _ = started(launch(odd_url, "codex", programs=programs))
    assert tomllib.loads("\n".join(words[1::2]))["model"] == ODD
    _, variables = started(launch(odd_url, "claude", programs=programs))
    assert variables["ANTHROPIC_MODEL"] == ODD
    words, _ = started(launch(odd_url, "aider", programs=programs))
    assert words[1] == f"openai/{ODD}"


@pytest.mark.parametrize("agent", AGENTS)
def test_a_models_odd_name_is_written_as_it_is(agent: str, odd_url: str, tmp_path: Path) -> None:
    done = launch(odd_url, agent, "--write", str(tmp_path / "settings"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "settings").read_text()
    found = {
        "claude": lambda: json.loads(text)["env"]["ANTHROPIC_MODEL"],
        "codex": lambda: tomllib.loads(text)["model"],
        "opencode": lambda: json.loads(text)["model"].removeprefix("phalanx/"),
        "aider": lambda: yaml.safe_load(text)["model"].removeprefix("openai/"),
        "copilot": lambda: read(agent, text)["COPILOT_MODEL"],
        "qwen": lambda: read(agent, text)["OPENAI_MODEL"],
        "pi": lambda: json.loads(text)["providers"]["phalanx"]["models"][0]["id"],
    }[agent]()
    assert found == ODD


def test_no_file_or_variable_takes_the_place_of_a_models_name(odd_url: str, programs: Path) -> None:
    """opencode replaces these in the text of its settings, before it reads them as JSON, and sends the name."""
    _, variables = started(launch(odd_url, "opencode", programs=programs))
    text = variables["OPENCODE_CONFIG_CONTENT"]
    assert "{file:" not in text and "{env:" not in text
    assert json.loads(text)["model"] == f"phalanx/{ODD}"


@pytest.mark.parametrize("agent", AGENTS)
def test_settings_that_are_written_show_no_key(agent: str, url: str, tmp_path: Path) -> None:
    done = launch(url, agent, "--write", str(tmp_path / "settings"), "--api-key", "a{secret}'b")
    assert done.returncode == 0 and str(tmp_path / "settings") in done.stderr
    assert "secret" not in done.stderr + done.stdout
