"""`phalanx bench`: measures a running server, compares two, and makes a page of what was measured.

Flags and JSON are those of `vllm bench serve` where they mean the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from msgspec import Meta, Struct

from phalanx.bench import report_page
from phalanx.bench.http_client import first_model
from phalanx.bench.measurement import METRICS, Measurement, figures, settings_json
from phalanx.bench.server_comparison import Figures, Side, compare, ratios
from phalanx.bench.workload import LoadConfig, check_load
from phalanx.cli.bench_view import progress, show_comparison, show_run
from phalanx.cli.chat import ServerAddress, api_base
from phalanx.cli.exits import INTERRUPTED
from phalanx.cli.setting_flags import Flags, key_file, keys_of, with_settings
from phalanx.cli.terminal import note, show_json
from phalanx.cluster.local_servers import local_servers
from phalanx.config import DEFAULT_PORT, Flag, Port
from phalanx.environment import API_KEY_VARIABLE
from phalanx.errors import ConfigError, ExitCode
from phalanx.open_files import raise_limit

NAMED = re.compile(r"([\w.-]+)=(https?://.+)")
PAGES = {".md": report_page.markdown, ".html": report_page.web_page}
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Where a server listens -> where it is asked."""
COMPARE_USAGE = "For example: phalanx bench compare old=http://127.0.0.1:8000 new=http://127.0.0.1:8001"


class TargetConfig(Struct, frozen=True, kw_only=True):
    """Which server is measured. The docstrings are the help of flags."""

    base_url: Annotated[str | None, Flag(default="the server of this machine")] = None
    """serve: the server's address."""
    host: str | None = None
    """serve: its host, instead."""
    port: Port | None = None
    """serve: its port, instead."""
    model: Annotated[str | None, Flag(default="the first")] = None
    """Which of the server's models."""
    ssl_certfile: Annotated[str | None, Flag(is_file=True)] = None
    """The server's certificate, if no authority signed it."""


class ResultConfig(Struct, frozen=True, kw_only=True):
    """What is reported, and where. The docstrings are the help of flags."""

    label: str | None = None
    """serve: the run's name in reports."""
    percentile_metrics: str = ",".join(METRICS)
    """serve: the times that are reported."""
    metric_percentiles: str = "99"
    """serve: their percentiles."""
    rounds: Annotated[int, Meta(ge=1)] = 3
    """compare: how often each server is measured."""
    save_result: bool = False
    """Write the figures to a JSON file."""
    result_dir: str = "."
    """Directory of that file."""
    result_filename: Annotated[str | None, Flag(default="of label, load, model and time")] = None
    """Name of that file."""


OWNERS = {"label": "serve", "percentile_metrics": "serve", "metric_percentiles": "serve", "rounds": "compare"}
"""Setting of a result -> the only action that it belongs to."""


class BenchResult(NamedTuple):
    """Figures for files, and whether nothing interrupted them."""

    found: dict[str, Any]
    completed: int
    is_whole: bool


