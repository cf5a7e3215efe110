"""What `phalanx bench` shows: how far a measurement is, on stderr; figures, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from phalanx.bench.measurement import METRICS
from phalanx.bench.report_page import ServerComparison, shown
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.terminal import is_dumb, note, plain_lines
from phalanx.supervision.client import LoadProgress
from phalanx.text.printable import printable

SHOWN_FAILURES = 5
RATES = {
    "request_throughput": "requests per second",
    "output_throughput": "tokens of answers per second",
    "total_token_throughput": "tokens per second, prompts included",
}


@contextmanager
def progress(total: int) -> Iterator[Callable[[bool], None]]:
    """Show how many requests have ended; yields what is to be called for each, with whether it failed."""
    done = failed = 0
    if not sys.stderr.isatty() or is_dumb():
        show_line = plain_lines()

        def count(has_failed: bool) -> None:
            nonlocal done
            done += 1
            show_line(LoadProgress("requests", done, total))

        yield count
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)

        def draw(has_failed: bool) -> None:
            nonlocal failed
            failed += has_failed
            bars.update(task, advance=1, description=f"{failed} failed" if failed else "")

        yield draw


def show_run(found: dict[str, Any]) -> None:
    """Print the figures of one server."""
    name = printable(found["model_id"])
    print(f"{name}: {found['completed']} of {found['num_prompts']} requests in {found['duration']:.1f} s")
    print(f"tokens: {found['total_input_tokens']} of prompts, {found['total_output_tokens']} of answers")
    for rate, text in RATES.items():
        print(f"{text}: {found[rate]:.2f}")
    metrics = [metric for metric in METRICS if f"mean_{metric}_ms" in found]
    columns = [name.partition("_")[0] for name in found if name.endswith(f"_{metrics[0]}_ms")]
    table = FittingTable("ms", *columns, "", keys=("ms",), texts=("",))
    for metric in metrics:
        cells = [shown(found[f"{column}_{metric}_ms"]) for column in columns]
        table.add_row(*map(Text, [metric.upper(), *cells, METRICS[metric]]))
    print_table(table)
    show_failures(found["failures"])


def show_failures(failures: dict[str, int]) -> None:
    """Name what failed, the most frequent first."""
    for text, count in list(failures.items())[:SHOWN_FAILURES]:
        note(f"failed, {count} times: {text}")
    if rest := list(failures.values())[SHOWN_FAILURES:]:
        note(f"failed, {sum(rest)} times: {len(rest)} other errors; --save-result keeps them all")


def show_comparison(found: dict[str, Any]) -> None:
    """Print the figures of two servers, and their ratios."""
    compared = msgspec.convert(found, ServerComparison)
    columns = [name or "figure" for name in compared.columns]
    table = FittingTable(*columns, keys=(columns[0],))
    for row in compared.rows():
        table.add_row(*map(Text, row))
    print_table(table)
    for name, server in compared.servers.items():
        failures: dict[str, int] = {}
        for one in server.rounds:
            for text, count in one["failures"].items():
                failures[f"{name}: {text}"] = failures.get(f"{name}: {text}", 0) + count
        show_failures(failures)
