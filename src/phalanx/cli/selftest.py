"""`phalanx selftest`: start a group of ranks, let it test itself, print the figures, end it (F4).

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

from phalanx.cli.flags import Flags, flag, with_settings
from phalanx.cli.terminal import LoadingView, report, set_up_logging
from phalanx.config import DEFAULT_MODEL, GIB, ClusterConfig, EngineConfig, LogLevel, ServerConfig
from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.offline.settings import check_engine
from phalanx.supervision.hosts import load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.types import Batch, EngineStats, ModelInfo

SETTINGS = Flags(
    "model", "tensor_parallel_size", "backend", "collective", "join_seconds", "dtype", "revision", "trust_remote_code",
    "memory_guard_gb", model=DEFAULT_MODEL, tensor_parallel_size=2,
)  # fmt: skip


@with_settings
def command(
    config: Annotated[EngineConfig, SETTINGS],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cluster: Annotated[Path | None, typer.Option(hidden=True, help="Hosts of the ranks.")] = None,
    log_level: Annotated[LogLevel, flag(ServerConfig, "log_level")] = "warning",
) -> int:
    """Test a group of ranks: sums of known values, speed, equal tokens, the control connection, memory."""
    set_up_logging(log_level)
    return asyncio.run(run(check_engine(config), json, load_cluster(cluster, config.tensor_parallel_size)))


async def run(config: EngineConfig, as_json: bool, cluster: tuple[ClusterConfig, str] | None = None) -> int:
    """Start an engine, wait for its verdict, print it, end the engine; the exit code."""
    engine = EngineProcess(config, cluster=cluster)
    verdict = Verdict(engine)
    try:
        with LoadingView(engine):
            await engine.start()
            info = await verdict.info
        if info is None:
            reason = (engine.state.reason or verdict.reason).rstrip(".")
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
    """Print the figures as tables."""
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


class Verdict:
    """Whether the engine passed its self-test. An `EngineListener`."""

    def __init__(self, engine: EngineProcess) -> None:
        self.info: asyncio.Future[ModelInfo | None] = asyncio.get_running_loop().create_future()
        """The engine's facts, with the test's figures; None when it failed."""
        self.reason = ""
        """Why it failed first."""
        engine.subscribe(self)

    def on_ready(self, info: ModelInfo) -> None:
        """The test passed."""
        if not self.info.done():
            self.info.set_result(info)

    def on_down(self, reason: str, will_restart: bool) -> None:
        """The test failed. It is not tried again, even where the engine is."""
        self.reason = self.reason or reason
        if not self.info.done():
            self.info.set_result(None)

    def on_batch(self, batch: Batch) -> None:
        """No sequence runs."""
