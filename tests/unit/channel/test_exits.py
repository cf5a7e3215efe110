"""Real processes that are killed, stopped, stuck or broken: which status each rank ends with, and what it says."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import patiently, strict
from support.channels import FAST, WAIT_S, Processes, environment, names, until

from phalanx.errors import ExitCode

Start = Callable[..., Processes]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks; whatever is left of them afterwards is killed."""
    started: list[Processes] = []

    def begin(*arguments: Any, **options: Any) -> Processes:
        started.append(Processes(*arguments, **options))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def ended(ranks: Processes, rank: int, code: ExitCode, culprit: int) -> str:
    """The one line of a rank that ended: who it is, the status, who is at fault."""
    status, text = ranks.end(rank)
    assert status == code, text
    me = f"rank {rank} (host{rank}, pid {ranks.pid(rank)}) ends with status {int(code)} ({code.name}): "
    assert text.startswith(me) and text.count("\n") == 1, text
    assert text.removeprefix(me).startswith(f"rank {culprit} (host{culprit}, pid {ranks.pid(culprit)}) "), text
    return text.removeprefix(me)


def test_an_orderly_end(start: Start):
    ranks = start(3)
    assert ranks.ask(0, 'broadcast "plan"') == "None"
    for rank in (1, 2):
        assert ranks.ask(rank, "receive") == "b'plan'"
    ranks.ask(0, "close")
    for rank in (1, 2):
        assert ranks.ask(rank, "receive") == "None"
        ranks.ask(rank, "close")
    assert [ranks.end(rank) for rank in range(3)] == [(0, "")] * 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(start: Start, victim: int):
    ranks = start(3)
    ranks.send_signal(victim, signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert "connection" in ended(ranks, rank, ExitCode.PEER_LOST, victim)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_silent_to_the_others_and_blames_itself(start: Start, victim: int, in_turn: bool):
    """Wherever it stops: anywhere, or between looking at the clock and reading."""

    def scenario(silence_s: float) -> None:
        ranks = start(3, strict(silence_s))
        if in_turn:
            ranks.tell(victim, "stop_in_turn")
        else:
            ranks.send_signal(victim, signal.SIGSTOP)
        for rank in {0, 1, 2} - {victim}:
            assert "has given no sign of life" in ended(ranks, rank, ExitCode.PEER_SILENT, victim)
        ranks.send_signal(victim, signal.SIGCONT)
        assert "was suspended for" in ended(ranks, victim, ExitCode.PEER_SILENT, victim)

    patiently(scenario)


def test_a_leader_that_was_stopped_does_not_blame_workers_that_waited(start: Start):
    def scenario(silence_s: float) -> None:
        ranks = start(2, own={0: strict(silence_s)})
        ranks.send_signal(0, signal.SIGSTOP)
        time.sleep(1.5 * silence_s)
        ranks.send_signal(0, signal.SIGCONT)
        awake = int(ranks.ask(0, "turns"))
        while int(ranks.ask(0, "turns")) < awake + 2 * silence_s / FAST.heartbeat_s:
            time.sleep(FAST.heartbeat_s)
        ranks.ask(0, "close")
        assert ranks.end(0) == (0, "")

    patiently(scenario)


def test_a_rank_that_does_not_come_to_a_step(start: Start):
    ranks = start(3)
    for rank in range(3):
        ranks.ask(rank, f"enter 41 {WAIT_S}")
    for rank in range(3):
        ranks.ask(rank, "leave 41")
    ranks.ask(2, f"enter 42 {WAIT_S}")
    until(lambda: ranks.ask(0, "heard") == "[(41, False), (42, True)]")
    ranks.ask(0, "enter 42 0.1")
    for rank in range(3):
        assert "while the others are in step 42" in ended(ranks, rank, ExitCode.STALLED, 1)


def test_a_step_in_which_all_are_stuck(start: Start):
    ranks = start(2)
    ranks.ask(1, "enter 1 0.1")  # it judges later than the leader
    until(lambda: ranks.ask(0, "heard") == "[(1, True)]")
    ranks.ask(0, "enter 1 0.1")
    for rank in range(2):
        status, text = ranks.end(rank)
        assert status == ExitCode.STALLED and names(text) == [rank, 0, 1], text


def test_all_ranks_exit_with_the_code_of_the_rank_that_failed(start: Start):
    ranks = start(3)
    ranks.tell(2, 'fail 73 "layer_3_of_step_9:_a_sum_is_wrong"')
    for rank in range(3):
        assert "layer 3 of step 9: a sum is wrong" in ended(ranks, rank, ExitCode.NUMERIC, 2)


def test_the_process_ends_even_when_the_callback_breaks(start: Start):
    ranks = start(2, callback="breaks")
    ranks.send_signal(1, signal.SIGKILL)
    status, text = ranks.end(0)
    assert status == ExitCode.PEER_LOST and "ZeroDivisionError" in text and "rank 1 (host1" in text


def test_a_full_stderr_does_not_keep_the_process_alive():
    program = "import os\nfrom support.channels import *\nfrom phalanx.dist.watchdog import exit_on_failure\n"
    program += "os.set_blocking(2, False)\ntry:\n  while os.write(2, bytes(4096)): pass\nexcept BlockingIOError: pass\n"
    program += (
        "os.set_blocking(2, True)\nexit_on_failure(identity(1))(PeerFailure(code=ExitCode.DESYNC, cause='differs'))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=environment(), stderr=subprocess.PIPE)
    assert process.wait(WAIT_S) == ExitCode.DESYNC
    assert process.stderr is not None
    process.stderr.close()
