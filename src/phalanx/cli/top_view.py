"""What `phalanx top` shows of an overview's parts: the server or gateway, hosts, replicas, requests, the last fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from phalanx.cli.fitting_table import FittingTable
from phalanx.memory import GB, MIB
from phalanx.text.printable import printable

COLOURS = {
    "up": "green", "ready": "green", "decode": "green", "prefill": "blue", "queued": "", "finished": "dim",
    "paused": "yellow", "client left": "yellow", "draining": "yellow",
}  # fmt: skip
ID_CHARS = 16
MAX_LINKS = 6  # shown, if no more are bad
Parts = Mapping[str, Any]
LINK_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("faults", "FAULTS", lambda link: str(link["faults"])),
    ("latency_us", "TIME", lambda link: f"{link['latency_us'] / 1000:.2f} ms"),
    ("gb_per_s", "BANDWIDTH", lambda link: f"{link['gb_per_s']:.2f} GB/s"),
    ("messages", "MESSAGES", lambda link: f"{link['messages']:,}"),
    ("bytes", "RECEIVED", lambda link: _size(link["bytes"])),
    ("waited_seconds", "WAITED", lambda link: f"{link['waited_seconds']:.1f} s"),
    ("resent", "RESENT", lambda link: f"{link['resent']:,}/{link.get('segments', 0):,}"),
)
"""Figure of a link, its column's heading, how it is shown."""


class TopView:
    """A picture of the parts, for rich's consoles: no line is wider than the terminal, and no more than fit.

    Args:
        parts: name -> what the server says of it; see `http/overview_stream.py`.
        height: lines at most; None: as many as there are.
        problem: why this is not the newest state; "": it is.
    """

    def __init__(self, parts: Parts, height: int | None, problem: str = "") -> None:
        self._parts = parts
        self._height = height
        self._problem = problem

    def lines(self, console: Console, width: int) -> list[Text]:
        """The lines, one for each of the terminal's.

        Raises:
            LookupError, ArithmeticError, TypeError, ValueError, AttributeError: the parts are not those of phalanx.
        """
        lines = list(self._lines(console, width))[: self._height]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            line.no_wrap = True
        return lines

    def _lines(self, console: Console, width: int) -> Iterator[Text]:
        yield from _wrapped([*_server(self._parts.get("server", {})), Text(self._problem, "red")], width)
        yield from self._fault(width)
        for name, host in _below(self._parts, "hosts"):
            yield from _wrapped(_host(name, host), width)
        for table in (_links(self._parts), _replicas(self._parts), _requests(self._parts)):
            if table is not None:
                yield Text()
                yield from table.lines(console, width)

    def _fault(self, width: int) -> Iterator[Text]:
        """The last event, unless it is a good one."""
        events = sorted(_below(self._parts, "events"), key=lambda found: int(found[0]) if found[0].isdigit() else 0)
        if events and not events[-1][1].get("is_good"):
            event = events[-1][1]
            yield from _wrapped([Text(_said(event.get("what")), "red"), Text(_said(event.get("remedy")))], width)


def _below(parts: Parts, name: str) -> list[tuple[str, Any]]:
    return [(part.partition("/")[2], value) for part, value in parts.items() if part.startswith(f"{name}/")]


def _server(server: Mapping[str, Any]) -> list[Text]:
    phase = _said(server.get("phase"))
    is_gateway = server.get("kind") == "gateway"
    name = "gateway" if is_gateway else ", ".join(map(_said, server.get("models") or ["-"]))
    facts = [Text(name, "bold"), Text(phase, COLOURS.get(phase, "red"))]
    if "running" in server:
        facts.append(Text(f"{server['running']} of {server.get('limit')} {'requests' if is_gateway else 'rows'}"))
        facts.append(Text(f"{server.get('waiting')} waiting"))
    if "prefix_hit_rate" in server:
        facts.append(Text(f"{server['prefix_hit_rate']:.0%} of prompts cached"))
    facts += _speed(server)
    if server.get("ranks"):
        facts.append(Text(f"{server['ranks']} ranks" if server["ranks"] > 1 else "1 rank"))
    if server.get("reason"):
        facts.append(Text(_said(server["reason"]), "red"))
    return facts


def _speed(server: Mapping[str, Any]) -> Iterator[Text]:
    """Tokens a second and the time to the first one: of requests that ran alone, and as a plan predicted it."""
    of = {name: server.get(name) or {} for name in ("measured", "predicted")}
    for key, label, digits in (("tokens_per_second", "tok/s", 1), ("ttft_seconds", "s to the first token", 2)):
        known = [f"{found[key]:,.{digits}f} {label} {name}" for name, found in of.items() if found.get(key) is not None]
        if known:
            yield Text(", ".join(known))


