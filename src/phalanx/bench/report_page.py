"""Makes a page of the JSON files of `phalanx bench`: tables in Markdown, tables and plots in HTML.

Files of `vllm bench serve` are read as well. The same files make the same page.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from phalanx.bench.server_comparison import RATIOS
from phalanx.errors import ConfigError

Row = Sequence[str]
COLUMNS = (
    "run", "model", "at once", "per s", "prompt", "answer", "done", "failed", "TTFT ms", "p99", "TPOT ms", "p99",
    "req/s", "tokens/s",
)  # fmt: skip
LEGEND = (
    "Prompt and answer: mean number of tokens. TTFT, TPOT: medians. At once, per s: limits of the load. Tokens/s: of "
    "answers, all streams together, from the first request to the last answer."
)
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:70em;padding:0 1em}table{border-collapse:collapse}"
    "th,td{border:1px solid #ccc;padding:.2em .6em;text-align:right}th:first-child,td:first-child{text-align:left}"
)
WIDTH, HEIGHT, LEFT, BELOW = 420, 240, 60, 50  # of a plot, and of the space for its numbers
COLOURS = ("#2a5f9f", "#c8642a", "#2a7f4f", "#a02020", "#7a4fa0", "#777777")


class Run(Struct, kw_only=True):
    """A file of `bench serve`: the fields that are shown."""

    model_id: str
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    output_throughput: float
    request_throughput: float
    label: str | None = None
    failed: int = 0
    num_prompts: int = 0
    is_whole: bool = True
    request_rate: float | str = "inf"
    max_concurrency: int | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None

    def row(self) -> Row:
        """The cells under COLUMNS."""
        of_each = max(1, self.completed)
        done = str(self.completed) if self.is_whole else f"{self.completed} of {self.num_prompts}, interrupted"
        cells: list[Any] = [
            self.label, self.model_id.rpartition("/")[2], self.max_concurrency, self.request_rate,
            round(self.total_input_tokens / of_each), round(self.total_output_tokens / of_each), done,
            self.failed, self.median_ttft_ms, self.p99_ttft_ms, self.median_tpot_ms, self.p99_tpot_ms,
            self.request_throughput, self.output_throughput,
        ]  # fmt: skip
        return [shown(cell) for cell in cells]


class ComparedServer(Struct, kw_only=True):
    """One of the two servers of a comparison."""

    model_id: str
    rounds: list[dict[str, Any]]


class Ratio(Struct):
    """Of medians, and the least and greatest of a round."""

    ratio: float
    min: float
    max: float


class ServerComparison(Struct, kw_only=True):
    """A file of `bench compare`."""

    servers: dict[str, ComparedServer]
    ratios: dict[str, Ratio]

    def rows(self) -> list[Row]:
        """What was compared: medians of the rounds, and the ratio with its spread."""
        found: list[Row] = []
        for name in (name for name in RATIOS if name in self.ratios):
            medians = [statistics.median(one[name] for one in server.rounds) for server in self.servers.values()]
            ratio = self.ratios[name]
            spread = f"{ratio.ratio:.2f} ({ratio.min:.2f} .. {ratio.max:.2f})"
            found.append([name.replace("_", " "), *map(shown, medians), spread])
        return found

    @property
    def columns(self) -> Row:
        """Headings of its table."""
        return ["", *self.servers, " / ".join(self.servers)]


class Table(NamedTuple):
    """Headings and rows."""

    columns: Row
    rows: list[Row]


def read(files: Sequence[Path]) -> list[Run | ServerComparison]:
    """The files, in their order. A run without a label gets its file's name.

    Raises:
        ConfigError: names the file that cannot be read, or is not one of `phalanx bench`.
    """
    found: list[Run | ServerComparison] = []
    for file in files:
        try:
            data = file.read_bytes()
            if "ratios" in msgspec.json.decode(data, type=dict[str, Any]):
                found.append(msgspec.json.decode(data, type=ServerComparison))
            else:
                run = msgspec.json.decode(data, type=Run)
                run.label = run.label or file.stem
                found.append(run)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is not a result of `phalanx bench`: {error}.",
                remedy="Give files that `bench serve --save-result` or `bench compare --save-result` wrote.",
            ) from error
    return found


def markdown(title: str, found: Sequence[Run | ServerComparison]) -> str:
    """The tables."""
    parts = [f"# {title}", LEGEND]
    for columns, rows in tables(found):
        lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
        parts.append("\n".join(f"| {' | '.join(_markdown_cell(cell) for cell in line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def web_page(title: str, found: Sequence[Run | ServerComparison]) -> str:
    """The tables, and plots of runs that differ in their load."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    parts += [f"<h1>{html.escape(title)}</h1>", f"<p>{LEGEND}</p>"]
    for columns, rows in tables(found):
        cells = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        heads = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        parts.append(f"<table><tr>{heads}</tr>\n" + "\n".join(cells) + "</table>")
    runs = [one for one in found if isinstance(one, Run)]
    parts += [plot(title, _lines(runs, name)) for title, name in PLOTS.items()]
    return "\n".join(parts) + "\n"


def tables(found: Sequence[Run | ServerComparison]) -> list[Table]:
    """One of all runs, and one of each comparison."""
    runs = [one.row() for one in found if isinstance(one, Run)]
    compared = [Table(one.columns, one.rows()) for one in found if isinstance(one, ServerComparison)]
    return [*([Table(COLUMNS, runs)] if runs else []), *compared]


def shown(value: Any) -> str:
    """A cell: at least three digits; empty if not measured."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _markdown_cell(text: str) -> str:
    """On one line, without what would end the cell or begin HTML."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


# Plots -----------------------------------------------------------------------------------------------------------

PLOTS = {
    "TTFT, median, ms, by requests at once": "median_ttft_ms",
    "Tokens per second, by requests at once": "output_throughput",
}
"""Title -> figure."""

Lines = Mapping[str, list[tuple[float, float]]]


def _lines(runs: Sequence[Run], name: str) -> Lines:
    """Label -> points (requests at once, figure)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        value = getattr(run, name)
        if run.max_concurrency is not None and value is not None:
            found.setdefault(run.label or "", []).append((float(run.max_concurrency), value))
    return {label: sorted(points) for label, points in found.items()}


def plot(title: str, lines: Lines) -> str:
    """Lines over the number of requests at once, as SVG; "" if there is only one such number."""
    points = [point for line in lines.values() for point in line]
    places = sorted({x for x, _ in points})
    if len(places) < 2:
        return ""
    top = max(y for _, y in points) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + places.index(x) / (len(places) - 1) * (WIDTH - LEFT - 20), (HEIGHT - BELOW) * (1 - y / top) + 25

    height = HEIGHT + 18 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-size="12">',
        f'<text x="{LEFT}" y="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for y in (0.0, top / 2, top):
        _, high = at(places[0], y)
        parts.append(f'<path d="M{LEFT} {high:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{high + 4:.1f}" text-anchor="end">{shown(y)}</text>')
    for x in places:
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    for number, (label, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT}" y="{HEIGHT + 14 + 18 * number}" fill="{colour}">{html.escape(label)}</text>')
    return "".join([*parts, "</svg>"])
