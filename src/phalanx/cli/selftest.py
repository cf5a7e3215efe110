"""`phalanx selftest`: start a group of ranks, let it test itself, print the figures, end it.

`engine/group_selftest.py` has the tests.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.clusters import stage_cell
from phalanx.cli.engine_extra import require_engine
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.setting_flags import Flags, flag, with_settings
from phalanx.cli.terminal import LoadingView, PullView, report, set_up_logging
from phalanx.config import DEFAULT_MODEL, GIB, EngineConfig, LogLevel
from phalanx.errors import EngineUnavailable, ExitCode
from phalanx.model.loading.resolve import resolve_models
from phalanx.offline.engine_settings import check_engine, check_start
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision import fast_synch
from phalanx.supervision.fast_synch import FastSynch
from phalanx.supervision.host_ranks import KnownCluster, load_cluster
from phalanx.supervision.process import EngineProcess
from phalanx.types import Batch, EngineStats, ModelInfo

SETTINGS = Flags(
    "model", "tensor_parallel_size", "pipeline_parallel_size", "pp_split", "pp_activation_dtype", "backend",
    "collective", "join_seconds", "dtype", "revision", "trust_remote_code", "memory_guard_gb", "wired_limit",
    model=DEFAULT_MODEL, tensor_parallel_size=2,
)  # fmt: skip


@with_settings
def command(
    config: Annotated[EngineConfig, SETTINGS],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cluster: Annotated[Path | None, typer.Option(hidden=True, help="Hosts of the ranks.")] = None,
    log_level: Annotated[LogLevel, flag(ServerConfig, "log_level")] = "warning",
) -> int:
    """Test a group of ranks: all-reduces of known values, speed, equal tokens, the control connection, memory."""
    require_engine()
    set_up_logging(log_level)
    config = check_engine(config)
    with PullView() as view:
        path = resolve_models(config, view)
    check_start(config, path, is_here=cluster is None)
    return asyncio.run(run(config, json, load_cluster(cluster, config.n_ranks)))


class Outcome(NamedTuple):
    """Result of a group's self-test: the figures, or why it failed and the exit code."""

    info: ModelInfo | None
    stats: EngineStats | None = None
    reason: str = ""
    code: int = ExitCode.OK


async def run(config: EngineConfig, as_json: bool, cluster: KnownCluster | None = None) -> int:
    """Start an engine, wait for its verdict, print it, end the engine; the exit code. With JACCL, try both ways to
    synchronise Metal (`fast_synch.py`)."""
    found = await _test(config, cluster)
    if found.info is None or found.stats is None:
        report(EngineUnavailable(f"The self-test failed: {found.reason}."))
        return found.code
    compared = None
    if cluster is not None and fast_synch.concerns(found.info.backend):
        compared = await _other_way(config, cluster, found)
    if as_json:
        extra = {} if compared is None else {"fast_synch": fast_synch.advise(compared)}
        print(msgspec.json.encode({"info": found.info, "ranks": found.stats.ranks, **extra}).decode())
    else:
        show(found.info, found.stats)
        if compared is not None:
            print(f"{fast_synch.VARIABLE}: {fast_synch.advise(compared)}")
    return ExitCode.OK


async def _test(config: EngineConfig, cluster: KnownCluster | None) -> Outcome:
    """Run one engine as far as its verdict."""
    engine = EngineProcess(config, cluster=cluster)
    verdict = Verdict(engine)
    try:
        with LoadingView(engine):
            await engine.start()
            info = await verdict.info
        if info is None:
            reason = (engine.state.reason or verdict.reason).rstrip(".")
            return Outcome(None, None, reason, engine.state.exit_code or ExitCode.CRASH)
        return Outcome(info, await engine.ping())
    finally:
        await engine.close()


async def _other_way(config: EngineConfig, cluster: KnownCluster, first: Outcome) -> FastSynch:
    """The time of a step as the cluster is set up, which was measured, and with the other value of the variable."""
    on = fast_synch.is_on(cluster.config.envs)
    changed = replace(cluster.config, envs=fast_synch.with_value(cluster.config.envs, not on))
    second = await _test(config, cluster._replace(config=changed))
    mine, other = (
        None if one.info is None or one.info.self_test is None else one.info.self_test.step_ms
        for one in (first, second)
    )
    return FastSynch(off_ms=other if on else mine, on_ms=mine if on else other, problem=second.reason)


def show(info: ModelInfo, stats: EngineStats) -> None:
    """Print the figures as tables."""
    console = Console(highlight=False)
    test = info.self_test
    stages = f" in {info.stages} stages" if info.stages > 1 else ""
    console.print(f"{info.ranks} ranks{stages} over {info.backend}, {info.model_type}, {info.dtype}")
    if test is not None:
        where = f" in stage {info.stages - 1}" if info.stages > 1 else ""
        if test.summed > 1:
            console.print(f"all_sum of 1 ... {test.summed}{where}: {test.total:g}, expected {test.expected:g}")
            speeds = Table("bytes", "median us", "GB/s", box=None)
            for figure in test.all_reduce:
                speeds.add_row(f"{figure.bytes:,}", f"{figure.median_us:.0f}", f"{figure.gb_per_s:.3f}")
            console.print(speeds)
            unchecked = f", {test.unchecked} unchecked" if test.unchecked else ""
            console.print(f"sums per forward{where}: {test.reductions} checked{unchecked}")
        console.print(f"control connection: {test.control_ms:.2f} ms round trip, the slowest of some")
        equal = f"{test.tokens} of {test.tokens} equal on {test.summed} ranks" if test.summed > 1 else f"{test.tokens}"
        console.print(f"tokens{where}: {equal}, {test.step_ms:.2f} ms each")
    columns = ("rank", "stage", "host", "pid", "active GiB", "peak GiB", "resident GiB")
    ranks = FittingTable(*columns, keys=columns[:3])
    for rank in stats.ranks:
        sizes = (rank.active_bytes, rank.peak_bytes, rank.rss_bytes)
        ranks.add_row(
            str(rank.rank),
            stage_cell(rank.stage, rank.layers),
            escape(rank.host),
            str(rank.pid),
            *(f"{size / GIB:.2f}" for size in sizes),
        )
    print_table(ranks)


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