@with_settings
def command(
    *,
    action: Annotated[Literal["serve", "compare", "report"], typer.Argument(help="What to do.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[A B|FILE...]", help="compare: two addresses, as URL or NAME=URL. report: JSON files."),
    ] = None,
    load: Annotated[LoadConfig, Flags()],
    target: Annotated[TargetConfig, Flags()],
    api_key: Annotated[str | None, typer.Option(help="Also PHALANX_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, key_file("--api-key")] = None,
    result: Annotated[ResultConfig, Flags()],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="report: the page, .md or .html.")
    ] = None,
) -> int:
    """serve: measure a running server under a load. compare: two servers under the same load, in turns. report: a page
    of such figures. Ctrl-C keeps what was measured."""
    if action == "report":
        defaults = (LoadConfig(), TargetConfig(), ResultConfig(), False, None, None)
        if (load, target, result, as_json, api_key, api_key_file) != defaults:
            raise ConfigError("`bench report` takes JSON files and -o only.", remedy="Leave the other flags out.")
        return _report(words or [], output)
    if output is not None:
        raise ConfigError("-o belongs to `bench report`.", remedy="To keep figures: --save-result --result-filename.")
    for name, owner in OWNERS.items():
        if owner != action and getattr(result, name) != getattr(ResultConfig(), name):
            raise ConfigError(f"--{name.replace('_', '-')} belongs to `bench {owner}`.", remedy="Leave it out.")
    if not result.save_result and (result.result_dir, result.result_filename) != (".", None):
        raise ConfigError("--result-dir and --result-filename need --save-result.", remedy="Give it, too.")
    check_load(load)
    folder = Path(result.result_dir)
    if result.save_result:
        folder.mkdir(parents=True, exist_ok=True)  # first, so that an error costs no measurement
    keys = keys_of("--api-key", api_key, api_key_file, API_KEY_VARIABLE, several=True)
    certificate = None if target.ssl_certfile is None else Path(target.ssl_certfile)

    def address(url: str) -> ServerAddress:
        return ServerAddress(url, next(iter(keys), None), certificate)

    raise_limit()  # of connections
    if action == "serve":
        measured = _serve(words or [], address, target, load, result)
    else:
        measured = _compare(words or [], address, target, load, result.rounds)
    show = show_json if as_json else show_run if action == "serve" else show_comparison
    show(measured.found)
    if result.save_result:
        file = folder / (result.result_filename or _name(measured.found, result.label, load))
        file.write_bytes(msgspec.json.format(msgspec.json.encode(measured.found)) + b"\n")
        note(f"{file} written")
    if not measured.is_whole:
        return INTERRUPTED
    return ExitCode.OK if measured.completed else ExitCode.CRASH


# serve -----------------------------------------------------------------------------------------------------------


def _serve(
    words: list[str],
    address: Callable[[str], ServerAddress],
    target: TargetConfig,
    load: LoadConfig,
    result: ResultConfig,
) -> BenchResult:
    """Measure one server.

    Raises:
        RequestFailed: the server lists no model, or a warm-up failed.
        ConfigError: a flag's value has no meaning.
    """
    if words:
        raise ConfigError(f"`bench serve` takes no {words[0]!r}.", remedy="Give the address as --base-url.")
    metrics, percentiles = _metrics(result.percentile_metrics), _percentiles(result.metric_percentiles)
    server = address(_url(target))
    model = target.model or ""
    measurement: Measurement | None = None

    async def run(on_end: Callable[[bool], None]) -> None:
        nonlocal model, measurement
        async with server.open() as client:
            model = model or await first_model(client)
            measurement = Measurement(load, model, on_end)
            await measurement.run(client)

    is_whole = _until_interrupted(run, load.num_prompts)
    if measurement is None:
        raise KeyboardInterrupt
    found = settings_json(load, model, result.label) | figures(measurement.load, metrics, percentiles)
    found["is_whole"] = is_whole
    return BenchResult(found, found["completed"], is_whole)


def _until_interrupted(run: Callable[[Callable[[bool], None]], Coroutine[Any, Any, None]], total: int) -> bool:
    """Run a measurement with a bar. Returns whether it came to its end; Ctrl-C ends it early."""
    try:
        with progress(total) as on_end:
            asyncio.run(run(on_end))
    except KeyboardInterrupt:
        note("Interrupted: requests under way do not count.")
        return False
    return True


