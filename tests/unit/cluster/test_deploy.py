"""The unit files are well-formed, and call commands and flags that exist; the runbook's commands exist as well."""

from __future__ import annotations

import configparser
import importlib
import inspect
import plistlib
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
import typer

from phalanx.cli.main import COMMANDS
from phalanx.errors import ExitCode

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "deploy").iterdir())


def flags_of(command: str) -> set[str]:
    """Every option a command takes."""
    function = importlib.import_module(f"phalanx.cli.{command}").command
    flags = set()
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        for option in get_args(parameter.annotation)[1:]:
            if isinstance(option, typer.models.OptionInfo):
                given = [word for word in (option.default, *(option.param_decls or ())) if isinstance(word, str)]
                words = [part for word in given for part in word.split("/") if part.startswith("-")]
                flags |= set(words or [f"--{name.replace('_', '-')}"])
    return flags


def words_of(unit: Path) -> list[str]:
    """What a unit starts."""
    if unit.suffix == ".plist":
        return [str(word) for word in plistlib.loads(unit.read_bytes())["ProgramArguments"]]
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    return shlex.split(parser["Service"]["ExecStart"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_there_is(unit: Path):
    program, command, *rest = words_of(unit)
    assert Path(program).name == "phalanx" and command in COMMANDS
    assert {word for word in rest if word.startswith("-")} <= flags_of(command)


def test_services_do_not_restart_after_final_exit_codes():
    text = (ROOT / "deploy" / "phalanx-server.service").read_text()
    (codes,) = re.findall(r"RestartPreventExitStatus=(.*)", text)
    final = {int(code) for code in ExitCode if code != ExitCode.OK and not code.restart_helps}
    assert {int(code) for code in codes.split()} == final


@pytest.mark.parametrize("page", ["docs/clusters.md", "docs/quickstart.md", "README.md"])
def test_the_commands_on_a_page_exist(page: str):
    text = (ROOT / page).read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    called = [shlex.split(line, comments=True) for line in lines if line.startswith("phalanx ")]
    assert called
    for _, command, *rest in called:
        assert command in COMMANDS, command
        ours = rest[: rest.index("--")] if "--" in rest else rest
        given = {word.partition("=")[0] for word in ours if word.startswith("-")}
        assert given <= flags_of(command), (command, given - flags_of(command))
