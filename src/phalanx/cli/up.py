"""`phalanx up`: checks the hosts, starts a cluster and shows its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live

from phalanx.cli.auto_plan import (
    chooses_shape,
    plan_request,
    predicted_words,
    recommended,
    without_auto,
)
from phalanx.cli.clusters import (
    HostfileArgument,
    HostfileOption,
    Hosts,
    NumRanks,
    Python,
    check_results_table,
    chosen,
    status_table,
)
from phalanx.cli.command_line import check_serve_words
from phalanx.cli.setting_flags import flag as setting
from phalanx.cli.setting_flags import number, whole
from phalanx.cli.terminal import note
from phalanx.cluster.argument_flags import flag_value, split_flag
from phalanx.cluster.check_results import RUNNING
from phalanx.cluster.deployment import (
    Deployment,
    certificate_for_clients,
    deploy,
    split_flags,
    url_of,
    with_https_everywhere,
)
from phalanx.cluster.diagnosis import examine, wanted_of, worst
from phalanx.cluster.host_status import HostReport
from phalanx.cluster.hostfile_parser import Hostfile
from phalanx.cluster.lifecycle import Cluster, goal_of, start_all, statuses, stop_all, wait_healthy
from phalanx.cluster.network_setup import addressed
from phalanx.cluster.plans import LOGS, Plan, check, split_keys
from phalanx.cluster.shape import shape_of
from phalanx.cluster.ssh import Remote
from phalanx.config import AGENT_PORT, BackendChoice, ClusterConfig, EngineConfig, check_disk_flags
from phalanx.environment import (
    ADMIN_KEY_VARIABLE,
    GATEWAY_ADMIN_KEY_VARIABLE,
    api_keys_from_environment,
    key_from_environment,
)
from phalanx.errors import ClusterError, ConfigError, ExitCode, MemoryShortage, PhalanxError, StartFailed

DOWN_S = 15.0  # between SIGTERM and SIGKILL, as `phalanx down`


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
            help="Collective backend of the all-reduces.",
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
    ssl: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve HTTPS with a new certificate, and write it to FILE for clients."),
    ] = None,
    agent_port: Annotated[int, setting(ClusterConfig, "agent_port")] = AGENT_PORT,
    replicas: Annotated[
        int, typer.Option(**whole(1), help="Groups of --tp hosts, each with a server, behind a gateway.")
    ] = 1,
    gateway_host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Where the gateway runs.", show_default="the first host")
    ] = None,
    python: Python = "",
    *,
    context: typer.Context,
) -> int:
    """Start a cluster: rank i on host i, the server on the first. Everything after `--` goes to `phalanx serve`.

    With --replicas: everything after a second `--` goes to `phalanx gateway`.
    """
    if replicas == 1 and gateway_host is not None:
        raise ConfigError("--gateway-host: one group has no gateway.", remedy="Use it with --replicas 2 or more.")
    after: tuple[str, ...] = context.obj or ("demo",)
    words, of_gateway = split_flags(after) if replicas > 1 else (after, ())
    words, is_auto = without_auto(words)
    check_serve_words(words)
    check_disk_flags({word.partition("=")[0] for word in words})
    serve, keys = split_keys(words or ("demo",))
    serve, admin_keys = split_flag(serve, "--admin-key")
    flags, clients_keys = split_keys(of_gateway)
    flags, gateway_keys = split_flag(flags, "--admin-key")
    if replicas > 1:
        if flag_value(flags, "--api-key-file") is None:
            clients_keys = clients_keys or api_keys_from_environment()
    elif not keys and flag_value(serve, "--api-key-file") is None:
        keys = api_keys_from_environment()
    try:
        file = chosen(hostfile, hostfile_option, hosts, num_ranks)
    except ConfigError as error:
        named = None if hostfile is None or hostfile.exists() else hostfile
        if named is not None and not context.obj and named.suffix != ".json":
            error.remedy += f" A model stands after `--`: `phalanx up HOSTFILE -- {hostfile}`."
        raise
    if is_auto:
        if replicas > 1:
            raise ConfigError("--replicas and --tp auto exclude each other.", remedy="Give one of them.")
        file, serve = asyncio.run(_planned(file, serve, python))
    plan = Plan(
        hostfile=file,
        serve=serve,
        api_keys=keys,
        admin_key=_admin_key(admin_keys, serve, ADMIN_KEY_VARIABLE),
        backend=backend,
        envs=tuple(env or ()),
        timeout_s=timeout,
        log_dir=log_dir,
        agent_port=agent_port,
        python=python,
    )

    def divided(plan: Plan) -> Deployment:
        if replicas == 1:
            return Deployment(groups=(check(plan),))
        admin_key = _admin_key(gateway_keys, flags, GATEWAY_ADMIN_KEY_VARIABLE)
        return deploy(
            plan, replicas=replicas, gateway_host=gateway_host, flags=flags, keys=clients_keys, admin_key=admin_key
        )

    divided(plan)  # raises before hosts are asked for addresses
    chooses = not (is_auto or skip_checks or replicas > 1 or backend != "auto" or chooses_shape(serve))
    return asyncio.run(_up(plan, divided, ssl, skip_checks=skip_checks, foreground=foreground, chooses=chooses))


async def _planned(file: Hostfile, serve: tuple[str, ...], python: str) -> tuple[Hostfile, tuple[str, ...]]:
    """The hosts and the arguments of `serve` as `phalanx plan` recommends them; says which, and why.

    Replicas are recommended by `phalanx plan` only: a gateway has flags and an address of its own.
    """
    named = await addressed(file, [Remote(host.ssh, python=python) for host in file.hosts])
    request = replace(plan_request(serve), hostfile=named, ranks_here=1, python=python, replicas=False)
    plan, model, line = await recommended(request)
    candidate = plan.candidate
    size = len(candidate.hosts)
    further = len(file.hosts) - size
    note(line + (f" `-- MODEL --tp {len(file.hosts)}` starts all {len(file.hosts)} hosts." if further else ""))
    if candidate.hosts == tuple(host.ssh for host in named.hosts[:size]):
        file = named.first(size)
    else:  # one host, and not the first
        file = replace(
            named, hosts=tuple(replace(host, rdma=()) for host in named.hosts if host.ssh in candidate.hosts)
        )
    shape = () if candidate.stages == 1 else ("--tp", str(candidate.width), "--pp", str(candidate.stages))
    return file, (*serve, *shape, *predicted_words(plan, model))


async def _planned_or_all(plan: Plan, console: Console) -> Plan:
    """What `_planned` chooses; all hosts as one group where the hosts cannot say how fast they are, and why.

    Raises:
        MemoryShortage: the model fits in no way.
    """
    file, remotes = plan.hostfile, plan.remotes()
    reason = ""
    if any(host.rdma for host in file.hosts):
        reason = "the speed of all-reduces over RDMA is not predicted"
    else:
        with console.status("measuring the hosts, and the links between them ..."):
            try:
                busy = [name for name, one in (await statuses(remotes)).items() if _runs(one)]
                if not busy:
                    file, serve = await _planned(file, plan.serve, plan.python)
                    return replace(plan, hostfile=file, serve=serve)
                reason = f"{busy[0]} runs a cluster already, which would be measured too"
            except MemoryShortage:
                raise
            except PhalanxError as error:
                reason = error.message.partition("\n")[0].rstrip(".")
    note(f"plan: tp {len(file.hosts)} (--tp {len(file.hosts)}), all hosts as one group, unmeasured: {reason}.")
    return plan


def _runs(found: HostReport | ClusterError) -> bool:
    return isinstance(found, HostReport) and bool(found.status.role) and found.status.ended is None


def _admin_key(given: Sequence[str], words: Sequence[str], variable: str) -> str | None:
    """The --admin-key of a server or a gateway; the variable counts where neither the flag nor its file is given."""
    if given or flag_value(words, "--admin-key-file") is not None:
        return given[-1] if given else None
    return key_from_environment(variable)


async def _up(
    plan: Plan,
    divided: Callable[[Plan], Deployment],
    ssl: Path | None,
    *,
    skip_checks: bool,
    foreground: bool,
    chooses: bool = False,
) -> int:
    """Start what is planned, and wait for it.

    Args:
        chooses: hosts and shape are chosen by measurements first.
    """
    console = Console(stderr=True)
    if chooses and len(plan.hostfile.hosts) > 1:
        plan = await _planned_or_all(plan, console)
    deployment = divided(replace(plan, hostfile=await addressed(plan.hostfile, plan.remotes())))
    if ssl is not None:
        deployment = _secured(deployment, ssl)
    if not skip_checks:
        await _look_first(deployment, console)
    if not foreground:
        try:
            await bring_up(deployment, console)
        except asyncio.CancelledError:
            note("the cluster goes on starting; `phalanx status` shows how far it is, `phalanx down` ends it")
            raise
        return ExitCode.OK
    try:
        await bring_up(deployment, console)
        return await _stay(deployment)
    finally:
        note("stopping the cluster ...")
        await asyncio.shield(stop_all(deployment.remotes(), timeout_s=DOWN_S))


def _secured(deployment: Deployment, file: Path) -> Deployment:
    """The deployment with new certificates for HTTPS; what clients are to trust is written to a file."""
    secured = with_https_everywhere(deployment)
    try:
        file.write_text(certificate_for_clients(secured))
    except OSError as error:
        raise ConfigError(f"--ssl {file}: {error.strerror}.", remedy="Name a file that can be written.") from error
    return secured


async def _look_first(deployment: Deployment, console: Console) -> None:
    """Check the hosts before anything starts.

    Raises:
        ClusterError: a check failed that would keep the cluster from running; names host and remedy.
    """
    groups = [plan.hostfile for plan in deployment.groups]
    shape = shape_of(deployment.groups[0].serve)
    results = await examine(groups, deployment.remotes(), wanted_of(deployment), shape)
    running = {host: result.seen for host, found in results.items() for result in found if result.check == RUNNING}
    if running:  # its ports are taken and its memory is in use: nothing else is worth a line
        raise ClusterError(
            f"A cluster is running already: {'; '.join(f'{host}: {process}' for host, process in running.items())}.",
            remedy="`phalanx status` shows it, `phalanx down` ends it, `phalanx restart` does both.",
        )
    if worst(result for found in results.values() for result in found) != "ok":
        console.print(check_results_table(results, all_levels=False), soft_wrap=True)
    bad = [(host, result) for host, found in results.items() for result in found if result.level == "bad"]
    if bad:
        host, first = bad[0]
        raise ClusterError(
            f"{host}: {first.check}: {first.seen.rstrip('.')}."
            + (f" ({len(bad) - 1} more above.)" if len(bad) > 1 else ""),
            remedy=first.remedy + " (--skip-checks starts all the same.)",
        )


async def bring_up(deployment: Deployment, console: Console) -> None:
    """Start the cluster and wait until it is healthy; a table shows every host meanwhile.

    Raises:
        ClusterError: the cluster does not become healthy. It has been stopped, unless it is only late.
    """
    await start_all(deployment)
    async with Cluster(deployment.remotes()).watched() as cluster:
        with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:

            def show(now: Cluster) -> None:
                live.update(status_table({**now.statuses, **now.problems}, deployment.layout, now.gateway))

            try:
                await wait_healthy(goal_of(deployment), cluster, show, timeout_s=deployment.groups[0].timeout_s)
            except StartFailed:
                await stop_all(deployment.remotes(), timeout_s=DOWN_S)
                raise
    _say_where(deployment)


def _say_where(deployment: Deployment) -> None:
    """Print the address, and who reaches it."""
    plan, gateway = deployment.groups[0], deployment.gateway
    size = len(plan.hostfile.hosts)
    what = "1 host" if size == 1 else f"{size} hosts"
    if gateway is not None:
        what = f"{len(deployment.groups)} replicas of {what}"
    print(f"phalanx is up: {url_of(deployment)} ({what})", flush=True)
    host, words = (plan.hostfile.hosts[0], plan.serve) if gateway is None else (gateway.host, gateway.flags)
    if (flag_value(words, "--host") or "127.0.0.1").startswith("127."):
        opens = f"-- {plan.serve[0]} --host 0.0.0.0" if gateway is None else "-- MODEL -- --host 0.0.0.0"
        note(f"only {host.ssh} itself reaches this address; `{opens}` opens it to the others")
    elif not (plan.asks_for_keys if gateway is None else gateway.asks_for_keys):
        asks = f"-- {plan.serve[0]} --api-key KEY" if gateway is None else "-- MODEL -- --api-key KEY"
        note(f"warning: other machines reach this address, and no key is asked for; `{asks}` does")


async def _stay(deployment: Deployment) -> int:
    """Wait until the server, or the gateway, has ended for good; its exit code."""
    first = deployment.groups[0].hostfile.hosts[0].ssh
    async with Cluster(deployment.remotes()).watched() as cluster:
        while True:
            await asyncio.sleep(1.0)
            status = cluster.statuses[first]
            if deployment.gateway is not None:
                status = None if cluster.gateway is None else cluster.gateway.process
            if status is not None and (status.ended is not None or not status.role):
                return status.ended or ExitCode.OK
