"""What the benchmark of speculation measures: its loads, the figures of each, and the table of them.

Does not know servers (`speculation.py`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from scripted_model import Work
from servers import MODEL_NAME

OFF = "off"  # the variant without speculation
FREE = "free text"  # the work of which nothing can be guessed
MANY = 8  # streams; a round of more takes minutes
FREE_ROUNDS = 3
"""Multiple of the requested rounds on free text, where rounds are shorter."""
LEAST = 0.98
"""Least allowed ratio of a speed with drafts to that without."""
CLEAR = 2.0  # standard errors
NOISE = 0.02  # least assumed error of one round with `compare_steps`: two rounds may agree by chance


@dataclass(frozen=True)
class Point:
    """One load: a number of concurrent streams, to which the works are assigned in turn."""

    name: str
    works: tuple[Work, ...]
    concurrency: int
    tokens: int

    def bodies(self) -> list[dict[str, Any]]:
        """One request per stream."""
        return [body(self.works[i % len(self.works)], self.tokens) for i in range(self.concurrency)]

    @property
    def compares_steps(self) -> bool:
        """Whether drafts are switched on and off within an answer (`compare_steps`)."""
        return self.name == FREE

    def rounds(self, asked: int) -> int:
        """The number of rounds: half of the requested, rounded up, where a round takes minutes."""
        asked *= FREE_ROUNDS if self.compares_steps else 1
        return (asked + 1) // 2 if self.concurrency > MANY else asked


@dataclass
class Figures:
    """One server at one point: speeds per round, and in some rounds the counters of its drafts."""

    tokens_per_s: list[float] = field(default_factory=list)
    undrafted: list[float] = field(default_factory=list)  # as many, of requests that want no drafts
    drafted: float = 0.0
    accepted: float = 0.0
    drafts: float = 0.0
    accepted_at: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round."""
        return [a / b for a, b in zip(self.tokens_per_s, self.undrafted, strict=True)]

    @property
    def ratio(self) -> float:
        """The mean ratio over rounds."""
        return statistics.mean(self.ratios)

    @property
    def error(self) -> float | None:
        """Standard error of the mean ratio; None after one round."""
        ratios = self.ratios
        return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None

    @property
    def is_clear(self) -> bool:
        """Whether the ratio is `CLEAR` standard errors from `LEAST`."""
        return bool(abs(self.ratio - LEAST) > CLEAR * max(self.error or 0.0, NOISE / len(self.ratios) ** 0.5))

    def note_drafts(self, gained: Mapping[str, float]) -> None:
        """Add the server's counters of a round."""
        self.drafts += gained.get("num_drafts", 0.0)
        self.drafted += gained.get("num_draft_tokens", 0.0)
        self.accepted += gained.get("num_accepted_tokens", 0.0)
        at = [gained[name] for name in sorted(gained) if name.startswith("num_accepted_tokens_per_pos")]
        self.accepted_at = [sum(counts) for counts in itertools.zip_longest(self.accepted_at, at, fillvalue=0.0)]

    def json(self) -> dict[str, Any]:
        """For the last line of the benchmark: speeds in tokens/s, ratios, and shares of drafted tokens."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "undrafted_tokens_per_s": self.undrafted,
            "ratio": self.ratio,
            "standard_error": self.error,
            "alpha": self.accepted / self.drafted if self.drafted else None,
            "tokens_per_draft": self.drafted / self.drafts if self.drafts else None,
            "accepted_per_draft_at": [count / self.drafts for count in self.accepted_at] if self.drafts else [],
        }


Results = Mapping[Point, Mapping[str, Figures]]
"""Load and variant -> figures."""


def body(work: Work, tokens: int) -> dict[str, Any]:
    """A greedy chat request for a number of tokens of a work."""
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": work.prompt}],
        "max_tokens": tokens,
        "temperature": 0,
    }


def said(figures: Figures) -> str:
    """Ratio, standard error, rounds."""
    error = "" if figures.error is None else f" ±{figures.error:.3f}"
    return f"{figures.ratio:.3f}x{error} [{len(figures.ratios)}]"


def show(figures: Results, title: str, console: Console) -> dict[str, Any]:
    """Print the figures as a table. Returns them for JSON."""
    names = list(next(iter(figures.values())))
    about = "tokens/s without speculation; times as fast as when no drafts are wanted \\[rounds] (share accepted)"
    table = Table("", "at once", "tokens/s", *names, title=f"{title}: {about}")
    for point, by_name in figures.items():
        cells = [f"{statistics.median(by_name[OFF].tokens_per_s):.1f}"]
        for name in names:
            f = by_name[name]
            accepted = f" ({f.accepted / f.drafted:.2f})" if f.drafted else ""
            cells.append(f"{said(f)}{accepted}" if f.tokens_per_s else "")
        table.add_row(point.name, str(point.concurrency), *cells)
    console.print(table)
    return {
        f"{point.name}, {point.concurrency} at once": {name: f.json() for name, f in by_name.items() if f.tokens_per_s}
        for point, by_name in figures.items()
    }
