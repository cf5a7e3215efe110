"""Processor seconds of each test file, beside those of the table `tests/seconds.txt`. No test fails for its time.

As a pytest plugin it appends what each file took to the file that TEST_SECONDS names, which all processes of a run
share: the seconds of pytest and of its children, which count for the test that waits for their end.

    python tests/support/seconds.py report RUN ...   the slowest files of these runs, and those unlike the table
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
UNLIKE = 1.5  # times the table, after a faster or slower machine has been allowed for
LEAST_S = 3.0  # less is not worth a line

Row = tuple[str, str]  # the command that runs these tests of the file, and the file
spent: Counter[str] = Counter()


def processor_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = processor_s()
    try:
        return (yield)
    finally:
        spent[item.nodeid.partition("::")[0]] += processor_s() - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    if run := os.environ.get("TEST_SECONDS"):
        command = "test" if "not full" in session.config.option.markexpr else "test-rest"
        with Path(run).open("a") as rows:
            rows.write("".join(f"{seconds:8.1f}  {command:9}  {file}\n" for file, seconds in spent.items()))


def read(path: Path) -> Counter[Row]:
    """Files that ran more than once, with other kernels, are added up."""
    rows: Counter[Row] = Counter()
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            seconds, command, file = line.split()
            rows[command, file] += float(seconds)
    return rows


def report(run: Counter[Row], table: Counter[Row]) -> str:
    """What was slowest, and what differs from the table by more than most files do."""
    pace = median([run[row] / table[row] for row in run if table[row] > LEAST_S] or [1.0])
    lines = [f"{run.total():.0f} s of processor time, most files {pace:.2f} times those in {TABLE.name}. The slowest:"]
    lines += [f"{seconds:8.1f} s, there {table[row]:.1f}: {row[1]}" for row, seconds in run.most_common(SLOWEST)]
    for row, seconds in sorted(run.items()):
        usual = table[row] * pace
        if abs(seconds - usual) > LEAST_S and max(seconds, usual) > UNLIKE * min(seconds, usual):
            lines.append(f"{seconds:8.1f} s, unlike {table[row]:.1f} there: {row[1]} in {row[0]}")
    return "\n".join(lines)


def write(run: Counter[Row]) -> None:
    """Put a run into the table, in place of what its commands have there."""
    commands = {command for command, _ in run}
    others = {row: seconds for row, seconds in read(TABLE).items() if row[0] not in commands}
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]
    for (command, file), seconds in sorted({**others, **run}.items(), key=lambda row: row[0][::-1]):
        lines.append(f"{seconds:8.1f}  {command:9}  {file}")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    command, *runs = sys.argv[1:]
    run = sum((read(Path(path)) for path in runs), Counter[Row]())
    if command == "write":
        write(run)
    else:
        print(report(run, read(TABLE)))
