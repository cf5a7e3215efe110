"""A Mac that serves stays awake, with a stand-in for `caffeinate`."""

from __future__ import annotations

import logging
import os
import platform
import time
from pathlib import Path

import pytest

from phalanx.supervision.awake import stay_awake


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file to which the stand-in writes its arguments; the system is macOS."""
    tool, file = tmp_path / "caffeinate", tmp_path / "calls"
    tool.write_text(f'#!/bin/sh\necho "$@" > {file}.new && /bin/mv {file}.new {file}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    return file


def test_caffeinate_runs_as_long_as_this_process(calls):
    stay_awake()
    while not calls.exists():
        time.sleep(0.01)
    assert calls.read_text() == f"-ims -w {os.getpid()}\n"


def test_other_systems_have_no_caffeinate(calls, monkeypatch, caplog):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    calls.with_name("caffeinate").unlink()
    stay_awake()
    assert caplog.text == "", "it did not look for one"


def test_a_missing_caffeinate_is_a_warning(calls, caplog):
    calls.with_name("caffeinate").unlink()
    with caplog.at_level(logging.WARNING):
        stay_awake()
    assert "may go to sleep while it serves: caffeinate: No such file" in caplog.text
