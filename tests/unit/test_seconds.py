"""What a test file takes is counted with its children, and compared with the table of what it took before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import seconds

BUSY = """
import subprocess, sys
CODE = "import time; end = time.process_time() + 0.2\\nwhile time.process_time() < end: pass"
def test_a_child():
    subprocess.run([sys.executable, "-c", CODE], check=True)
def test_here():
    exec(CODE)
"""
A, B, C = (("test", f"tests/test_{name}.py") for name in "abc")
REST = ("test-rest", A[1])


def test_a_file_takes_what_its_tests_and_their_children_take(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("def test_idle(): pass\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "support.seconds", "--rootdir", str(tmp_path)]
    environment = {**os.environ, "TEST_SECONDS": str(tmp_path / "run"), "PYTHONPATH": str(Path(__file__).parents[1])}
    for marks in ("not full and not soak", "not soak", "not soak"):  # the last with other kernels
        subprocess.run([*words, "-m", marks, "."], cwd=tmp_path, env=environment, check=True, capture_output=True)
    found = seconds.read(tmp_path / "run")
    assert len(found) == 4
    assert found["test", "test_busy.py"] >= 0.4  # what it spins for, however long that takes
    assert found["test-rest", "test_busy.py"] >= 0.8


def test_what_failed_is_told_at_the_end_whichever_part_it_was_in(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "test_wrong.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    words = [sys.executable, "-m", "pytest", "-p", "support.seconds", "--continue-on-collection-errors", "."]
    run = tmp_path / "run"
    environment = {**os.environ, "TEST_SECONDS": str(run), "PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run(words, cwd=tmp_path, env=environment, check=False, capture_output=True).returncode == 1
    assert seconds.read(run).keys() == {("test-rest", "test_wrong.py")}
    assert seconds.failures([run, run]).split() == ["Failed:", "test_broken.py", "test_wrong.py::test_wrong"]
    assert "No test failed" in seconds.failures([tmp_path / "none"])


def test_the_slowest_are_named_and_those_unlike_the_table_whatever_the_machines_pace() -> None:
    table = Counter({A: 10.0, B: 20.0, C: 30.0})
    assert "60 s" in seconds.report(table, table) and "unlike" not in seconds.report(table, table)
    said = seconds.report(Counter({A: 20.0, B: 40.0, C: 60.0}), table)
    assert "120 s" in said and "2.00 times" in said and "unlike" not in said
    first, *rows = seconds.report(Counter({A: 10.0, B: 60.0, C: 30.0}), table).splitlines()
    assert "1.00 times" in first and [row.split()[-1] for row in rows[:3]] == [B[1], C[1], A[1]]
    assert [row.split()[-3] for row in rows[3:]] == [B[1]]


def test_a_file_that_the_table_lacks_is_unlike_it_if_it_takes_long() -> None:
    said = seconds.report(Counter({A: 10.0, B: 20.0, C: 1.0}), Counter({A: 10.0}))
    assert "1.00 times" in said
    assert [line.split()[-3] for line in said.splitlines() if "unlike" in line] == [B[1]]


def test_a_run_rewrites_the_rows_of_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "TABLE", tmp_path / "table")
    seconds.TABLE.write_text("# Seconds.\n")
    seconds.write(Counter({A: 1.5, B: 2.0, REST: 7.0}))
    seconds.write(Counter({A: 3.0}))
    assert seconds.TABLE.read_text().startswith("# Seconds.\n")
    assert seconds.read(seconds.TABLE) == Counter({A: 3.0, REST: 7.0})


def test_the_table_names_files() -> None:
    root = Path(__file__).parents[2]
    assert not [file for _, file in seconds.read(seconds.TABLE) if not (root / file).exists()]
