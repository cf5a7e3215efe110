"""The trace of an engine."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import msgspec
import pytest

from phalanx.engine.step_timer import StepTimer
from phalanx.engine.trace import Trace
from phalanx.errors import ConfigError
from phalanx.types import Cancel


def test_lines_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    for request in ("a", "b"):
        Trace(str(file)).message(Cancel(request))
    lines = [msgspec.json.decode(line)["message"] for line in file.read_bytes().splitlines()]
    assert [line["id"] for line in lines] == ["a", "b"]


def test_a_step_is_followed_by_what_it_cost(tmp_path: Path) -> None:
    trace, timer = Trace(str(tmp_path / "trace")), StepTimer()
    timer.start()
    with timer.phase("model"):
        gc.collect()
    began = time.monotonic()
    trace.cost(7, timer, 0.5)
    trace.cost(8, timer, 0.0)
    first, second = [msgspec.json.decode(line)["cost"] for line in (tmp_path / "trace").read_bytes().splitlines()]
    assert (first["id"], first["prefill_s"], first["collections"]) == (7, 0.5, 1)
    assert first["seconds"] >= first["phases_s"]["model"] > first["phases_s"]["draft"] == 0
    assert first["at"] >= began and second["collections"] == 0
    assert min(first["page_faults"], first["interruptions"], second["page_faults"]) >= 0


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace .*/none/trace cannot be written: No such file or directory"):
        Trace(str(tmp_path / "none" / "trace"))


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace("/dev/full")
    for request in ("a", "b"):
        trace.message(Cancel(request))
    assert caplog.messages == ["--trace /dev/full ends here: No space left on device"]
