"""Draws the diagrams of the documents as SVG: a request's life, a stream that moves, a cluster; see `make docs`.

The pictures name no font file, so that nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from msgspec import Struct

LANE, STEP, TOP, MARGIN = 230, 40, 70, 20  # pixels
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:13px;fill:#1f2328}.name{font-weight:bold}.small{fill:#57606a;"
    "font-size:12px}rect{fill:#f6f8fa;stroke:#8c959f}.paper{fill:#fff;stroke:none}.inner{fill:#ddf4ff}"
    "line,path{stroke:#57606a;fill:none}.life{stroke:#d0d7de;stroke-dasharray:4 4}.head{fill:#57606a;stroke:none}"
)


class Message(Struct, frozen=True):
    """What one lane sends to another, or does by itself where both are the same. Lanes count from 0."""

    source: int
    target: int
    text: str


REQUEST = (
    ("client", "server process", "rank 0, leader", "ranks 1 .. N-1, workers"),
    (
        Message(0, 1, "POST /v1/chat/completions"),
        Message(1, 1, "1 parse: intake, dialect"),
        Message(1, 1, "2 take a slot (else 429)"),
        Message(1, 1, "3 tokenise: chat template"),
        Message(1, 2, "4 submit: SequenceRequest"),
        Message(2, 2, "5 plan: rows, chunks, drafts"),
        Message(2, 3, "plan, with the last commit"),
        Message(2, 2, "6 execute: forward pass"),
        Message(3, 3, "6 execute: forward pass"),
        Message(3, 2, "all-reduces in every layer"),
        Message(2, 2, "7 verify and commit: sample"),
        Message(2, 1, "tokens (5 to 7 repeat)"),
        Message(1, 1, "8 answer: text, events"),
        Message(1, 0, "data: {...}"),
    ),
)
MOVED_STREAM = (
    ("client", "gateway", "server A", "server B"),
    (
        Message(0, 1, "request, stream: true"),
        Message(1, 1, "choose replica A"),
        Message(1, 2, "request, admin key"),
        Message(2, 1, "event, then its record"),
        Message(1, 0, "event"),
        Message(1, 1, "keep the record: tokens 17, 4"),
        Message(2, 1, "connection lost, or: engine down"),
        Message(1, 1, "choose B: equal determinism_key"),
        Message(1, 3, "request again, with tokens 17, 4"),
        Message(3, 3, "prefill these; show nothing"),
        Message(3, 1, "the next event, then its record"),
        Message(1, 0, "event: the next byte"),
    ),
)


def pictures() -> dict[str, str]:
    """Path of each picture, from the root -> its text."""
    return {
        "docs/life-of-a-request.svg": sequence(*REQUEST),
        "docs/moved-stream.svg": sequence(*MOVED_STREAM),
        "docs/cluster.svg": cluster(),
    }


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", box(0, 0, width, height, "paper"), *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at its end; lines go along an axis."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    left, right = (x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx), (x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx)
    points = " ".join(f"{x:g},{y:g}" for x, y in ((x2, y2), left, right))
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/><polygon class="head" points="{points}"/>'


# Who sends what, from top to bottom ------------------------------------------------------------------------------


def sequence(lanes: Sequence[str], messages: Sequence[Message]) -> str:
    """A sequence diagram."""
    middles = [MARGIN + LANE * (number + 0.5) for number in range(len(lanes))]
    bottom = TOP + STEP * len(messages)
    parts = []
    for name, x in zip(lanes, middles, strict=True):
        parts.append(f'<line class="life" x1="{x:g}" y1="{TOP - 20}" x2="{x:g}" y2="{bottom}"/>')
        parts += [box(x - 95, MARGIN, 190, 30), text(x, MARGIN + 20, name, "name")]
    for number, message in enumerate(messages):
        y = TOP + STEP * number + 20
        start, end = middles[message.source], middles[message.target]
        if start == end:
            parts += [box(start - 105, y - 14, 210, 24, "inner"), text(start, y + 3, message.text)]
        else:
            parts += [arrow(start, y, end, y), text((start + end) / 2, y - 6, message.text, "small")]
    return svg(2 * MARGIN + LANE * len(lanes), bottom + MARGIN, parts)


# Which process runs where ----------------------------------------------------------------------------------------

HOST = 180
"""Width of a host."""


def cluster() -> str:
    """Four hosts as two replicas of two ranks, and the gateway before them."""
    hosts = [MARGIN + number * (HOST + 30) for number in range(4)]
    width = hosts[-1] + HOST + MARGIN
    parts = [box(width / 2 - 140, MARGIN, 280, 30), text(width / 2, MARGIN + 20, "clients: OpenAI, Anthropic, Ollama")]
    parts += [arrow(width / 2, 50, width / 2, 84), text(width / 2 + 10, 72, "HTTP", "small", "start")]
    parts += [box(width / 2 - 100, 84, 200, 44, "inner"), text(width / 2, 102, "phalanx gateway", "name")]
    parts.append(text(width / 2, 120, "queue, health, moves streams", "small"))
    for replica, (left, right) in enumerate((hosts[:2], hosts[2:])):
        middle = left + HOST / 2
        parts += [f'<path d="M {width / 2:g} 128 V 146 H {middle:g}"/>', arrow(middle, 146, middle, 172)]
        leader, worker = ("rank 0, leader", "half of each layer"), ("rank 1, worker", "half of each layer")
        parts += host(left, 2 * replica + 1, ("phalanx serve", "HTTP, tokens"), leader)
        parts += host(right, 2 * replica + 2, ("agent", "starts the rank"), worker)
        between = (left + HOST + right) / 2
        parts += [arrow(between, 282, right + 12, 282), arrow(between, 282, left + HOST - 12, 282)]
        parts.append(text(between, 352, "plans over TLS; all-reduces", "small"))
        parts.append(text(between, 372, f"replica {replica + 1}: phalanx serve --tp 2", "name"))
    return svg(width, 390, parts)


def host(x: float, number: int, *processes: tuple[str, str]) -> list[str]:
    """A machine with its processes, one below the other."""
    parts = [box(x, 160, HOST, 172), text(x + HOST - 8, 326, f"host {number}", "small", "end")]
    tops = [172 + 76 * place for place in range(len(processes))]
    for (name, what), top in zip(processes, tops, strict=True):
        parts += [box(x + 12, top, HOST - 24, 50, "inner"), text(x + HOST / 2, top + 20, name, "name")]
        parts.append(text(x + HOST / 2, top + 38, what, "small"))
    parts += [arrow(x + HOST / 2, upper + 50, x + HOST / 2, lower) for upper, lower in pairwise(tops)]
    return parts
