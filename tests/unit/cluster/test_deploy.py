"""The unit files are well-formed, and call commands and flags that exist; the runbook's commands exist as well."""

from __future__ import annotations

import configparser
import importlib
import inspect
import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from phalanx.cli.exits import for_launchd
from phalanx.cli.main import COMMANDS
from phalanx.cli.main import UNITS as UNIT_LABELS
from phalanx.cluster.network import daemon
from phalanx.config import RUN_PHALANX
from phalanx.environment import LAUNCHD_VARIABLE
from phalanx.errors import ExitCode

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted(path for path in (ROOT / "deploy").iterdir() if path.is_file())


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
    return shlex.split(service_of(unit)["ExecStart"])


def service_of(unit: Path) -> configparser.SectionProxy:
    """The `[Service]` of a unit of systemd."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_there_is(unit: Path):
    program, command, *rest = words_of(unit)
    assert Path(program).name == "phalanx" and command in COMMANDS
    assert {word for word in rest if word.startswith("-")} <= flags_of(command)


SANDBOX = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "read-only",
    "PrivateTmp": "yes",
    "RestrictSUIDSGID": "yes",
    "RestrictNamespaces": "yes",
    "SystemCallFilter": "@system-service",
    "UMask": "0077",
    "LimitCORE": "0",
}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_that_can_be_reached_need_a_key_and_keep_to_themselves(unit: Path):
    words = words_of(unit)
    assert ("--api-key-file" in words) == (words[1] == "serve")
    assert ("--keys" in words) == (words[1] == "gateway")
    assert not any(word.startswith("/tmp") for word in words)  # anybody can make files there first
    if unit.suffix == ".plist":
        assert plistlib.loads(unit.read_bytes())["Umask"] == 0o077
    else:
        service = service_of(unit)
        assert {name: service.get(name) for name in SANDBOX} == SANDBOX
        assert service["User"] != "root"


LAUNCHD_KEYS = {
    **dict.fromkeys(
        "Label UserName GroupName Program WorkingDirectory RootDirectory ProcessType StandardInPath StandardOutPath "
        "StandardErrorPath".split(),
        str,
    ),
    **dict.fromkeys("Umask ThrottleInterval ExitTimeOut TimeOut StartInterval Nice".split(), int),
    **dict.fromkeys(
        "RunAtLoad Disabled AbandonProcessGroup EnableTransactions InitGroups LaunchOnlyOnce LowPriorityIO "
        "LowPriorityBackgroundIO LegacyTimers SessionCreate".split(),
        bool,
    ),
    **dict.fromkeys("ProgramArguments WatchPaths QueueDirectories".split(), list),
    **dict.fromkeys("EnvironmentVariables SoftResourceLimits HardResourceLimits KeepAlive".split(), dict),
}
"""Keys of a unit, by launchd.plist(5), and their types. launchd ignores other keys without a word."""
LAUNCHD_LIMITS = frozenset(
    "Core CPU Data FileSize MemoryLock NumberOfFiles NumberOfProcesses ResidentSetSize Stack".split()
)
LAUNCHD_KEEP_ALIVE = frozenset("SuccessfulExit Crashed PathState OtherJobEnabled AfterInitialDemand".split())
DAEMONS = {
    **{unit.name: plistlib.loads(unit.read_bytes()) for unit in UNITS if unit.suffix == ".plist"},
    "net setup --persist": plistlib.loads(daemon([["ifconfig", "en5", "inet", "10.90.0.1"]]).encode()),
}


def faults_of(unit: Mapping[str, Any]) -> list[str]:
    """What launchd would ignore or refuse in a unit."""
    found = [key for key, value in unit.items() if type(value) is not LAUNCHD_KEYS.get(key)]
    found += [key for key in unit.get("KeepAlive", {}) if key not in LAUNCHD_KEEP_ALIVE]
    for limits in (unit.get("SoftResourceLimits", {}), unit.get("HardResourceLimits", {})):
        found += [key for key, value in limits.items() if key not in LAUNCHD_LIMITS or type(value) is not int]
    if unit.get("ProcessType", "Standard") not in ("Background", "Standard", "Adaptive", "Interactive"):
        found.append("ProcessType")
    words = [*unit.get("ProgramArguments", []), *unit.get("EnvironmentVariables", {}).values()]
    found += [repr(word) for word in words if not isinstance(word, str)]
    return found + [key for key in ("Label", "ProgramArguments") if not unit.get(key)]


@pytest.mark.parametrize("name", DAEMONS)
def test_launchd_knows_all_that_a_unit_says(name: str):
    assert faults_of(DAEMONS[name]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"Username": "x"}, "Username"),
        ({"UserName": 5}, "UserName"),
        ({"KeepAlive": {"SuccesfulExit": False}}, "SuccesfulExit"),
        ({"SoftResourceLimits": {"OpenFiles": 1}}, "OpenFiles"),
        ({"SoftResourceLimits": {"NumberOfFiles": "1"}}, "NumberOfFiles"),
        ({"ProcessType": "interactive"}, "ProcessType"),
        ({"ProgramArguments": ["/bin/sh", 5]}, "5"),
        ({"Label": ""}, "Label"),
    ],
)
def test_a_fault_in_a_unit_is_found(change: dict[str, Any], fault: str):
    assert faults_of({**DAEMONS["org.phalanx.agent.plist"], **change}) == [fault]


@pytest.mark.parametrize("name", [name for name in DAEMONS if name.startswith("org.")])
def test_daemons_run_as_a_user_and_keep_their_state_in_the_library(name: str):
    unit = DAEMONS[name]
    assert unit["UserName"] == "NAME" and unit["EnvironmentVariables"]["HOME"] == "/Users/NAME"
    assert unit["ProcessType"] == "Interactive" and unit["SoftResourceLimits"]["NumberOfFiles"] >= 4096
    paths = [word for word in unit["ProgramArguments"] if word.startswith("/") and "/bin/" not in word]
    paths += [unit["StandardErrorPath"], unit["StandardOutPath"]]
    assert paths and all(path.startswith("/Users/NAME/Library/") for path in paths)
    text = (ROOT / "deploy" / name).read_text()
    assert f"/Library/LaunchDaemons/{name}" in text and "LaunchAgents/" not in text


@pytest.mark.parametrize(("command", "label"), UNIT_LABELS.items())
def test_launchd_does_not_restart_after_final_exit_codes(command: str, label: str, capsys):
    """launchd tells 0 from the rest, and no more."""
    unit = DAEMONS[f"{label}.plist"]
    assert unit["Label"] == label and unit["ProgramArguments"][1] == command
    assert unit["KeepAlive"] == {"SuccessfulExit": False}
    assert unit["EnvironmentVariables"][LAUNCHD_VARIABLE] == "1"
    seen = {code: for_launchd(code, label) for code in (*ExitCode, 130, 143)}
    assert {code for code, shown in seen.items() if shown == 0} == {code for code in ExitCode if not code.restart_helps}
    assert all(shown in (0, code) for code, shown in seen.items())
    assert f"sudo launchctl kickstart -k system/{label}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "words", "code"),
    [
        ("1", ["serve", "--no-such-flag"], 0),
        ("1", ["agent", "--credentials", "/nonexistent"], 0),
        ("1", ["status", "--no-such-flag"], ExitCode.USAGE),
        ("0", ["agent", "--credentials", "/nonexistent"], ExitCode.CONFIG),
    ],
)
def test_a_wrong_flag_is_tried_once(variable: str, words: list[str], code: int):
    command = [sys.executable, *RUN_PHALANX, *words]
    environment = {**os.environ, LAUNCHD_VARIABLE: variable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("launchd does not start this again" in done.stderr) == (code == 0)


def test_services_do_not_restart_after_final_exit_codes():
    text = (ROOT / "deploy" / "phalanx-server.service").read_text()
    (codes,) = re.findall(r"RestartPreventExitStatus=(.*)", text)
    final = {int(code) for code in ExitCode if code != ExitCode.OK and not code.restart_helps}
    assert {int(code) for code in codes.split()} == final


PAGES = ("clusters", "deployment", "first-run", "gateway", "install", "quickstart")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in PAGES)])
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
