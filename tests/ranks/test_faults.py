"""Every way in which a rank or the fabric can fail, under streaming load, with real processes (A1, A6, A9).

In each: the cause is named in /health, no process is left, and the streams go on with the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest
from groups import group_server, named, signal_to, through_a_fault
from support.driver import PATIENT, Driver

from phalanx.config import EngineConfig
from phalanx.supervision.process import EngineProcess

GROUPS = [(2, "ring"), (4, "mpi")]
SOAK = pytest.mark.soak  # what it adds is another fabric, where the fabric has no part in how the fault is found


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_ranks_that_are_killed_or_stopped(group_model, expected, ranks, backend):
    """One after the other on one group: it may be restarted three times in five minutes."""
    last = ranks - 1
    with group_server(group_model, ranks, backend, inject=f"kill:rank={last},step=30") as running:
        named(through_a_fault(running, expected), f"rank {last}", "SIGKILL")
        named(through_a_fault(running, expected, signal_to(running, 0, signal.SIGKILL)), "rank 0", "SIGKILL")
        reasons = through_a_fault(running, expected, signal_to(running, 1, signal.SIGSTOP))
        named(reasons, "rank 1", "no sign of life")


@pytest.mark.parametrize(("ranks", "backend"), [GROUPS[0], pytest.param(*GROUPS[1], marks=SOAK)])
def test_ranks_that_stand_still_or_are_terminated_inside_a_collective(group_model, expected, ranks, backend):
    with group_server(group_model, ranks, backend, inject="wedge:rank=1,step=30", wedge_seconds=8.0) as running:
        named(through_a_fault(running, expected), "rank 1", "step 29")
        named(through_a_fault(running, expected, signal_to(running, 1, signal.SIGTERM)), "rank 1", "SIGTERM")


@pytest.mark.parametrize(("ranks", "backend"), [GROUPS[0], pytest.param(*GROUPS[1], marks=SOAK)])
def test_a_rank_that_disagrees_about_its_rows(group_model, expected, ranks, backend):
    with group_server(group_model, ranks, backend, inject="tamper:rank=1,step=30") as running:
        named(through_a_fault(running, expected), "rank 1", "Desync", "row digest")


@pytest.mark.parametrize(
    ("ranks", "backend", "rank"), [(2, "ring", 0), (2, "ring", 1), (4, "mpi", 1), pytest.param(4, "mpi", 0, marks=SOAK)]
)
def test_a_rank_that_crashes_by_an_unexpected_error(group_model, expected, ranks, backend, rank):
    """The rank's own words count, not that it is gone, nor the words of the launcher that started it."""
    with group_server(group_model, ranks, backend, inject=f"crash:rank={rank},step=30") as running:
        named(through_a_fault(running, expected), f"rank {rank} ", "crashed: IndexError: injected at step 30")


@pytest.mark.parametrize(
    ("ranks", "backend", "kind"),
    [
        (*GROUPS[0], "stale"),
        (*GROUPS[1], "garbage"),
        pytest.param(*GROUPS[0], "garbage", marks=SOAK),
        pytest.param(2, "mpi", "zero", marks=SOAK),
        pytest.param(2, "mpi", "permute", marks=SOAK),
    ],
)
def test_the_fabric_delivers_something_else(group_model, expected, ranks, backend, kind):
    """That every kind of wrong sum is noticed is the matter of `test_checked_sums.py`; here, what follows from it."""
    with group_server(group_model, ranks, backend, inject=f"{kind}:rank=1,step=30,layer=1") as running:
        causes = "CollectiveFault", "the sum over ranks is wrong at", "on rank 1 on ", "step 3"
        named(through_a_fault(running, expected), *causes)


LATE, OTHER = ("late", ("rank 1", "did not come")), ("version", ("rank 1", "-other", "version"))


@pytest.mark.parametrize(
    ("ranks", "backend", "fault", "said"),
    [(*GROUPS[0], *LATE), (*GROUPS[1], *LATE), (*GROUPS[0], *OTHER), pytest.param(*GROUPS[1], *OTHER, marks=SOAK)],
)
def test_a_rank_that_cannot_be_in_the_group(group_model, ranks, backend, fault, said, caplog):
    """Start-up ends by its deadline with the rank's name; the next one, without the fault, serves."""
    caplog.set_level(logging.WARNING, "phalanx.engine")

    async def main(join_seconds: float) -> list[str]:
        config = EngineConfig(
            model=str(group_model), kv_cache_gb=0.1, prefix_cache_gb=0.0, tensor_parallel_size=ranks, backend=backend,
            inject=f"{fault}:rank=1", **{**PATIENT, "join_seconds": join_seconds},
        )  # fmt: skip
        engine = EngineProcess(config)
        driver = Driver(engine)
        await engine.start()
        try:
            await driver.until(lambda: driver.ready.is_set() or (driver.downs and not driver.downs[-1][1]))
            return [reason for reason, _ in driver.downs]
        finally:
            await engine.close()

    downs = asyncio.run(main(8.0))
    if downs and fault == "late":  # the start without the fault missed the limit as well
        downs = asyncio.run(main(60.0))
    named([*downs, *(record.getMessage() for record in caplog.records)], *said)
