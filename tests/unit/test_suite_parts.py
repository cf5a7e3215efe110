"""`make test` and `make test-rest`: together they run every test once, and neither installs system packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py")}
OTHERS = {file for file in FILES if file.startswith("tests/clients/")}  # make clients
WITH_FULL = {
    file for file in FILES if "mark.full" in (ROOT / file).read_text() and file != "tests/unit/test_suite_parts.py"
}
HOSTS = {file for file in FILES if file.startswith("tests/e2e/hosts/")}  # all of them, by its conftest.py
NATIVE = {file for file in FILES if file.startswith("tests/native/")}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@cache
def commands(target: str) -> list[str]:
    """What make would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "-n", target]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def collected(arguments: Iterable[str]) -> set[str]:
    """Files that pytest takes its tests from."""
    chosen: dict[bool, set[str]] = {True: set(), False: set()}
    for word in arguments:
        ignored, path = word.startswith("--ignore="), word.removeprefix("--ignore=")
        if path.startswith("tests/"):
            chosen[ignored] |= {file for file in FILES if file == path or file.startswith(f"{path}/")}
    return chosen[False] - chosen[True]


def parts(target: str) -> dict[str, Counter[str]]:
    """By the expression of marks, in how many parts each file is."""
    found: dict[str, Counter[str]] = {}
    for line in commands(target):
        for arguments in re.findall(r"/pytest ([^|]*)", line):
            marks = re.search(r"-m '([^']*)'", arguments)
            found.setdefault(marks[1] if marks else "", Counter()).update(collected(arguments.split()))
    return found


def test_no_two_files_share_a_name() -> None:
    """pytest imports a file under its name, and stops where `make soak` takes two of one name."""
    names = Counter(Path(file).name for file in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def once(files: set[str]) -> Counter[str]:
    return Counter(dict.fromkeys(files, 1))


def test_every_file_is_in_one_part_of_make_test() -> None:
    assert parts("test") == {"not full and not soak": once(FILES - OTHERS - HOSTS)}


def test_what_is_left_out_is_in_one_part_of_the_rest_and_kernels_run_again_with_other_instruction_sets() -> None:
    rest = parts("test-rest")
    assert rest.keys() == {"full and not soak", ""} and rest[""] == once(NATIVE)
    left_out = rest["full and not soak"]
    assert left_out.keys() >= (WITH_FULL - NATIVE) | HOSTS and {*left_out.values()} == {1}  # those run with the kernels


def test_the_full_suite_is_both() -> None:
    assert parts("test-full") == parts("test") | parts("test-rest")


@pytest.mark.parametrize("target", ["test", "test-full"])
def test_only_make_rig_installs_system_packages(target: str) -> None:
    installing = ["sh tools/rig_packages.sh install", "sh tools/browser.sh install"]
    assert not [line for line in commands(target) if any(one in line for one in installing)]
    assert commands("rig") == installing