def _url(target: TargetConfig) -> str:
    """The server's address: as given, or that of the one server that runs here, or the default."""
    if target.base_url is not None:
        if target.host is not None or target.port is not None:
            raise ConfigError("--base-url and --host or --port are both given.", remedy="Give one of them.")
        return api_base(target.base_url)
    running = [] if target.host or target.port else [at for one in local_servers() for at in one.addresses]
    if len(running) > 1:
        raise ConfigError(
            f"This machine serves at {', '.join(running)}.", remedy="Choose: --base-url http://127.0.0.1:PORT."
        )
    if running:
        host, _, port = running[0].rpartition(":")
        return api_base(f"http://{ANY_ADDRESS.get(host, host)}:{port}")
    host = target.host or "127.0.0.1"
    return api_base(f"http://{f'[{host}]' if ':' in host else host}:{target.port or DEFAULT_PORT}")


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(f"--percentile-metrics: {unknown[0]!r} is none of {', '.join(METRICS)}.")
    return list(dict.fromkeys(names))


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
        if not all(0 <= each <= 100 for each in found):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles {text!r} is not numbers from 0 to 100.", remedy="For example 50,95,99."
        ) from None
    return list(dict.fromkeys(found))


def _name(found: dict[str, Any], label: str | None, load: LoadConfig) -> str:
    """The name of a file of results, as that of vLLM."""
    if "ratios" in found:
        words = ["compare", *found["servers"]]
    else:
        words = [label or load.backend, f"{load.request_rate:g}qps"]
        words += [] if load.max_concurrency is None else [f"concurrency{load.max_concurrency}"]
        words.append(found["model_id"].rpartition("/")[2])
    return re.sub(r"[^\w.,-]+", "-", "-".join([*words, found["date"]])) + ".json"


# compare ---------------------------------------------------------------------------------------------------------


def _compare(
    words: list[str], address: Callable[[str], ServerAddress], target: TargetConfig, load: LoadConfig, rounds: int
) -> BenchResult:
    """Measure two servers in turns.

    Raises:
        RequestFailed: a server lists no model, or a warm-up failed.
        ConfigError: the words are not two addresses.
    """
    if target.base_url or target.host or target.port:
        raise ConfigError("`bench compare` takes its two addresses as arguments.", remedy=COMPARE_USAGE)
    servers = {name: address(url) for name, url in _two(words)}
    models = dict.fromkeys(servers, target.model or "")
    rows: dict[str, list[Figures]] = {name: [] for name in servers}

    async def run(on_end: Callable[[bool], None]) -> None:
        async with AsyncExitStack() as stack:
            sides = []
            for name, server in servers.items():
                client = await stack.enter_async_context(server.open())
                models[name] = models[name] or await first_model(client)
                sides.append(Side(name, client, models[name]))
            await compare(sides, load, rounds, rows, on_end)

    is_whole = _until_interrupted(run, 2 * rounds * load.num_prompts)
    found = settings_json(load, "", None)
    del found["model_id"], found["label"]
    found["servers"] = {
        name: {"url": server.url, "model_id": models[name], "rounds": rows[name]} for name, server in servers.items()
    }
    found |= {"ratios": ratios(*rows.values()), "is_whole": is_whole}
    return BenchResult(found, sum(one["completed"] for of_side in rows.values() for one in of_side), is_whole)


def _two(words: list[str]) -> list[tuple[str, str]]:
    """The names and addresses of two servers."""
    found = []
    for word, default in zip(words, "AB", strict=False):
        named = NAMED.fullmatch(word)
        name, url = (named[1], named[2]) if named else (default, word)
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{word!r} is not an address.", remedy=COMPARE_USAGE)
        found.append((name, api_base(url)))
    if len(words) != 2 or found[0][0] == found[1][0]:
        raise ConfigError("`bench compare` takes two addresses, of different names.", remedy=COMPARE_USAGE)
    return found


# report ----------------------------------------------------------------------------------------------------------


def _report(words: list[str], output: Path | None) -> int:
    """Write the page."""
    if not words or output is None or output.suffix not in PAGES:
        raise ConfigError(
            "`bench report` takes JSON files, and the page's name, which ends in .md or .html.",
            remedy="For example: phalanx bench report *.json -o page.html",
        )
    title = output.stem.replace("-", " ").replace("_", " ").capitalize()
    page = PAGES[output.suffix](title, report_page.read([Path(word) for word in words]))
    output.write_text(page, encoding="utf-8")
    note(f"{output} written")
    return ExitCode.OK
