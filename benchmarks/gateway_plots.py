"""Draws the plots of docs/reports/gateway.md of the figures of one run. Does not measure.

The same figures make the same files: there is no date in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from gateway_page import COST, REPLICAS
from matplotlib import pyplot
from matplotlib.axes import Axes

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "phalanx",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = {
    "complete": "#2a7f4f",
    "other text": "#8fbc5a",
    "error event": "#e0a030",
    "broken": "#c8642a",
    "truncated": "#a02020",
}
"""Of `gateway_kills.py`'s outcomes."""
OURS, GREY = "#2a5f9f", "#9a9a9a"


def draw(found: dict[str, Any], folder: Path) -> None:
    """Both plots; parts that were not measured stay empty."""
    matplotlib.use("svg")
    with matplotlib.rc_context(STYLE):
        plot_cost(found, folder / COST)
        plot_replicas(found, folder / REPLICAS)


def plot_cost(found: dict[str, Any], file: Path) -> None:
    """Processor time beside others, memory."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    if "routers" in found:
        rates = {name: one["requests_per_cpu_s"] for name, one in found["routers"]["results"].items() if name != "none"}
        bars(left, rates, "Requests per processor second")
        left.set_xscale("log")
    if "memory" in found:
        samples = found["memory"]["samples"]
        right.plot([one["requests"] for one in samples], [one["rss_mb"] for one in samples], color=OURS)
        right.set(title="Memory of the gateway, MB", xlabel="requests")
        right.set_ylim(bottom=0)
    save(figure, file)


def plot_replicas(found: dict[str, Any], file: Path) -> None:
    """Groups, conversations, deaths."""
    figure, (left, right) = pyplot.subplots(2, 2, figsize=(11, 6), layout="constrained")
    for axes, key, title in ((left[0], "ttft_ms_p95", "TTFT p95, ms"), (left[1], "tokens_per_s", "Tokens per second")):
        for name, one in found.get("groups", {}).items():
            if name != "load_average":
                dashes = "--" if "sleep" in name else "-"
                axes.plot(list(one), [point[key] for point in one.values()], dashes, marker="o", label=name)
        axes.set(title=title, xlabel="requests at once")
        axes.set_ylim(bottom=0)
    if "groups" in found:
        left[0].legend(frameon=False)
    if "affinity" in found:
        means = {name: one["ttft_ms_mean"] for name, one in found["affinity"].items() if name != "load_average"}
        bars(right[0], means, "Conversations: mean TTFT, ms")
    if "kills" in found:
        outcomes_of(right[1], found["kills"]["results"])
    save(figure, file)


def bars(axes: Axes, values: dict[str, float], title: str) -> None:
    """Horizontal bars with their values; the first at the top."""
    names = list(values)[::-1]
    drawn = axes.barh(names, [values[name] for name in names], color=[OURS if "phalanx" in n else GREY for n in names])
    axes.bar_label(drawn, fmt="%.0f", padding=2)
    axes.set_title(title)


def outcomes_of(axes: Axes, results: dict[str, Any]) -> None:
    """What became of the streams, by router."""
    names = list(results)[::-1]
    before = [0] * len(names)
    for outcome, colour in COLOURS.items():
        counts = [results[name]["outcomes"][outcome] for name in names]
        axes.barh(names, counts, left=before, color=colour, label=outcome)
        before = [a + b for a, b in zip(before, counts, strict=True)]
    axes.set_title("Streams when one of two replicas is killed")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def save(figure: Any, file: Path) -> None:
    """As SVG without a date."""
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
