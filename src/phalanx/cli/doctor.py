"""`phalanx doctor`: runs every check on every host and prints remedies."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import typer

from phalanx.cli.clusters import (
    HostfileArgument,
    HostfileOption,
    Hosts,
    NumRanks,
    Pp,
    PpSplit,
    Python,
    Tp,
    check_results_table,
    chosen,
    shape_words,
)
from phalanx.cli.fitting_table import print_table
from phalanx.cli.setting_flags import flag, whole
from phalanx.cli.terminal import show_json
from phalanx.cluster.diagnosis import examine, wanted, worst
from phalanx.cluster.network_setup import addressed
from phalanx.cluster.plans import Plan, backend_of
from phalanx.cluster.shape import shape_of
from phalanx.cluster.ssh import Remote
from phalanx.config import AGENT_PORT, DEFAULT_PORT, BackendChoice, ClusterConfig, EngineConfig
from phalanx.errors import ClusterError

EXIT = {"ok": 0, "warning": 10, "bad": 20}
"""Exit codes, apart from those of other errors, so that scripts may take warnings for success."""


def command(
    hostfile: HostfileArgument = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    num_ranks: NumRanks = None,
    backend: Annotated[
        BackendChoice, flag(EngineConfig, "backend", help="Collective backend to check.", rich_help_panel=None)
    ] = "auto",
    pp: Pp = None,
    tp: Tp = None,
    pp_split: PpSplit = None,
    model: Annotated[str | None, typer.Option(help="A model that every host shall have and hold.")] = None,
    host: Annotated[str, typer.Option(help="Address that the server will bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(**whole(1, 65535), help="Port of the server.")] = DEFAULT_PORT,
    agent_port: Annotated[int, flag(ClusterConfig, "agent_port")] = AGENT_PORT,
    memory_guard_gb: Annotated[float | None, flag(EngineConfig, "memory_guard_gb", rich_help_panel=None)] = None,
    all_checks: Annotated[bool, typer.Option("--all", help="Also show what is in order.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: everything.")] = False,
    python: Python = "",
) -> int:
    """Examine all hosts and the links between them. Exit code: 0 all is well, 10 warnings, 20 something is wrong."""
    file = chosen(hostfile, hostfile_option, hosts, num_ranks)
    words = shape_words(pp, tp, pp_split)
    shape = shape_of(words)
    shape.widths_of(len(file.hosts))  # refuses shapes that these hosts cannot form, before asking them
    remotes = [Remote(one.ssh, python=python) for one in file.hosts]
    with contextlib.suppress(ClusterError):  # the checks below report a host that does not answer
        file = asyncio.run(addressed(file, remotes))
    asked = wanted(
        file, backend=backend_of(Plan(hostfile=file, backend=backend, serve=words)), running=True, model=model,
        staged=shape.stages > 1,
        api_host=host, api_port=port, agent_port=agent_port, guard_gb=memory_guard_gb,
    )  # fmt: skip
    results = asyncio.run(examine([file], remotes, asked, shape))
    level = worst(result for found in results.values() for result in found)
    if as_json:
        body = {"level": level, "results": results}
        show_json(body)
    elif level == "ok" and not all_checks:
        checks = sum(len(found) for found in results.values())
        hosts_asked = "1 host" if len(file.hosts) == 1 else f"{len(file.hosts)} hosts"
        print(f"{hosts_asked}, {checks} checks: all is well.")
    else:
        print_table(check_results_table(results, all_levels=all_checks))
    return EXIT[level]
