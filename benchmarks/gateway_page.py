"""Writes docs/reports/gateway.md of the figures of one run. Does not measure or draw (`gateway_plots.py` does)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 118  # of prose
COST, REPLICAS = "gateway-cost.svg", "gateway-replicas.svg"


def text(found: dict[str, Any]) -> str:
    """The page.

    Args:
        found: what `gateway_report.py` measured; parts that are not there are left out, and named.
    """
    return "\n".join(page(found)).rstrip() + "\n"


def page(found: dict[str, Any]) -> Iterator[str]:
    """The lines of the page."""
    about = found["about"]
    yield from ("# The gateway, measured", "")
    yield from ("Made by `python benchmarks/gateway_report.py` of `gateway.json`, which has all figures.", "")
    if about["quick"]:
        yield "**A short run (`--quick`): it shows that everything works; its figures mean little.**"
        yield ""
    versions = ", ".join(f"{name} {version}" for name, version in about["routers"].items())
    said = f"{about['date']}, {about['machine']}, Python {about['python']}. {versions}. "
    if about["absent"]:
        said += f"Not installed, and so not here: {', '.join(about['absent'])}. "
    sections = {
        "latency": latency, "routers": routers, "held": held, "memory": memory, "groups": groups, "affinity": affinity,
        "kills": kills,
    }  # fmt: skip
    if absent := [name for name in sections if name not in found]:
        said += f"Not measured in this run: {', '.join(absent)}. "
    yield from prose(said + "Times depend on what else the machine did: its load average stands under each part.")
    yield f"![What the gateway costs: processor time beside others, memory]({COST})"
    yield ""
    for name, section in sections.items():
        if name == "groups":
            yield f"![Groups, conversations, and the death of a replica]({REPLICAS})"
            yield ""
        if name in found:
            yield from section(found[name])
            yield f"Load average at the end of this part: {found[name]['load_average']}."
            yield ""


def prose(text: str) -> Iterator[str]:
    """A paragraph and the blank line after it."""
    yield from textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    yield ""


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A table and the blank line after it."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
    yield ""


def latency(found: dict[str, Any]) -> Iterator[str]:
    rate, most = found["rate_per_s"], found["direct_requests_per_s"]
    yield from ("## What it adds", "")
    yield from prose(
        "A replica streams 100 events per request at once and computes nothing. The load generator reaches "
        f"{most} requests/s without the gateway; at half of that, {rate}, requests begin at random times. Added "
        "is the difference of percentiles with and without the gateway: medians of rounds that take turns, ms."
    )
    added = found["added_ms"]
    rows = [
        [f"{label}, {q}", *(pair[way][key] for pair in found["rounds"] for way in ("direct", "gateway")), added[key]]
        for what, label in (("first", "first byte"), ("whole", "whole answer"))
        for q in ("p50", "p95", "p99")
        for key in (f"{what}_ms_{q}",)
    ]
    names = [f"{way} {i + 1}" for i in range(len(found["rounds"])) for way in ("without", "with")]
    yield from table(["", *names, "added"], rows)


def routers(found: dict[str, Any]) -> Iterator[str]:
    yield from ("## Beside other routers", "")
    yield from prose(
        f"The same replica, {found['at_once']} requests under way. Processor time is that of all the router's "
        "processes; a request is 100 events, each of which arrives alone. nginx only copies bytes; the others "
        "read requests."
    )
    results = found["results"]
    rows = [
        [name, one["requests_per_s"], one.get("cpu_ms_per_request", ""), one.get("requests_per_cpu_s", "")]
        + [one["first_ms_p50"], one["first_ms_p99"], one.get("rss_mb", "")]
        for name, one in results.items()
    ]
    head = ["router", "requests/s", "CPU ms/request", "requests/CPU s", "first byte p50, ms", "p99, ms", "MB"]
    yield from table(head, rows)
    if "litellm-proxy" in results:
        ratio = results["phalanx"]["requests_per_cpu_s"] / results["litellm-proxy"]["requests_per_cpu_s"]
        yield f"Requests per processor second: {ratio:.1f} times LiteLLM's."
    if found["absent"]:
        yield f"Not installed: {', '.join(found['absent'])}."


def held(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"## {found['streams']} streams at once", "")
    yield from prose(
        f"All begun together, 100 events each, {found['pause_s']} s between two. Late is what a stream takes "
        "longer than its pauses; without the gateway it is what replica and load generator need themselves."
    )
    rows = [
        [name, one["whole"], one["late_ms_p50"], one["late_ms_p99"], one.get("cpu_s", ""), one.get("rss_mb", "")]
        for name, one in (("without", found["direct"]), ("with", found["gateway"]))
    ]
    yield from table(["gateway", "whole", "late p50, ms", "late p99, ms", "its CPU s", "its MB"], rows)


def memory(found: dict[str, Any]) -> Iterator[str]:
    samples = found["samples"]
    yield from ("## Memory", "")
    yield from prose(
        f"{samples[0]['rss_mb']} MB before the first request, {samples[-1]['rss_mb']} MB after "
        f"{samples[-1]['requests']:,}; {found['grown_mb_in_second_half']:+} MB in the second half of them."
    )


def groups(found: dict[str, Any]) -> Iterator[str]:
    setups = [name for name in found if name != "load_average"]
    yield from ("## Two groups of two ranks beside one of four", "")
    yield from prose(
        "The bundled model; all ranks share this machine's processors, so that a group of four gains nothing "
        "from them: what is compared is the way, not the speed. The replicas that sleep wait as long as a "
        "prefill and steps would, one alone and two behind the gateway: their difference is the gateway's."
    )
    for key, label in (("ttft_ms_p95", "TTFT p95, ms"), ("tokens_per_s", "tokens/s")):
        concurrencies = list(found[setups[0]])
        rows = [[name, *(found[name][concurrency][key] for concurrency in concurrencies)] for name in setups]
        yield from table([label, *(f"{concurrency} at once" for concurrency in concurrencies)], rows)


def affinity(found: dict[str, Any]) -> Iterator[str]:
    policies = [name for name in found if name != "load_average"]
    yield from ("## Conversations over two replicas", "")
    yield from prose(
        "The same turns of the same conversations in the same random order, three at once; each turn sends all "
        "that was said before it. Cached is the share of prompt tokens that a replica still had."
    )
    rows = [
        [name, one["turns"], one["ttft_ms_mean"], one["ttft_ms_p95"], f"{one['cached_share']:.1%}", one["wall_s"]]
        for name, one in ((name, found[name]) for name in policies)
    ]
    yield from table(["policy", "turns", "mean TTFT, ms", "TTFT p95, ms", "cached", "whole trace, s"], rows)


def kills(found: dict[str, Any]) -> Iterator[str]:
    yield from ("## The death of a replica", "")
    yield from prose(
        f"{found['streams']} streams of {found['tokens']} tokens over two phalanx replicas. Once one has written "
        f"{found['killed_after']} tokens for each of its streams, it is killed, server and ranks. What clients "
        "get:"
    )
    outcomes = list(next(iter(found["results"].values()))["outcomes"])
    rows = [
        [name, one["streams_on_the_killed"], *(one["outcomes"][outcome] for outcome in outcomes)]
        + [one["names_the_replica"], one["longest_gap_s"], f"{one['answered_afterwards']}/{one['asked_afterwards']}"]
        for name, one in found["results"].items()
    ]
    yield from table(["router", "on the killed", *outcomes, "names it", "longest gap, s", "answered afterwards"], rows)
    yield from prose(
        "Complete is to the last token and the text of an undisturbed run; other text, to the last token. Broken "
        "is a connection that breaks off; truncated, an answer that ends as if it were whole. Errors as clients "
        "see them:"
    )
    for name, one in found["results"].items():
        if one["an_error"]:
            yield f"- {name}: `{one['an_error'][:90]}`"
    yield ""
    if found["absent"]:
        yield f"Not installed: {', '.join(found['absent'])}."
