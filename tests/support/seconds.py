"""Processor seconds of each test file, beside those of the table `tests/seconds.txt`. No test fails for its time.

As a pytest plugin it appends what each file took to the file that TEST_SECONDS names, which all processes of a run
share: the seconds of pytest and of its children, which count for the test that waits for their end. What failed is
there too.

    python tests/support/seconds.py report RUN ...   the slowest files of these runs, and those unlike the table
    python tests/support/seconds.py failed RUN ...   what failed in these runs, whose parts write side by side
    python tests/support/seconds.py write RUN ...    put these runs into the table
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from statistics import median

import pytest

TABLE = Path(__file__).parents[1] / "seconds.txt"
SLOWEST = 10
UNLIKE, MIN_S = 1.5, 3.0  # times the table, after the machine's pace has been allowed for; less is not worth a line
ROW = "{:8.1f}  {:9}  {}"
Row = tuple[str, str]  # the command that runs these tests of the file, and the file
FAILED = "# failed: "
spent: Counter[str] = Counter()
failed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        spent[item.nodeid.partition("::")[0]] += sum(os.times()[:4]) - before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    failed.extend([report.nodeid] * report.failed)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    failed.extend([report.nodeid] * report.failed)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if run := os.environ.get("TEST_SECONDS"):
        command = "test" if "not full" in session.config.option.markexpr else "test-rest"
        with Path(run).open("a") as rows:
            rows.writelines(ROW.format(seconds, command, file) + "\n" for file, seconds in spent.items())
            rows.writelines(f"{FAILED}{name}\n" for name in failed)


def read(path: Path) -> Counter[Row]:
    """Files that ran more than once, with other kernels, are added up."""
    rows: Counter[Row] = Counter()
    for seconds, command, file in (line.split() for line in path.read_text().splitlines() if line[0] != "#"):
        rows[command, file] += float(seconds)
    return rows


def report(run: Counter[Row], table: Counter[Row]) -> str:
    """What was slowest, and what differs from the table by more than most files do."""
    pace = median([run[row] / table[row] for row in run if table[row] > MIN_S] or [1.0])
    lines = [f"{run.total():.0f} s of processor time, most files {pace:.2f} times those in {TABLE.name}. The slowest:"]
    lines += [f"{seconds:8.1f} s, there {table[row]:.1f}: {row[1]}" for row, seconds in run.most_common(SLOWEST)]
    for row, seconds in sorted(run.items()):
        usual = table[row] * pace
        if abs(seconds - usual) > MIN_S and max(seconds, usual) > UNLIKE * min(seconds, usual):
            lines.append(f"{seconds:8.1f} s, unlike {table[row]:.1f} there: {row[1]} in {row[0]}")
    return "\n".join(lines)


def failures(runs: list[Path]) -> str:
    """What failed in these runs, once each."""
    lines = [line for path in runs if path.exists() for line in path.read_text().splitlines()]
    names = dict.fromkeys(line.removeprefix(FAILED) for line in lines if line.startswith(FAILED))
    return "\n".join(["Failed:", *names]) if names else "No test failed; the lines with *** above name what did."


def write(run: Counter[Row]) -> None:
    """Put a run into the table, in place of what its commands have there."""
    commands = {command for command, _ in run}
    rows = {row: seconds for row, seconds in read(TABLE).items() if row[0] not in commands} | run
    lines = [line for line in TABLE.read_text().splitlines() if line[0] == "#"]
    lines += [ROW.format(rows[row], *row) for row in sorted(rows, key=lambda row: row[::-1])]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    runs = [Path(path) for path in sys.argv[2:]]
    if sys.argv[1] == "failed":
        sys.exit(failures(runs))
    run = sum(map(read, runs), Counter[Row]())
    write(run) if sys.argv[1] == "write" else print(report(run, read(TABLE)))
