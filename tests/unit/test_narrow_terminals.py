"""`chat`, and what `serve` says, on a terminal of 60 columns: one that draws, a dumb one, one without UTF-8."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from support.web import chunk, events, usage, web_server

from phalanx.errors import ExitCode

COLUMNS = 60
PATIENCE_S = 240.0
UNSET = ("COLUMNS", "LANG", "LC_ALL", "LC_CTYPE", "NO_COLOR", "PYTHONIOENCODING", "PYTHONUTF8", "TERM")
TERMINALS = {
    "xterm": {"TERM": "xterm", "LC_ALL": "C.UTF-8"},
    "dumb": {"TERM": "dumb", "LC_ALL": "C.UTF-8"},
    "ascii": {"TERM": "xterm", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
PHALANX = (sys.executable, "-P", "-m", "phalanx")
ANSWER = "Grüße aus Köln: " + "the quick brown fox says hello to the whole world again " * 4
ERROR = "Der Prompt ist länger als erlaubt, " + "and no more than so many tokens can be read at once " * 4


def on_terminal(kind: str, words: Sequence[str], typed: Sequence[tuple[str, bytes]] = ()) -> tuple[str, int]:
    """What a program shows there until it ends, and its status.

    Args:
        typed: what is typed once a text has been shown behind the last one that was waited for.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in UNSET} | TERMINALS[kind]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True)
    os.close(theirs)
    shown, seen, ends = b"", 0, time.monotonic() + PATIENCE_S
    keys = list(typed)
    while time.monotonic() < ends:
        while keys and (found := shown.find(keys[0][0].encode(), seen)) >= 0:
            seen = found + len(keys[0][0])
            os.write(ours, keys.pop(0)[1])
        if not select.select([ours], [], [], 1)[0]:
            continue
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    status = process.wait(PATIENCE_S)
    os.close(ours)
    assert not keys, shown
    return shown.decode("utf-8", "backslashreplace"), status


def plain(text: str) -> list[str]:
    """Lines without styles."""
    return re.sub("\x1b\\[[0-9;]*m", "", text).replace("\r", "").splitlines()


def says(lines: Sequence[str], text: str) -> bool:
    """Whether a text stands in these lines, broken between its words only."""
    return " ".join(text.split()) in " ".join(" ".join(lines).split())


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What the model was asked, in order."""
    return []


@pytest.fixture(scope="module")
def url(asked: list[str]) -> Iterator[str]:
    def answer(path: str, body: Any) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m"}]})
        asked.append(body["messages"][-1]["content"])
        if asked[-1] == "fail":
            return 400, json.dumps({"error": {"message": ERROR}})
        return 200, events(*map(chunk, re.findall(r" ?\S+", ANSWER)), chunk(finish="stop"), usage(1, 2))

    with web_server(answer) as base:
        yield base


QUIT = (">", b"/quit\n")


@pytest.mark.parametrize("kind", TERMINALS)
def test_a_chat_cuts_no_word(kind: str, url: str) -> None:
    shown, status = on_terminal(
        kind, [*PHALANX, "chat", url], [(">", b"hi\n"), ("tokens", b""), (">", b"fail\n"), ("error", b""), QUIT]
    )
    assert status == 0
    lines = plain(shown)
    assert max(map(cell_len, lines)) <= COLUMNS
    for text in (ANSWER, ERROR, "/system TEXT sets the system message, /quit (or Ctrl-D) ends"):
        assert says(lines, text.encode("ascii", "backslashreplace").decode() if kind == "ascii" else text)
    assert ("\x1b" in shown) == (kind != "dumb")


def test_a_line_of_the_history_is_drawn_behind_the_prompt(url: str, asked: list[str]) -> None:
    """Else it is drawn over the prompt, and breaks in other places than the terminal's."""
    line = "0123456789 " * 7
    up_then_home = b"\x1b[A\x01X\n"
    shown, _ = on_terminal(
        "xterm",
        [*PHALANX, "chat", url],
        [(">", f"{line}\n".encode()), ("tokens", b""), (">", up_then_home), ("tokens", b""), QUIT],
    )
    assert asked[-2:] == [line, f"X{line}"]
    assert "\rX" not in shown and "\r01" not in shown


