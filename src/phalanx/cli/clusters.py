"""Flags and tables that the cluster commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.markup import escape

from phalanx.cli.fitting_table import FittingTable
from phalanx.cli.setting_flags import whole
from phalanx.cluster.check_results import CheckResult
from phalanx.cluster.host_status import GatewayStatus, HostStatus, ServerHealth
from phalanx.cluster.hostfile_parser import Hostfile, from_names, parse
from phalanx.cluster.replica_layout import ReplicaLayout
from phalanx.cluster.shape import shape_of
from phalanx.errors import ClusterError, ConfigError
from phalanx.memory import GB

HostfileArgument = Annotated[
    Path | None, typer.Argument(metavar="[HOSTFILE]", help="As mlx.launch reads it.", show_default=False)
]
HostfileOption = Annotated[Path | None, typer.Option("--hostfile", metavar="FILE", help="The same as HOSTFILE.")]
Hosts = Annotated[str | None, typer.Option("--hosts", metavar="A,B,..", help="Names for ssh, instead of a hostfile.")]
NumRanks = Annotated[
    int | None, typer.Option("--num-ranks", "-n", **whole(1), help="Only the first N hosts.", show_default="all")
]
Python = Annotated[
    str,
    typer.Option(
        "--python",
        help="Python with phalanx on the hosts.",
        show_default="that of `phalanx install`, else the same as here, else `phalanx` on the PATH of a login shell",
    ),
]

Pp = Annotated[str | None, typer.Option("--pp", "-pp", metavar="N", help="Stages, as `serve` will have them.")]
Tp = Annotated[str | None, typer.Option("--tp", "-tp", metavar="N[,N...]", help="With --pp: hosts of each stage.")]
PpSplit = Annotated[str | None, typer.Option("--pp-split", metavar="N,N...", help="Layers of each stage.")]


def shape_words(pp: str | None, tp: str | None, split: str | None = None) -> tuple[str, ...]:
    """The arguments of `serve` that say how hosts form stages.

    Raises:
        ConfigError: there is one stage.
    """
    given = {"--pp": pp, "--tp": tp, "--pp-split": split}
    words = tuple(word for name, value in given.items() if value is not None for word in (name, value))
    if words and shape_of(words).stages == 1:
        raise ConfigError(f"{words[0]} is for stages here.", remedy="Add --pp N with 2 or more, or leave it out.")
    return words


def chosen(argument: Path | None, option: Path | None, names: str | None, count: int | None = None) -> Hostfile:
    """The hosts that the flags name.

    Raises:
        ConfigError: none or several ways were used, or the file cannot be read.
    """
    given = [value for value in (argument, option, names) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "Which hosts? "
            + ("Nothing names them." if not given else "HOSTFILE, --hostfile and --hosts exclude each other."),
            remedy="Give a hostfile, or --hosts a,b.",
        )
    if names is not None:
        hostfile = from_names(names)
    else:
        file = argument or option
        assert file is not None
        try:
            hostfile = parse(file.read_text(), str(file))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            named = not file.exists() and file.suffix != ".json" and not {"/", ":"} & set(str(file))
            names = f" Names of hosts go with --hosts: `--hosts {file}`." if named else ""
            raise ConfigError(
                f"The hostfile {file} cannot be read: {why}.",
                remedy=f"`phalanx hostfile A,B -o FILE` writes one.{names}",
            ) from error
    return hostfile if count is None else hostfile.first(count)


class RankPlace(Struct, frozen=True):
    """A rank's host, stage and layers, as in /health."""

    rank: int
    stage: int = 0
    layers: tuple[int, int] | None = None


def status_table(
    found: Mapping[str, HostStatus | ClusterError | str | None],
    layout: ReplicaLayout | None = None,
    gateway: GatewayStatus | None = None,
) -> FittingTable:
    """One row per host: rank, phase, process, memory, and a remark; where a server serves in stages, also its stage.

    Args:
        layout: of several replicas; then each row also says which replica it is of, and the gateway has a row.
    """
    groups = {"": tuple(found)} if layout is None else layout.replicas
    stages = {name: cell for hosts in groups.values() for name, cell in _stages(hosts, found).items()}
    first = ("rank" if layout is None else "replica:rank", *(("stage",) if stages else ()))
    columns = (*first, "host", "phase", "pid", "memory GiB", "of machine GiB", "says")
    table = FittingTable(*columns, keys=(first[0], "host"), texts=("says",))
    for replica, hosts in groups.items():
        for rank, name in enumerate(hosts):
            if name in found:
                own = (
                    escape(f"{replica}:{rank}") if layout else str(rank),
                    *((stages.get(name, ""),) if stages else ()),
                )
                table.add_row(*own, *_cells(name, found[name]))
    if layout is None:
        return table
    none = ("",) if stages else ()
    host = found.get(layout.gateway)
    if gateway is not None and not isinstance(host, ClusterError | str):
        cells = _cells(layout.gateway, gateway.process)
        used = [name for name, state in gateway.replicas.items() if state == "ok"]
        if len(used) < len(gateway.replicas):
            cells[1] = f"[yellow]{len(used)} of {len(gateway.replicas)} replicas[/]"
        table.add_row("gateway", *none, *cells)
    elif layout.gateway in found:
        table.add_row(
            "gateway", *none, *_cells(layout.gateway, HostStatus(host="") if isinstance(host, HostStatus) else host)
        )
    return table


