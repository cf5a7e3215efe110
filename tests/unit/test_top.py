"""`phalanx top` on narrow and wide terminals, without colours, into a pipe; hostile names; servers that are none."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from rich.console import Console, Group
from rich.live import Live
from support.web import raw_server, web_server

from phalanx.cli import top
from phalanx.cli.main import main
from phalanx.cli.top_view import TopView
from phalanx.errors import ConfigError, ExitCode

SERVER: dict[str, Any] = {
    "server": {
        "kind": "server", "models": ["demo"], "phase": "ready", "running": 2, "waiting": 1, "limit": 16, "ranks": 2,
        "prefix_hit_rate": 0.43, "measured": {"tokens_per_second": 24.55, "ttft_seconds": 0.5},
        "predicted": {"tokens_per_second": 30.0, "ttft_seconds": 0.4},
    },
    "links": [
        {
            "name": "rank 0 on a, rank 1 on b", "carries": "hidden states", "messages": 4000, "bytes": 5 << 20,
            "waited_seconds": 1.5, "faults": 1, "problem": "the connection broke", "remedy": "Run `phalanx net test`.",
        },
        *(
            {"name": f"rank 0 on a, rank {n} on b", "carries": "plans", "latency_us": 212, "resent": 3,
             "segments": 9000, "faults": 0}
            for n in range(1, 12)
        ),
    ],
    "hosts/studio1": {
        "ranks": [{"rank": 0, "mismatches": 0}, {"rank": 1, "mismatches": 3}],
        "memory": {
            "total": 25 << 30, "available": 24 << 30, "guard": 5 << 30, "weights": 9 << 20, "rows": 1 << 30,
            "rows_budget": 10 << 30, "prefixes": 0, "prefixes_budget": 3 << 30, "disk_blocks": 12,
        },
    },
    "requests/a": {
        "id": "chatcmpl-0b0aaaaaaaaaaaaaaaa16c5d7", "number": 1, "state": "decode", "prompt_tokens": 254,
        "cached_tokens": 253, "output_tokens": 900, "tokens_per_second": 374.9, "drafted_tokens": 10,
        "accepted_tokens": 9, "seconds": 2.5,
    },
    "requests/b": {
        "id": "req_b", "number": 2, "state": "prefill", "prefilled": 0.5, "prompt_tokens": 9, "seconds": 0.1
    },
    "events/1": {"what": "rank 1 was killed by signal 9", "did": "again", "remedy": "Run `phalanx logs`."},
}  # fmt: skip
GATEWAY: dict[str, Any] = {
    "server": {"kind": "gateway", "phase": "ready", "running": 1, "waiting": 0, "limit": 32},
    "replicas/a": {"state": "up", "reason": "", "in_flight": 1, "limit": 16, "models": ["demo"]},
    "replicas/b": {"state": "down", "reason": "cannot be reached", "in_flight": 0, "limit": 16, "models": None},
    "requests/1": {
        "id": "req_1", "number": 1, "state": "paused", "model": "demo", "replica": "a", "first_text_seconds": None,
        "moves": 1, "seconds": 3.0,
    },
    "events/1": {"what": "up", "is_good": True},
}  # fmt: skip


def shown(parts: dict[str, Any], width: int, height: int | None = None, colours: bool = False) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, no_color=not colours)
    console.print(Group(*TopView(parts, height).lines(console, width)))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("parts", [SERVER, GATEWAY], ids=["server", "gateway"])
def test_no_line_is_wider_than_the_terminal(parts: dict[str, Any], width: int) -> None:
    lines = shown(parts, width)
    assert max(map(len, lines)) <= width and not any("\x1b" in line for line in lines)


def test_a_server_is_shown_whole() -> None:
    text = "\n".join(shown(SERVER, 200))
    for said in ("demo", "2 of 16 rows", "1 waiting", "43% of prompts cached", "rows 1.0 GiB of 10.0 GiB", "374.9",
                 "3 steps differ", "prefill 50%", "90%", "rank 1 was killed by signal 9", "phalanx logs",
                 "12 blocks on disk", "24.6 tok/s measured, 30.0 tok/s predicted",
                 "0.50 s to the first token measured, 0.40 s to the first token predicted"):  # fmt: skip
        assert said in text
    assert text.index("req_b") < text.index("chatcmpl-")  # the newest first


def test_a_long_fault_breaks_between_words() -> None:
    what = "rank 1 (studio2, pid 7) was ended by SIGKILL (out of memory, or killed by hand), and so on"
    lines = shown({**SERVER, "events/1": {"what": what, "remedy": ""}}, 60)
    assert what in " ".join(line.strip() for line in lines)


def test_a_gateway_shows_a_bad_replica_first() -> None:
    lines = shown(GATEWAY, 200)
    replicas = [line.split()[0] for line in lines if "demo" in line or "cannot be reached" in line]
    assert replicas[0] == "b" and any("cannot be reached" in line for line in lines)


@pytest.mark.parametrize("width", [60, 200])
def test_a_bad_link_is_shown_first_with_its_remedy(width: int) -> None:
    text = "\n".join(shown(SERVER, width))
    words = " ".join(text.split())
    assert "the connection broke Run `phalanx net test`." in words
    assert text.index("hidden states") < text.index("rank 1 on b  plans")
    assert "0.21 ms" in text and "3/9,000" in text and "5 MiB" in text
    assert "rank 5 on b" in text and "rank 6 on b" not in text, "requests have room as well"


def test_figures_that_no_link_has_take_no_column() -> None:
    links = [{"name": "ranks 0, 1", "carries": "plans", "faults": 0}]
    (head,) = [line for line in shown({"links": links}, 60) if "LINK" in line]
    assert head.split() == ["LINK", "CARRIES", "FAULTS", "WHY"]


@pytest.mark.parametrize("given", [{}, {"measured": {}}, {"predicted": None}])
def test_what_is_not_known_is_not_shown(given: dict[str, Any]) -> None:
    server = {name: value for name, value in SERVER["server"].items() if name not in ("measured", "predicted")}
    text = "\n".join(shown({"server": {**server, **given}}, 200))
    assert "tok/s" not in text and "LINK" not in text


def test_a_short_terminal_gets_as_many_lines_as_it_has() -> None:
    assert len(shown(SERVER, 60, height=3)) == 3


def test_control_characters_are_not_shown() -> None:
    hostile = "\x1b[2J\x07[red]x[/red]\r\n\u202eevil"
    parts = json.loads(json.dumps(SERVER).replace("req_b", json.dumps(hostile)[1:-1]))
    parts["server"]["models"] = [hostile]
    parts[f"hosts/{hostile}"] = {"ranks": []}
    text = "\n".join(shown(parts, 200))
    assert not set("\x1b\x07\r\u202e") & set(text) and "[red]x" in text


def stream(*events: tuple[str, Any]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)


def test_into_a_pipe_it_prints_the_snapshot_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = ": hello\n\n" + stream(("snapshot", SERVER), ("change", {"set": {}, "drop": ["requests/a"]}))
    with web_server(lambda path, body: (200, text)) as url:
        assert main(["top", url]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "2 of 16 rows" in out and "chatcmpl-" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (401, "{}", "refuses the key"),
        (404, "{}", "answers 404"),
        (429, "{}", "answers 429: too many viewers"),
        (200, "event: snapshot\ndata: [1]\n\n", "does not answer as phalanx does"),
        (200, "event: snapshot\ndata: {\n\n", "does not answer as phalanx does"),
    ],
)
def test_what_is_no_phalanx_is_named(status: int, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (status, text)) as url:
        assert main(["top", url]) == ExitCode.CONFIG
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(b"") as url:
        assert main(["top", url]) == ExitCode.CONFIG
    assert "does not answer as phalanx does" in " ".join(capsys.readouterr().err.split())


JUNK: tuple[Any, ...] = (None, 5, -1e308, 1 << 60, "x", [], [None], {}, {"a": None}, [[5]], True)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value inside a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], junk)
    return copy


@pytest.mark.parametrize("parts", [SERVER, GATEWAY], ids=["server", "gateway"])
def test_a_server_that_says_anything_is_shown_or_named(parts: dict[str, Any]) -> None:
    console, named = Console(file=io.StringIO(), width=80), 0
    for path in places(parts):
        for junk in JUNK if path else ():
            try:
                console.print(top._drawn("http://a", TopView(replaced(parts, path, junk), 24), console))
            except ConfigError as error:
                named += 1
                assert "http://a does not answer as phalanx does" in str(error)
    assert named


@pytest.mark.parametrize("last", [None, ConfigError("http://a refuses the key.")], ids=["ctrl-c", "another key"])
def test_a_server_that_goes_away_is_shown_as_gone_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, last: ConfigError | None
) -> None:
    lives: list[tuple[dict[str, Any] | None, BaseException | None]] = [
        (SERVER, top.ServerGone("broken")), (None, top.ServerGone("refused")), (GATEWAY, None),
        (None, last or KeyboardInterrupt()),
    ]  # fmt: skip

    async def overviews(*_: object) -> AsyncGenerator[dict[str, Any]]:
        parts, end = lives.pop(0)
        if parts is not None:
            yield parts
        if end is not None:
            raise end

    monkeypatch.setattr(top, "_overviews", overviews)
    monkeypatch.setattr(top, "RETRY_S", 0.0)
    out = io.StringIO()
    with (
        pytest.raises(type(last) if last is not None else KeyboardInterrupt),
        Live(console=Console(file=out, width=120, height=40, force_terminal=True), auto_refresh=False) as live,
    ):
        asyncio.run(top._follow(live, "http://a", None, None))
    shown_last = out.getvalue()
    assert shown_last.count("no connection, trying again") >= 3
    assert shown_last.index("demo") < shown_last.index("no connection") < shown_last.index("gateway")


def test_a_server_that_never_answered_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def overviews(*_: object) -> AsyncGenerator[dict[str, Any]]:
        raise top.ServerGone("nobody is there")
        yield {}

    monkeypatch.setattr(top, "_overviews", overviews)
    console = Console(file=io.StringIO(), width=120, height=40, force_terminal=True)
    with pytest.raises(top.ServerGone), Live(console=console, auto_refresh=False) as live:
        asyncio.run(top._follow(live, "http://a", None, None))


def test_a_stream_that_ends_without_a_snapshot_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, ": nothing\n\n")) as url:
        assert main(["top", url]) == ExitCode.CONFIG
    assert "has ended the stream" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 200])
def test_without_colours_no_colour_is_sent(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    console.print(top._drawn("http://a", TopView(SERVER, None), console))
    assert "\x1b[3" not in out.getvalue() and "demo" in out.getvalue()


def test_an_address_without_a_server_is_told_as_chat_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, "{}")) as url:
        pass
    assert main(["top", url]) == ExitCode.CRASH
    told = " ".join(capsys.readouterr().err.split())
    assert f"No answer from {url}" in told and "Is the server running there?" in told