def _host(name: str, host: Mapping[str, Any]) -> list[Text]:
    ranks = ", ".join(str(rank.get("rank")) for rank in host.get("ranks", ()))
    wrong = sum(rank.get("mismatches", 0) for rank in host.get("ranks", ()))
    facts = [Text(printable(name), "bold"), Text(f"ranks {ranks}")]
    if wrong:
        facts.append(Text(f"{wrong} steps differ from the plan", "red"))
    if memory := host.get("memory"):
        facts += [
            Text(f"weights {_size(memory['weights'])}"),
            Text(f"rows {_size(memory['rows'])} of {_size(memory['rows_budget'])}"),
            Text(f"prefixes {_size(memory['prefixes'])} of {_size(memory['prefixes_budget'])}"),
            *([Text(f"{memory['disk_blocks']} blocks on disk")] if memory.get("disk_blocks") is not None else []),
            Text(f"free {_size(max(0, memory['available'] - memory['guard']))} of {_size(memory['total'])}"),
        ]
    return facts


def _links(parts: Parts) -> FittingTable | None:
    """Bad links with their remedies, and others as far as they leave room for the rest; only figures that are known."""
    if not (found := parts.get("links")):
        return None
    bad = [link for link in found if link.get("problem")]
    shown = [*bad, *[link for link in found if not link.get("problem")][: max(0, MAX_LINKS - len(bad))]]
    columns = [column for column in LINK_COLUMNS if any(link.get(column[0]) is not None for link in shown)]
    heads = ("LINK", "CARRIES", *(head for _, head, _ in columns), "WHY")
    table = FittingTable(*heads, keys=("LINK", "CARRIES"), texts=("WHY",))
    for link in shown:
        figures = ("-" if link.get(key) is None else said(link) for key, _, said in columns)
        why = Text(" ".join(_said(link[key]) for key in ("problem", "remedy") if link.get(key)), "red")
        names = (_said(link.get(key)) for key in ("name", "carries"))
        table.add_row(*map(Text, (*names, *figures)), why)
    return table


def _replicas(parts: Parts) -> FittingTable | None:
    if not (found := _below(parts, "replicas")):
        return None
    table = FittingTable("REPLICA", "STATE", "REQUESTS", "MODELS", "WHY", keys=("REPLICA",), texts=("WHY",))
    for name, replica in sorted(found, key=lambda one: (not one[1].get("reason"), one[0])):
        models = "any" if replica.get("models") is None else ", ".join(map(_said, replica["models"]))
        busy = f"{replica.get('in_flight')}/{replica.get('limit')}"
        reason = Text(_said(replica.get("reason")))
        table.add_row(Text(printable(name)), _state(replica.get("state")), Text(busy), Text(models), reason)
    return table


def _requests(parts: Parts) -> FittingTable | None:
    found = sorted((row for _, row in _below(parts, "requests")), key=lambda row: -row.get("number", 0))
    if not found:
        return None
    if parts.get("server", {}).get("kind") == "gateway":
        table = FittingTable(
            "REQUEST", "STATE", "MODEL", "REPLICA", "FIRST", "MOVED", "TIME", keys=("REQUEST", "STATE")
        )
        for row in found:
            first = row.get("first_text_seconds")
            cells = (row.get("model"), row.get("replica"), "-" if first is None else f"{first:.2f} s", row.get("moves"))
            table.add_row(*_head(row), *(Text(_said(cell)) for cell in cells), Text(_time(row)))
        return table
    table = FittingTable(
        "REQUEST", "STATE", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "DRAFTS", "TIME", keys=("REQUEST", "STATE")
    )
    for row in found:
        drafted = row.get("drafted_tokens")
        drafts = f"{row.get('accepted_tokens', 0) / drafted:.0%}" if drafted else "-"
        cells = (*(row.get(f"{name}_tokens") for name in ("prompt", "cached", "output")), row.get("tokens_per_second"))
        table.add_row(*_head(row), *(Text(_said(cell)) for cell in cells), Text(drafts), Text(_time(row)))
    return table


def _head(row: Mapping[str, Any]) -> tuple[Text, Text]:
    id, state = _said(row.get("id")), _state(row.get("state"))
    if "prefilled" in row:
        state.append(f" {row['prefilled']:.0%}")
    return Text(id if len(id) <= ID_CHARS else f"{id[:9]}..{id[-5:]}"), state


def _state(state: object) -> Text:
    said = _said(state)
    return Text(said, COLOURS.get(said, "red"))


def _time(row: Mapping[str, Any]) -> str:
    return f"{row.get('seconds', 0):.1f} s"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GB:.1f} GiB" if n_bytes >= GB else f"{n_bytes / MIB:.0f} MiB"


def _said(value: object) -> str:
    return "-" if value is None else printable(str(value))


def _wrapped(facts: list[Text], width: int) -> Iterator[Text]:
    """The facts side by side, on as many lines as they need; one that is wider than a line breaks between words."""
    line, gap = Text(), "  "
    for fact in (fact for fact in facts if fact):
        is_whole = fact.cell_len + len(gap) <= width
        for number, piece in enumerate([fact] if is_whole else fact.split(" ")):
            between = " " if number else gap
            if line.plain.strip() and line.cell_len + len(between) + piece.cell_len > width:
                yield line
                line = Text(gap)
            elif line.plain.strip():
                line.append(between)
            line.append_text(piece)
    yield line
