"""`phalanx top` on narrow and wide terminals, without colours, into a pipe; hostile names; servers that are none."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from support.web import raw_server, web_server

from phalanx.cli.main import main
from phalanx.cli.top_view import TopView
from phalanx.errors import ExitCode

SERVER: dict[str, Any] = {
    "server": {
        "kind": "server", "models": ["demo"], "phase": "ready", "running": 2, "waiting": 1, "limit": 16, "ranks": 2,
        "prefix_hit_rate": 0.43,
    },
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
    Console(file=out, width=width, force_terminal=colours, no_color=not colours).print(TopView(parts, height))
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
                 "12 blocks on disk"):  # fmt: skip
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


def test_an_address_without_a_server_is_told_as_chat_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(lambda path, body: (200, "{}")) as url:
        pass
    assert main(["top", url]) == ExitCode.CRASH
    told = " ".join(capsys.readouterr().err.split())
    assert f"No answer from {url}" in told and "Is the server running there?" in told
