"""Every way in which a rank or the fabric can fail, under streaming load, with real processes (A1, A6, A9).

In each: the cause is named in /health, no process is left, and the streams go on with the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from driver import Driver
from groups import group_server, through_a_fault
from serving import Running

from phalanx.config import EngineConfig
from phalanx.engine.process import EngineProcess

GROUPS = [(2, "ring"), (4, "mpi")]


def signal_to(running: Running, rank: int, number: signal.Signals) -> Callable[[], Awaitable[None]]:
    """A strike: send a signal to a rank."""

    async def strike() -> None:
        os.kill(running.engine.rank_pids[rank], number)

    return strike


def named(reasons: list[str], *parts: str) -> None:
    """Some reason that /health gave contains all parts."""
    assert any(all(part.lower() in reason.lower() for part in parts) for reason in reasons), reasons


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_worker_is_killed(group_model, ranks, backend):
    with group_server(group_model, ranks, backend) as running:
        load, restarts = through_a_fault(running, signal_to(running, 1, signal.SIGKILL))
    assert restarts == 1
    named(load.reasons, "rank 1")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_the_leader_is_killed(group_model, ranks, backend):
    with group_server(group_model, ranks, backend) as running:
        load, restarts = through_a_fault(running, signal_to(running, 0, signal.SIGKILL))
    assert restarts == 1
    named(load.reasons, "rank 0")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_worker_is_suspended(group_model, ranks, backend):
    with group_server(group_model, ranks, backend) as running:
        load, restarts = through_a_fault(running, signal_to(running, ranks - 1, signal.SIGSTOP))
    assert restarts == 1
    named(load.reasons, f"rank {ranks - 1}", "no sign of life")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_worker_is_terminated_inside_a_collective(group_model, ranks, backend):
    with group_server(group_model, ranks, backend) as running:
        load, restarts = through_a_fault(running, signal_to(running, 1, signal.SIGTERM))
    assert restarts == 1
    named(load.reasons, "rank 1")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_worker_stands_still(group_model, ranks, backend):
    with group_server(group_model, ranks, backend, inject="wedge:rank=1,step=30", wedge_s=2.0) as running:
        load, restarts = through_a_fault(running)
    assert restarts == 1
    named(load.reasons, "rank 1", "step 29")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_a_rank_disagrees_about_its_rows(group_model, ranks, backend):
    with group_server(group_model, ranks, backend, inject="tamper:rank=1,step=30") as running:
        load, restarts = through_a_fault(running)
    assert restarts == 1
    named(load.reasons, "rank 1", "Desync", "row digest")


@pytest.mark.parametrize("kind", ["garbage", "stale", "zero", "permute"])
@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
def test_the_fabric_delivers_something_else(group_model, ranks, backend, kind):
    if (ranks, backend) != GROUPS[0] and kind != "garbage":
        pytest.skip("one group for all kinds, one kind for all groups")
    with group_server(group_model, ranks, backend, inject=f"{kind}:rank=1,step=30,layer=1") as running:
        load, restarts = through_a_fault(running)
    assert restarts == 1
    named(load.reasons, "CollectiveFault", "the sum over ranks is wrong at", "step 3")


@pytest.mark.parametrize(("ranks", "backend"), GROUPS)
@pytest.mark.parametrize(
    ("fault", "said"), [("late", ("rank 1", "did not come")), ("version", ("rank 1", "-other", "version"))]
)
def test_a_rank_that_cannot_be_in_the_group(group_model, ranks, backend, fault, said):
    """Start-up ends by its deadline with the rank's name; the next one, without the fault, serves."""
    config = EngineConfig(
        model=str(group_model), kv_cache_gb=0.1, prefix_cache_gb=0.0, tensor_parallel_size=ranks, backend=backend,
        inject=f"{fault}:rank=1", join_s=8.0,
    )  # fmt: skip

    async def main() -> list[str]:
        engine = EngineProcess(config)
        driver = Driver(engine)
        await engine.start()
        try:
            await driver.until(lambda: driver.downs)
            await driver.until(lambda: driver.ready.is_set() or not driver.downs[-1][1])
            return [reason for reason, _ in driver.downs]
        finally:
            await engine.close()

    named(asyncio.run(main()), *said)