@pytest.mark.parametrize("kind", TERMINALS)
def test_what_is_typed_is_sent_as_utf_8(kind: str, url: str, asked: list[str]) -> None:
    _, status = on_terminal(kind, [*PHALANX, "chat", url], [(">", "grüß 東京\n".encode()), ("tokens", b""), QUIT])
    assert status == 0 and asked[-1] == "grüß 東京"


@pytest.mark.parametrize("kind", TERMINALS)
def test_a_line_that_is_no_text_ends_no_conversation(kind: str, url: str, asked: list[str]) -> None:
    typed = [(">", b"gr\xfc\xdf\n"), ("not UTF-8)", b""), (">", b"still here\n"), ("tokens", b""), QUIT]
    _, status = on_terminal(kind, [*PHALANX, "chat", url], typed)
    assert status == 0 and asked[-1] == "still here" and not any("gr" in line for line in asked[-1:])


@pytest.mark.parametrize("kind", TERMINALS)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tool-call-parser", "x"], "error: --tool-call-parser 'x' is not known. Known are deepseek_v3, "),
        (["--pp", "2", "--attach", "/s"], "Leave one of them out: `phalanx serve --pp` starts stages on this machine,"),
    ],
)
def test_an_error_of_serve_cuts_no_word(kind: str, flags: list[str], said: str) -> None:
    shown, status = on_terminal(kind, [*PHALANX, "serve", "demo", *flags])
    assert status == ExitCode.CONFIG
    lines = plain(shown)
    assert max(map(len, lines)) <= COLUMNS and says(lines, said)
    assert all(line.startswith(("error: ", "  ")) for line in lines)
    assert ("\x1b" in shown) == (kind != "dumb")


def test_a_wrong_flag_has_no_box_that_is_wider_than_a_dumb_terminal() -> None:
    shown, status = on_terminal("dumb", [*PHALANX, "serve", "--port", "99999"])
    assert status == ExitCode.USAGE and "Invalid value for '--port': 99999 is not a whole number" in shown
    assert shown.isascii()


def test_a_name_that_the_locale_lacks_is_said_with_the_remedy() -> None:
    shown, status = on_terminal("ascii", [*PHALANX, "serve", "./modèle"])
    assert status == ExitCode.USAGE
    assert says(plain(shown), r"ascii, lacks characters of the argument './mod\xe8le'. Set LC_ALL=C.UTF-8.")


LOADING = """
from types import SimpleNamespace
from phalanx.catalog.pull_progress import PullProgress
from phalanx.cli import streams
from phalanx.cli.terminal import LoadingView, PullView
from phalanx.supervision.client import LoadProgress

streams.secure(goes_on=True)
with PullView() as show:
    for done in range(5):
        show(PullProgress("importing a-model-with-a-long-name-Q4_K_M-00001-of-00009.gguf", total=4, completed=done))

class Engine:
    asked = 0
    @property
    def state(self):
        self.asked += 1
        if self.asked > 10:  # twice for each line
            return SimpleNamespace(phase="ready", progress=None)
        return SimpleNamespace(phase="loading", progress=LoadProgress("reading the weights", self.asked, 10))

view = LoadingView(Engine())
with view:
    view._thread.join()
"""


@pytest.mark.parametrize("kind", TERMINALS)
def test_what_is_loaded_is_shown_on_lines_of_its_own(kind: str) -> None:
    shown, status = on_terminal(kind, [sys.executable, "-c", LOADING])
    assert status == 0, shown
    if kind == "dumb":
        assert "\x1b" not in shown and "reading the weights: 100%" in shown and ".gguf: 100%" in shown
        return
    drawn = [line for line in re.split("\r\n?|\x1b\\[2K", re.sub("\x1b\\[[0-9;]*m", "", shown)) if "importing" in line]
    assert drawn and all(cell_len(line.rstrip()) <= COLUMNS and "4/4 bytes" in line for line in drawn[-1:])
