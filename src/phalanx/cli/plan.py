"""`phalanx plan`: what fits on which hosts, how fast it will be, and which plan to take, before anything is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from phalanx.cli.auto_plan import unfitting
from phalanx.cli.clusters import HostfileOption, Hosts, Python, chosen
from phalanx.cli.engine_extra import missing_module
from phalanx.cli.fitting_table import FittingTable, print_table
from phalanx.cli.setting_flags import flag as setting
from phalanx.cli.setting_flags import whole
from phalanx.cli.terminal import note, show_json
from phalanx.cluster.planner import Planned, PlanRequest, make_plans
from phalanx.config import EngineConfig
from phalanx.errors import ConfigError, ExitCode
from phalanx.memory import GB
from phalanx.planning.predictor import PROMPTS, STREAMS, Speed
from phalanx.planning.recommendation import GroupPlan, Recommendation, Wish, recommend


def command(
    model: Annotated[str, typer.Argument(help="A name of `phalanx list`, or a directory.")],
    hostfile: Annotated[
        Path | None, typer.Argument(metavar="[HOSTFILE]", help="As mlx.launch reads it.", show_default="this machine")
    ] = None,
    hostfile_option: HostfileOption = None,
    hosts: Hosts = None,
    wish: Annotated[Wish, typer.Option("--for", help="What the recommended plan is the best for.")] = "latency",
    ranks: Annotated[int, typer.Option(**whole(1), help="Ranks on this machine, where it is alone, at most.")] = 2,
    memory_only: Annotated[bool, typer.Option("--memory-only", help="Measure nothing: only what fits.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure even what is known from before.")] = False,
    max_model_len: Annotated[int | None, setting(EngineConfig, "max_model_len", rich_help_panel=None)] = None,
    kv_cache_gb: Annotated[float | None, setting(EngineConfig, "kv_cache_gb", rich_help_panel=None)] = None,
    memory_guard_gb: Annotated[float | None, setting(EngineConfig, "memory_guard_gb", rich_help_panel=None)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    python: Python = "",
) -> int:
    """Show the plans for a model on some hosts: memory, context, predicted speed; and recommend one."""
    alone = hostfile is None and hostfile_option is None and hosts is None
    if alone and (missing := missing_module()):
        raise ConfigError(
            f"This machine cannot say how fast it is: this installation of phalanx has no {missing}.",
            remedy="Name hosts that have the engine: `phalanx plan MODEL HOSTFILE`, or --hosts A,B.",
        )
    request = PlanRequest(
        model=model,
        hostfile=None if alone else chosen(hostfile, hostfile_option, hosts),
        ranks_here=ranks,
        max_len=max_model_len,
        kv_gb=kv_cache_gb,
        guard_gb=memory_guard_gb,
        measure=not memory_only,
        again=again,
        python=python,
    )
    if request.measure and not as_json:
        note(f"measuring {'this machine' if alone else 'the hosts, and the links between them'} ...")
    planned = asyncio.run(make_plans(request))
    best = recommend(planned.plans, wish)
    if as_json:
        found = {"plans": planned.plans, "nearest": planned.nearest, "hosts": planned.hosts}
        show_json({**found, "for": wish, "recommended": best})
    else:
        _show(planned, best, wish)
    return ExitCode.OK if best is not None else ExitCode.MEMORY


def _show(planned: Planned, best: Recommendation | None, wish: Wish) -> None:
    speed_columns = (
        *(f"first of {tokens:,} s" for tokens in PROMPTS), *(f"tok/s x{n}" for n in STREAMS), "+-", "limit",
    )  # fmt: skip
    shown = speed_columns if any(plan.speed is not None for plan in planned.plans) else ()
    columns = ("plan", "hosts", "GiB a rank", "KV", "context", "rows", *shown, "")
    table = FittingTable(*columns, keys=("plan", "hosts"), texts=("",))
    for plan in planned.plans:
        name = escape(plan.candidate.name)
        mark = f"[green]{name}[/]" if best is not None and plan is best.plan else name
        table.add_row(mark, str(len(set(plan.candidate.hosts))), *_cells(plan, len(shown)))
    print_table(table)
    if best is None:
        raise unfitting(planned)
    print(f"for {wish}: {best.plan.candidate.name} ({best.plan.candidate.flags}). {best.why}")


def _cells(plan: GroupPlan, speed_columns: int) -> list[str]:
    fit = plan.fit
    if fit.problem:
        return [""] * (4 + speed_columns) + [escape(fit.problem)]
    cells = [
        f"{max(rank.process + rank.weights for rank in fit.ranks) / GB:.2f}",
        f"{min(rank.kv for rank in fit.ranks) / GB:.2f}",
        f"{fit.context:,}",
        f"{fit.rows:,}",
    ]
    return [*cells, *_speed_cells(plan.speed)]


def _speed_cells(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    first = [f"{speed.ttft_s[tokens]:.2f}" if tokens in speed.ttft_s else "-" for tokens in PROMPTS]
    rates = [f"{speed.tokens_per_s[streams]:.1f}" for streams in STREAMS]
    return [*first, *rates, f"{speed.error:.0%}", speed.limit]
