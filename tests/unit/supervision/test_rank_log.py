"""Each error of a group stands once in what its supervisor prints. `e2e/test_cli.py` has a real group."""

from __future__ import annotations

import logging

import pytest

from phalanx.faults import recognise
from phalanx.supervision.rank_log import MAX_NOTICE, RankLog

SENTENCE = (
    "ModelUnsupported: model cannot be split over 16 ranks: a part would end inside a group. Serve it with --tp 4."
)
NOTICE = [29 * "-", "prterun detected that one or more processes exited with non-zero status", "", 29 * "-"]


def printed(log: RankLog, *lines: str, process: str = "mpirun") -> list[str]:
    return [admitted for line in lines for admitted in log.admit(process, line)]


def test_an_error_that_every_rank_logs_and_reports_is_in_the_reason_alone():
    log = RankLog()
    own = [f"rank {rank}: {SENTENCE}" for rank in range(16)]
    of_others = [f"rank {rank}: rank 8 (vm, pid 8) {SENTENCE}" for rank in range(16)]
    assert printed(log, "rank 0: joined in 0.1 s", *own, *of_others, *NOTICE) == ["rank 0: joined in 0.1 s"]
    assert log.in_full(f"rank 8 (vm, pid 8) {SENTENCE}") == f"rank 8 (vm, pid 8) {SENTENCE}"
    assert log.held() == []


DETAILS = [
    "rank 0: joining 16 ranks over mpi, 60 s at most",
    "rank 15: joined in 0.1 s",
    "rank 0: rank 1 (vm, pid 7) on x86_64 connected from this machine",
    "rank 3: stage 1, the last is 1: layers 5 to 7",
    "rank 0: before loading:",
    "  host rank weights",
    "    vm    0    0.01",
    "rank 0: loading 0.01 GiB of weights from /m",
    "rank 0: loaded in 0.1 s: bfloat16",
    "rank 0: up to 17.20 GiB of weights and caches stay in memory (wired); --no-wired-limit lets macOS page",
    "rank 0: /a b/model: model type qwen3, 8 KVCache -> ragged rows",
    "rank 0: kernels: native: avx512bf16, 2 threads: matmul",
    "rank 0: kernels: MLX computes on Device(gpu, 0)",
    "rank 0: self-test passed in 0.3 s: 8 ranks over mpi",
]
SUMMARY = "rank 0: context 4096 tokens; up to 16 rows; KV budget 8.33 GiB (8192 bytes a token), prefix cache 2.78 GiB"
ALWAYS = [
    "rank 1: loading failed twice",
    "rank 1: a warning that is loaded in doubt",
    "rank 0: kernels: MLX's own, on one thread (no compiler)",
    "rank 0: speculation: off: the model keeps recurrent state",
]


def test_the_details_of_a_good_start_are_printed_with_debug_and_its_summary_with_info():
    lines = [*DETAILS, SUMMARY, *ALWAYS]
    assert printed(RankLog(logging.DEBUG), *lines) == lines
    assert printed(RankLog(logging.INFO), *lines) == [SUMMARY, *ALWAYS]
    assert printed(RankLog(logging.WARNING), *lines) == ALWAYS


def test_the_reason_has_the_error_as_its_rank_wrote_it():
    """The other ranks pass it on shortened, on one line."""
    log = RankLog()
    message = "model does not fit: b lacks 12 GiB.\n  host  rank\n     b     1\n" + 40 * "Use more machines. "
    lines = f"rank 1: MemoryShortage: {message}".replace("\n", "\n  ").splitlines()
    assert printed(log, *lines) == []
    shortened = f"rank 1 (b, pid 5) MemoryShortage: {' '.join(message.split())}"[:400]
    assert printed(log, f"rank 0: {shortened}") == []
    assert log.in_full(shortened) == f"rank 1 (b, pid 5) MemoryShortage: {message}"
    assert log.held() == []


def test_a_known_fault_is_still_known_by_the_line_that_is_left():
    """The leader's own failure comes without its name."""
    log = RankLog()
    printed(log, "rank 0: MemoryShortage: big does not fit: b lacks 12.00 GiB.")
    reason = log.in_full("big does not fit: b lacks 12.00 GiB.")
    assert reason == "MemoryShortage: big does not fit: b lacks 12.00 GiB."
    fault = recognise(f"phalanx could not start: {reason}")
    assert fault is not None and fault == recognise("rank 0: MemoryShortage: x")


def test_an_error_that_is_not_the_reason_is_printed_at_the_end():
    log = RankLog()
    printed(log, f"rank 0: {SENTENCE}", "rank 1: ConfigError: no such dtype", "  Say another.", process="rank 1")
    assert log.in_full("rank 1 was ended by SIGKILL") == "rank 1 was ended by SIGKILL"
    assert log.held() == [SENTENCE, "ConfigError: no such dtype", "Say another."] and log.held() == []


def test_what_the_others_say_of_a_lost_rank_is_printed_once():
    log = RankLog()
    lost = "rank 2 (vm, pid 9) closed its connection"
    assert printed(log, *(f"rank {rank}: {lost}" for rank in (0, 1, 3))) == [f"rank 0: {lost}"]


@pytest.mark.parametrize(
    "line",
    ["rank 0: kernels: native", "rank 0: KV: 3", "error: x", "  indented", "rank 1: the engine crashed", "-----"],
)
def test_other_lines_pass(line: str):
    assert printed(RankLog(), line, line) == [line, line]


def test_other_notices_of_mpirun_pass_also_without_an_end():
    log = RankLog()
    killed = [29 * "-", "prterun noticed that process rank 3 with PID 77 on node vm exited on", 29 * "-"]
    assert printed(log, *killed) == killed
    endless = [29 * "-", *(MAX_NOTICE - 1) * ["x"]]
    assert printed(log, *endless, "y") == [*endless, "y"]
    assert printed(log, 29 * "-", "cut") == [] and log.held() == [29 * "-", "cut"]
