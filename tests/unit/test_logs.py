"""Logs that somebody tries to fill."""

from __future__ import annotations

import io
import logging
import os
import stat
import subprocess
import sys
import time

import pytest

from phalanx import log_limits
from phalanx.log_limits import ALLOWED, KINDS, PERIOD_S, CountingHandler, RepeatCounter, kind_of, rotate


def test_repeats_are_counted():
    now = [0.0]
    repeats = RepeatCounter(lambda: now[0])
    written = sum(repeats.admit(kind_of(f"client {i} left"), f"client {i} left") for i in range(4000))
    assert written == ALLOWED
    assert repeats.admit("other", "other")
    assert repeats.ended() == []
    now[0] = PERIOD_S
    assert repeats.ended() == [f"(repeated {4000 - ALLOWED:,} times: client 3999 left)"]
    assert repeats.admit(kind_of("client 1 left"), "client 1 left")
    now[0] += PERIOD_S
    assert repeats.ended() == []


def test_lines_of_ever_new_kinds_are_counted_too():
    repeats = RepeatCounter(lambda: 0.0)
    written = sum(repeats.admit(kind_of(word), word) for word in (f"x{'y' * i}" for i in range(KIND_LINES)))
    assert written <= KINDS + ALLOWED


KIND_LINES = log_limits.KIND_CHARS * 8


def test_a_log_counts_by_the_text_before_its_arguments():
    stream, now = io.StringIO(), [0.0]
    logger = logging.Logger("phalanx.test")
    handler = CountingHandler(stream, lambda: now[0])
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    for i in range(1000):
        logger.warning("Invalid HTTP request from %s", i)
    assert stream.getvalue().count("\n") == ALLOWED
    now[0] = PERIOD_S
    logger.info("something else")
    assert stream.getvalue().splitlines()[-2:] == [
        f"WARNING (repeated {1000 - ALLOWED} times: Invalid HTTP request from 999)",
        "INFO something else",
    ]
    for _ in range(50):
        logger.error("late")
    handler.close()
    assert stream.getvalue().splitlines()[-1] == f"WARNING (repeated {50 - ALLOWED} times: late)"


def test_a_large_log_starts_again_while_it_is_written(tmp_path):
    log = tmp_path / "rank-0.log"
    with log.open("ab") as output:
        code = "import sys, time\nfor i in range(100): print('x' * 99, flush=True); sys.stdin.readline()"
        writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output)
    assert writer.stdin is not None
    turned = before = 0
    for _ in range(100):
        while log.stat().st_size <= before:
            time.sleep(0.001)
            assert writer.poll() is None
        turned += rotate(log, 1000)
        before = log.stat().st_size
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    writer.stdin.close()
    assert writer.wait() == 0
    assert turned >= 5
    assert log.stat().st_size <= 1200
    assert set((tmp_path / "rank-0.log.1").read_text().splitlines()) == {"x" * 99}


def test_what_is_kept_of_a_large_log_is_as_private_as_the_log(tmp_path):
    log, elsewhere = tmp_path / "log", tmp_path / "elsewhere"
    elsewhere.write_text("another file")
    (tmp_path / "log.1").symlink_to(elsewhere)
    log.touch(mode=0o600)
    before = os.umask(0)
    try:
        for size in (2000, 3000):
            log.write_text("x" * size)
            assert rotate(log, 1000)
            assert (tmp_path / "log.1").stat().st_size == size
            assert stat.S_IMODE((tmp_path / "log.1").lstat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert elsewhere.read_text() == "another file"


@pytest.mark.parametrize("made", [False, True])
def test_a_small_log_and_none_are_left_alone(tmp_path, made):
    if made:
        (tmp_path / "log").write_text("a few lines")
    assert not rotate(tmp_path / "log")
    assert not (tmp_path / "log.1").exists()
