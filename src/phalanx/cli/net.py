"""`phalanx net`: sets up, tests or undoes the network between hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from phalanx.cli.clusters import (
    HostfileArgument,
    HostfileOption,
    Hosts,
    Pp,
    Python,
    Tp,
    chosen,
    shape_words,
    stage_cell,
)
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.setting_flags import flag, whole
from phalanx.cluster.hostfile_parser import Hostfile
from phalanx.cluster.links import Done
from phalanx.cluster.network import Steps, cables, parse_node, steps
from phalanx.cluster.network_setup import facts_of, measure_pairs, order, set_up, slow_links, test_group, undo
from phalanx.cluster.plans import Plan, check
from phalanx.cluster.shape import shape_of
from phalanx.cluster.ssh import Remote
from phalanx.config import AGENT_PORT, BackendChoice, ClusterConfig
from phalanx.dist.topology import Topology
from phalanx.errors import ClusterError, ConfigError, ExitCode
from phalanx.memory import GB
from phalanx.types import SelfTest


def command(
    action: Annotated[Literal["setup", "test", "undo"], typer.Argument(help="What to do.")],
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="HOST:IFACE:IP", help="setup: one end of a cable; may be repeated.")
    ] = None,
    netmask: Annotated[int, typer.Option(**whole(8, 30), help="setup: bits of each cable's network.")] = 30,
    persist: Annotated[bool, typer.Option("--persist", help="setup: also after every reboot.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="setup: show the commands, run none.")] = False,
    backend: Annotated[BackendChoice, typer.Option(help="test: collective backend.")] = "auto",
    agent_port: Annotated[int, flag(ClusterConfig, "agent_port", help="test: port of the agents.")] = AGENT_PORT,
    pp: Pp = None,
    tp: Tp = None,
    links_only: Annotated[bool, typer.Option("--links-only", help="test: no ranks, only links.")] = False,
    python: Python = "",
) -> int:
    """Set up direct cables between hosts, test all links, or take a set-up back."""
    if action != "test" and (pp or tp):
        raise ConfigError(f"--pp and --tp belong to `net test`, not to `net {action}`.", remedy="Leave them out.")
    if action == "setup":
        given = hostfile or hostfile_option or hosts
        if given is not None or not node:
            raise ConfigError(
                "net setup takes its hosts from --node.", remedy="Give --node HOST:IFACE:IP for each end."
            )
        return asyncio.run(_setup(node, netmask, persist=persist, dry_run=dry_run, python=python))
    if node or persist or dry_run:
        raise ConfigError(f"--node, --persist and --dry-run belong to `net setup`, not to `net {action}`.")
    chosen_hosts = chosen(hostfile, hostfile_option, hosts)
    if action == "undo":
        return _report_undone(asyncio.run(undo([Remote(host.ssh, python=python) for host in chosen_hosts.hosts])))
    if len(chosen_hosts.hosts) < 2:
        raise ConfigError(
            "net test measures links between hosts, and here is one host only.",
            remedy="Ranks of one machine are tested by `phalanx selftest --tp 2`.",
        )
    serve = ("demo", *shape_words(pp, tp))
    plan = check(Plan(hostfile=chosen_hosts, serve=serve, backend=backend, agent_port=agent_port, python=python))
    return asyncio.run(_test(plan, links_only=links_only))


async def _setup(given: list[str], prefix: int, *, persist: bool, dry_run: bool, python: str) -> int:
    nodes = [parse_node(text) for text in given]
    joined = cables(nodes, prefix)
    remotes = {name: Remote(name, python=python) for name in order(nodes)}
    facts = await facts_of(list(remotes.values()))
    plans = steps(nodes, prefix, facts, persist=persist)
    for plan in plans:
        _show(plan)
    if dry_run:
        return ExitCode.OK
    rdma = all(fact.system == "macOS" for fact in facts.values())
    done = await set_up(remotes, plans, joined, rdma=rdma)
    for cable in joined:
        print(f"{cable.a.host} <-> {cable.b.host}: {cable.network}, both ways")
    if rdma:
        print(f"device matrix: {next(iter(done.values())).matrix} on every host")
    return ExitCode.OK


def _show(plan: Steps) -> None:
    for path in plan.files:
        print(f"{plan.host}$ write {path}")
    for command in (*plan.commands, *plan.after):
        print(f"{plan.host}$ {' '.join(command)}")


def _report_undone(found: Mapping[str, Done | ClusterError]) -> int:
    code = ExitCode.OK
    for host, done in found.items():
        if isinstance(done, Done):
            for line in done.ran:
                print(f"{host}$ {line}")
        else:
            print(f"{host}: {done}")
            code = ExitCode.CRASH
    return code


async def _test(plan: Plan, *, links_only: bool) -> int:
    """Test every link, then a group on all hosts; the exit code is 0 if all passed."""
    console = Console(highlight=False)
    hostfile: Hostfile = plan.hostfile
    shape = shape_of(plan.serve)
    topology = Topology(shape.widths_of(len(hostfile.hosts)))
    columns = ("from", "to", "address", "there and back us", "p99 us", "Gbit/s", "")
    table = FittingTable(*columns, keys=columns[:2], texts=columns[-1:])
    pairs = await measure_pairs(hostfile, plan.remotes(), topology)
    for pair in pairs:
        figures = ["", "", ""]
        if (m := pair.measured) is not None:
            figures = [f"{m.median_us:.0f}", f"{m.p99_us:.0f}", f"{m.gbit_per_s:.2f}"]
        carries = "" if pair.stage is None else f"stage {pair.stage} to {pair.stage + 1}"
        table.add_row(
            escape(pair.one), escape(pair.other), escape(pair.address), *figures, escape(pair.problem) or carries
        )
    print_table(table)
    for line in slow_links(pairs):
        console.print(line, style="yellow", soft_wrap=True)
    if any(pair.problem for pair in pairs):
        return ExitCode.CRASH
    if links_only:
        return ExitCode.OK
    found = await test_group(plan)
    test = found.info.self_test or SelfTest()
    if test.summed > 1:
        console.print(f"all_sum of 1 ... {test.summed}: {test.total:g}, expected {test.expected:g}")
    for figure in test.all_reduce:
        console.print(f"  {figure.bytes:>9,} bytes: {figure.median_us:.0f} us, {figure.gb_per_s:.3f} GB/s")
    console.print(f"a step of one token: {test.step_ms:.2f} ms")
    if found.fast_synch:
        console.print(f"MLX_METAL_FAST_SYNCH: {escape(found.fast_synch)}")
    for rank in found.ranks:
        part = f" (stage {stage_cell(rank.stage, rank.layers)})" if shape.stages > 1 else ""
        memory = f"active memory {rank.active_bytes / GB:.2f} GiB"
        console.print(f"rank {rank.rank} on {escape(rank.host)}{part}: {memory}")
    return ExitCode.OK if test.total == test.expected else ExitCode.CRASH
