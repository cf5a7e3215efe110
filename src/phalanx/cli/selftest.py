"""`phalanx selftest`: start a group, let it prove itself, print what it found, end it (F4).

Does not know how the tests are done (`engine/selftest.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from phalanx.cli.options import (
    DEFAULTS,
    BackendOption,
    CollectiveOption,
    DtypeOption,
    JoinSeconds,
    LogLevelOption,
    MemoryGuardGb,
    Model,
    Revision,
    TensorParallelSize,
    TrustRemoteCode,
    check_engine,
)
from phalanx.cli.terminal import LoadingView, report, set_up_logging
from phalanx.config import GIB, ClusterConfig, EngineConfig
from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.supervision.hosts import load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.types import Batch, EngineStats, ModelInfo


def command(
    model: Model = "demo",
    tensor_parallel_size: TensorParallelSize = 2,
    backend: BackendOption = DEFAULTS.backend,
    collective: CollectiveOption = DEFAULTS.collective,
    join_seconds: JoinSeconds = DEFAULTS.join_seconds,
    dtype: DtypeOption = DEFAULTS.dtype,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    memory_guard_gb: MemoryGuardGb = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cluster: Annotated[Path | None, typer.Option(hidden=True, help="Hosts of the ranks.")] = None,
    log_level: LogLevelOption = "warning",
) -> int:
    """Test a group of ranks: sums of known values, speed, equal tokens, the control connection, memory."""
    config = EngineConfig(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        backend=backend,
        collective=collective,
        join_seconds=join_seconds,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        memory_guard_gb=memory_guard_gb,
    )
    set_up_logging(log_level)
    return asyncio.run(run(check_engine(config), json, load_cluster(cluster, tensor_parallel_size)))


async def run(config: EngineConfig, as_json: bool, cluster: tuple[ClusterConfig, str] | None = None) -> int:
    """Start, wait, print, end."""
    engine = EngineProcess(config, cluster=cluster)
    outcome = Outcome(engine)
    try:
        with LoadingView(engine):
            await engine.start()
            info = await outcome.first
        if info is None:
            reason = (engine.state.reason or outcome.reason).rstrip(".")
            report(EngineUnavailable(f"The self-test failed: {reason}."))
            return engine.state.exit_code or ExitCode.CRASH
        stats = await engine.ping()
    finally:
        await engine.close()
    if as_json:
        print(msgspec.json.encode({"info": info, "ranks": stats.ranks}).decode())
    else:
        show(info, stats)
    return ExitCode.OK


def show(info: ModelInfo, stats: EngineStats) -> None:
    """Tables for a person."""
    console = Console(highlight=False)
    test = info.self_test
    console.print(f"{info.ranks} ranks over {info.backend}, {info.model_type}, {info.dtype}")
    if test is not None:
        console.print(f"all_sum of 1 ... {info.ranks}: {test.total:g}, expected {test.expected:g}")
        speeds = Table("bytes", "median us", "GB/s", box=None)
        for figure in test.fabric:
            speeds.add_row(f"{figure.bytes:,}", f"{figure.median_us:.0f}", f"{figure.gb_per_s:.3f}")
        console.print(speeds)
        unchecked = f", {test.unchecked} unchecked" if test.unchecked else ""
        console.print(f"control connection: {test.control_ms:.2f} ms round trip, the slowest of some")
        console.print(f"sums per forward: {test.reductions} checked{unchecked}")
        console.print(f"tokens: {test.tokens} of {test.tokens} equal on all ranks")
    ranks = Table("rank", "host", "pid", "active GB", "peak GB", "resident GB", box=None)
    for rank in stats.ranks:
        sizes = (rank.active_bytes, rank.peak_bytes, rank.rss_bytes)
        ranks.add_row(str(rank.rank), rank.host, str(rank.pid), *(f"{size / GIB:.2f}" for size in sizes))
    console.print(ranks)


class Outcome:
    """The first thing that becomes of an engine: its facts, or None when it failed. An `EngineListener`."""

    def __init__(self, engine: EngineProcess) -> None:
        self.first: asyncio.Future[ModelInfo | None] = asyncio.get_running_loop().create_future()
        self.reason = ""
        engine.subscribe(self)

    def on_ready(self, info: ModelInfo) -> None:
        """It passed."""
        if not self.first.done():
            self.first.set_result(info)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """It did not: a self-test is not tried again."""
        self.reason = self.reason or reason
        if not self.first.done():
            self.first.set_result(None)

    def on_batch(self, batch: Batch) -> None:
        """Nothing was asked."""