def _stages(hosts: Sequence[str], found: Mapping[str, HostStatus | ClusterError | str | None]) -> dict[str, str]:
    """The stage of each host of a group and its layers, as the group's server says; empty where there is one stage."""
    server = next((found[name] for name in hosts[:1] if name in found), None)
    health = server.health if isinstance(server, HostStatus) else None
    try:
        ranks = [] if health is None else msgspec.convert(health.ranks, list[RankPlace])
    except msgspec.ValidationError:
        return {}  # of another version, or a host that was taken over
    places = {rank.rank: stage_cell(rank.stage, rank.layers) for rank in ranks if rank.layers is not None}
    return {name: places[number] for number, name in enumerate(hosts) if number in places}


def stage_cell(stage: int, layers: Sequence[int] | None) -> str:
    """A stage and its layers, in a table."""
    return str(stage) if layers is None else f"{stage}: layers {layers[0]} to {layers[1]}"


def _cells(name: str, status: HostStatus | ClusterError | str | None) -> list[str]:
    """A row but for its first column."""
    name = escape(name)
    if status is None:
        return [name, "connecting"]
    if not isinstance(status, HostStatus):
        return [name, "[red]unreachable[/]", "", "", "", escape(str(status))]
    rss, used, physical = status.rss / GB, status.used / GB, status.physical / GB
    memory = [f"{rss:.2f}", f"{used:.1f} / {physical:.1f}"]
    return [name, phase(status), str(status.child or "-"), *memory, escape(says(status))]


def phase(status: HostStatus) -> str:
    """One or two words for a host's state."""
    if not status.role:
        return "down"
    if status.ended is not None:
        return f"[red]ended ({status.ended})[/]"
    if status.child is None:
        return "[red]gone[/]" if status.supervisor is None else "[yellow]restarting[/]"
    health = status.health
    if health is None:
        return "[green]rank runs[/]" if status.children else "waits for rank 0"
    if health.ok:
        return "[green]ready[/]"
    share = f" {health.done / health.total:.0%}" if health.total > 1 else ""
    return f"[yellow]{escape(health.step or health.phase)}{share}[/]"


def says(status: HostStatus) -> str:
    """A remark on a host: why it is not ready, a known fault, or the log's last line."""
    parts = []
    if status.child is not None and status.supervisor is None:
        parts.append("its supervisor is gone: it runs on, but would not be started again (`phalanx restart`)")
    if status.health is not None and status.health.reason:
        since = status.health.since
        parts.append(status.health.reason + (f" (not ready since {since})" if since else ""))
    healthy = status.health is not None and status.health.ok
    if status.fault and not healthy:
        parts.append(f"{status.fault} {status.remedy}")
    if status.held_s:
        parts.append(f"held back for {status.held_s:.0f} s after a kill")
    if healthy and status.health is not None and status.health.predicted:
        parts.append(_speeds(status.health))
    if not parts and status.role and not healthy:
        parts.append(status.last_line[:100])
    return "; ".join(parts)


def _speeds(health: ServerHealth) -> str:
    """Predicted beside measured speed of one stream."""
    measured = _speed(health.measured) or "nothing yet"
    return f"predicted {_speed(health.predicted)}; measured {measured}"


def _speed(found: Mapping[str, float]) -> str:
    forms = {"tokens_per_second": "{:.1f} tokens/s", "ttft_seconds": "{:.2f} s to the first of 512"}
    return ", ".join(form.format(found[name]) for name, form in forms.items() if name in found)


def check_results_table(results: Mapping[str, list[CheckResult]], *, all_levels: bool) -> FittingTable:
    """One row per check: host, check, seen, wanted, remedy. Passed checks only with `all_levels`."""
    columns = ("host", "check", "seen", "wanted", "remedy")
    table = FittingTable(*columns, keys=columns[:2], texts=columns[2:])
    for host, found in results.items():
        for result in found:
            if result.level != "ok" or all_levels:
                colour = {"ok": "green", "warning": "yellow", "bad": "red"}[result.level]
                cells = (result.check, result.seen, result.wanted, result.remedy)
                first, *rest = (escape(cell) for cell in cells)
                table.add_row(escape(host), f"[{colour}]{first}[/]", *rest)
    return table
