"""`tools/rig_packages.sh`: what is skipped for want of the rig is counted, and one command is given that runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/rig_packages.sh"
SKIPPED = '<testcase name="t"><skipped type="pytest.skip" message="the rig {why}">t.py:9</skipped></testcase>'


def report(tmp_path: Path, whys: list[str]) -> str:
    """What the last line of `make test-full` says when tests of several hosts were skipped for these reasons."""
    xml = tmp_path / "hosts.xml"
    xml.write_text(f"<testsuites>{''.join(SKIPPED.format(why=why) for why in whys)}</testsuites>")
    return subprocess.run(["sh", SCRIPT, "report", xml], capture_output=True, text=True, check=True).stdout


def test_nothing_skipped_says_nothing(tmp_path: Path) -> None:
    assert report(tmp_path, []) == ""


@pytest.mark.parametrize(
    ("why", "command"),
    [
        ("needs root, for namespaces", "make rig test-hosts"),
        ("needs Linux, for namespaces", "make rig test-hosts as root in a Linux virtual machine"),
        ("namespaces are not permitted: unshare failed", "--privileged"),
    ],
)
def test_skipped_tests_are_counted_and_a_command_runs_them(tmp_path: Path, why: str, command: str) -> None:
    said = report(tmp_path, [why, why, why])
    assert said.startswith(f"3 tests of several hosts were skipped, because the rig {why}. To run them: ")
    assert command in said and said.count("\n") == 1
