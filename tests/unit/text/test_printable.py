"""What a terminal and a log get to see of texts that strangers wrote."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from phalanx.cli import model, terminal
from phalanx.cli.list import print_columns
from phalanx.cluster.file_transfer import Inventory, Manifest, MissingFile
from phalanx.errors import ClusterError, ExitCode, ModelError
from phalanx.text.printable import printable

ATTACKS = {
    "\x1b[2J\x1b]0;title\x07": "\\x1b[2J\\x1b]0;title\\x07",  # clears the screen, renames the window
    "\x9b31m": "\\x9b31m",  # an escape sequence in one byte
    "\rforged": "\\rforged",
    "a\x08b\x7f\x00": "a\\x08b\\x7f\\x00",
    "\u202egnp.exe\u202c": "\\u202egnp.exe\\u202c",
    "\u2066x\u2069": "\\u2066x\\u2069",
}
HARMLESS = "tabs\tand\nlines, ünïcode, \u200eشكرا\u200f, 👩\u200d👧, \\x1b"


@pytest.mark.parametrize(("text", "shown"), ATTACKS.items())
def test_control_characters_are_spelled(text, shown):
    assert printable(f"a {text} b") == f"a {shown} b"


def test_no_cell_of_a_table_begins_a_row(capsys):
    print_columns([["NAME", "LACKS"], ["owner/name", "x\nsmollm2     nothing\x1b[2J"]])
    assert capsys.readouterr().out == "NAME        LACKS\nowner/name  x smollm2 nothing\\x1b[2J\n"


def test_everything_else_is_shown_as_it_is():
    assert printable(HARMLESS) == HARMLESS


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_models_text_commands_no_terminal_and_is_exact_in_a_file(is_terminal, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    for text in ATTACKS:
        terminal.show(text)
    assert out.getvalue() == "".join(ATTACKS.values() if is_terminal else ATTACKS)


def test_errors_and_notes_command_no_terminal(capsys):
    terminal.report(ModelError("no model \x1b[2J", remedy="Read \x9b2J."))
    terminal.note("at \x1b]0;x\x07")
    said = capsys.readouterr().err
    terminal.report(ModelError("a\nerror: forged", remedy="b\nerror: forged"))
    assert "\nerror: forged" not in capsys.readouterr().err
    assert "\\x1b[2J" in said and "\\x9b2J" in said and not re.search("[\x07\x1b\x9b]", said)


def test_names_of_a_models_files_command_no_terminal(monkeypatch, capsys):
    async def lacking(*_):
        missing = [MissingFile(path="a\x1b[2J\nb: all 1 files are the same", have=0)]
        return {"a": Inventory(directory="/m", missing=missing), "b": ClusterError("no \x1b[2J\nc: fine")}

    monkeypatch.setattr(model, "lacking", lacking)
    assert model._verify(Manifest(place="m", files=[]), []) == ExitCode.CRASH
    said = capsys.readouterr().out
    assert "\x1b" not in said and [line[0] for line in said.splitlines()] == ["a", " ", "n", " "]


def test_a_value_in_a_log_line_forges_no_line(monkeypatch):
    log, out = logging.getLogger("phalanx.test"), io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        terminal.set_up_logging("info")
        log.warning("quarantined %s", "a\n12:00:00 INFO phalanx: all is well\r\x1b[1A")
        log.info("next")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    entries = [line for line in out.getvalue().splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    assert len(entries) == 2 and entries[1].endswith("next")
    assert not re.search("[\r\x1b]", out.getvalue())
