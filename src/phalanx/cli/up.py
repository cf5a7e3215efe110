"""`phalanx up`: checks the hosts, starts a cluster and shows its progress. Does not know how hosts are reached."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live

from phalanx.cli.clusters import (
    PYTHON,
    HostfileArgument,
    HostfileOption,
    Hosts,
    NumRanks,
    Python,
    check_results_table,
    chosen,
    status_table,
)
from phalanx.cli.flags import flag as setting
from phalanx.cli.flags import number
from phalanx.cli.terminal import note
from phalanx.cluster.doctor import examine, wanted, worst
from phalanx.cluster.fabric import addressed
from phalanx.cluster.host import flag, serve_address
from phalanx.cluster.lifecycle import (
    LOGS,
    Cluster,
    Plan,
    backend_of,
    check,
    model_of,
    start_all,
    stop_all,
    wait_healthy,
)
from phalanx.config import AGENT_PORT, BackendChoice, ClusterConfig, EngineConfig
from phalanx.errors import ClusterError, ExitCode, StartFailed

DOWN_S = 15.0


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    num_ranks: NumRanks = None,
    backend: Annotated[
        BackendChoice,
        setting(
            EngineConfig,
            "backend",
            help="What carries the sums.",
            show_default="the hostfile's, or the best",
            rich_help_panel=None,
        ),
    ] = "auto",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="For every rank; may be repeated.")
    ] = None,
    timeout: Annotated[float, typer.Option(**number(1.0), help="Seconds to become healthy.")] = 600.0,
    skip_checks: Annotated[bool, typer.Option("--skip-checks", help="Start without looking first.")] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay; Ctrl-C ends the cluster.")] = False,
    log_dir: Annotated[str, typer.Option(help="On the hosts, below the home directory unless absolute.")] = LOGS,
    agent_port: Annotated[int, setting(ClusterConfig, "agent_port")] = AGENT_PORT,
    python: Python = PYTHON,
    word: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
) -> int:
    """Start a cluster: rank i on host i, the server on the first. Everything after `--` goes to `phalanx serve`."""
    plan = check(
        Plan(
            hostfile=chosen(hostfile, hostfile_option, hosts, num_ranks),
            serve=tuple(word or ("demo",)),
            backend=backend,
            envs=tuple(env or ()),
            timeout_s=timeout,
            log_dir=log_dir,
            agent_port=agent_port,
            python=python,
        )
    )
    return asyncio.run(_up(plan, skip_checks=skip_checks, foreground=foreground))


async def _up(plan: Plan, *, skip_checks: bool, foreground: bool) -> int:
    console = Console(stderr=True)
    plan = replace(plan, hostfile=await addressed(plan.hostfile, plan.remotes()))
    if not skip_checks:
        await _look_first(plan, console)
    if not foreground:
        try:
            await bring_up(plan, console)
        except asyncio.CancelledError:
            note("the cluster goes on starting; `phalanx status` shows how far it is, `phalanx down` ends it")
            raise
        return ExitCode.OK
    try:
        await bring_up(plan, console)
        return await _stay(plan)
    finally:
        note("stopping the cluster ...")
        await asyncio.shield(stop_all(plan.remotes(), timeout_s=DOWN_S, force=False))


async def _look_first(plan: Plan, console: Console) -> None:
    """Check the hosts before anything starts (L2).

    Raises:
        ClusterError: a check failed that would keep the cluster from running; names host and remedy.
    """
    host, port = serve_address(list(plan.serve))
    asked = wanted(
        plan.hostfile, backend=backend_of(plan), running=False, model=model_of(plan),
        api_host=flag(list(plan.serve), "--host") or host, api_port=port, agent_port=plan.agent_port,
    )  # fmt: skip
    results = await examine(plan.hostfile, plan.remotes(), asked)
    if worst(result for found in results.values() for result in found) != "ok":
        console.print(check_results_table(results, all_levels=False))
    bad = [(host, result) for host, found in results.items() for result in found if result.level == "bad"]
    if bad:
        host, first = bad[0]
        raise ClusterError(
            f"{host}: {first.check}: {first.seen}." + (f" ({len(bad) - 1} more above.)" if len(bad) > 1 else ""),
            remedy=first.remedy + " (--skip-checks starts all the same.)",
        )


async def bring_up(plan: Plan, console: Console) -> None:
    """Start the cluster and wait until it is healthy; a table shows every host meanwhile.

    Raises:
        ClusterError: the cluster does not become healthy. It has been stopped, unless it is only late.
    """
    first = plan.hostfile.hosts[0]
    await start_all(plan)
    async with Cluster(plan.remotes()).watched() as cluster:
        with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:

            def show(now: Cluster) -> None:
                live.update(status_table({**now.statuses, **now.problems}))

            try:
                await wait_healthy(plan, cluster, show)
            except StartFailed:
                await stop_all(plan.remotes(), timeout_s=DOWN_S, force=False)
                raise
    bound, port = flag(list(plan.serve), "--host") or "127.0.0.1", serve_address(list(plan.serve))[1]
    where = first.address if bound in ("0.0.0.0", "::") else bound
    print(f"phalanx is up: http://{where}:{port}/v1 ({len(plan.hostfile.hosts)} hosts)", flush=True)
    if bound.startswith("127."):
        note(
            f"only {first.ssh} itself reaches this address; `-- {plan.serve[0]} --host 0.0.0.0` opens it to the others"
        )


async def _stay(plan: Plan) -> int:
    """Wait until the server has ended for good; its exit code."""
    async with Cluster(plan.remotes()).watched() as cluster:
        while True:
            await asyncio.sleep(1.0)
            server = cluster.statuses[plan.hostfile.hosts[0].ssh]
            if server is not None and (server.ended is not None or not server.role):
                return server.ended or ExitCode.OK
