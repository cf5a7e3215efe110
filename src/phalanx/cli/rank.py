"""`phalanx rank`: runs one rank of an engine."""

from __future__ import annotations

import phalanx.kernels.preload  # noqa: F401  (before anything loads MLX)

# isort: split
import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from phalanx.config import EngineConfig, GroupConfig
from phalanx.dist.collective_backend import foreign_launcher
from phalanx.dist.control_address import is_unix
from phalanx.dist.topology import PipelinePosition, Topology
from phalanx.engine.boot import run_launched_rank, run_rank
from phalanx.environment import environment
from phalanx.errors import ConfigError
from phalanx.tls.host_credentials import Credentials, read_credentials


def command(words: Sequence[str]) -> int:
    """Compute as one rank, behind a server process. Under mpirun or mlx.launch, the server is `serve --attach`."""
    given = _parser().parse_args(words)
    model, socket, config, rank = given.model, given.socket, given.config, given.rank
    parsed = EngineConfig(model=model) if config is None else _parse(config, EngineConfig, "--config")
    if parsed.model != model:
        raise ConfigError(f"MODEL is {model!r}, but --config says {parsed.model!r}.", remedy="Give the same model.")
    launcher = foreign_launcher(environment())
    number = rank if rank is not None else launcher.rank if launcher is not None else 0
    if given.group is not None:
        members = _parse(given.group, GroupConfig, "--group")
        if rank is None and given.stage is not None:
            number = _rank_in(members, given.stage, number)
        if number >= members.size:
            raise ConfigError(f"--rank {number} is not one of the group's {members.size} ranks.")
        return run_rank(parsed, members, _credentials(given.credentials, members, number), socket, number)
    if given.credentials is not None:
        raise ConfigError("--credentials are for a group over several machines.", remedy="Give --group, or leave it.")
    if launcher is None or launcher.size == 1:
        if parsed.n_ranks != 1:
            raise ConfigError(
                f"--config asks for {parsed.n_ranks} ranks, but no --group or launcher gives the others.",
                remedy="Give --group, or start the ranks with mpirun or mlx.launch.",
            )
        return run_rank(parsed, None, None, socket, number)
    if rank is not None and rank != launcher.rank:
        raise ConfigError(f"--rank {rank}, but the launcher says {launcher.rank}.", remedy="Leave --rank out.")
    return run_launched_rank(parsed, launcher, socket, given.control_host)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("phalanx rank", description=command.__doc__, allow_abbrev=False)
    parser.add_argument("model", help="The model; here so that `ps` shows it. Must equal the config's.")
    parser.add_argument("--socket", required=True, help="Unix socket of the server process.")
    parser.add_argument("--config", help="EngineConfig as JSON; else the defaults.")
    parser.add_argument("--group", help="GroupConfig as JSON; else the launcher's.")
    parser.add_argument("--credentials", type=Path, help="This host's key and all certificates, if there are others.")
    parser.add_argument("--rank", type=_number, help="Number in the group; else the launcher's.")
    parser.add_argument("--stage", type=_number, help="Of the pipeline: the launcher's number is one of its ranks.")
    parser.add_argument(
        "--control-host",
        default="127.0.0.1",
        help="Under another launcher: rank 0's address, as the other ranks reach it (default: %(default)s).",
    )
    return parser


def _number(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more.")
    return number


def _rank_in(group: GroupConfig, stage: int, tp_rank: int) -> int:
    """The number in the group of a rank that the launcher counts within its stage."""
    widths = group.widths or (group.size,)
    if stage >= len(widths) or tp_rank >= widths[stage]:
        raise ConfigError(f"--stage {stage}: there is no rank {tp_rank} in stages of {widths} ranks.")
    return Topology(widths).rank(PipelinePosition(stage, tp_rank))


def _credentials(file: Path | None, group: GroupConfig, rank: int) -> Credentials | None:
    """This rank's credentials; None where the ranks meet on a Unix socket, which needs none."""
    if is_unix(group.control):
        if file is not None:
            raise ConfigError(f"--credentials {file}: the ranks meet on {group.control}.", remedy="Leave them out.")
        return None
    if file is None:
        raise ConfigError(
            f"The ranks meet on {group.control} over TCP, so each needs credentials.",
            remedy="Give --credentials, or start the ranks with `phalanx serve --tp N` or `phalanx up`.",
        )
    credentials = read_credentials(file)
    if credentials.place != rank or len(credentials.certificates) < group.size:
        raise ConfigError(
            f"--credentials {file} are those of host {credentials.place} of {len(credentials.certificates)}, but this "
            f"is rank {rank} of {group.size}.",
            remedy="Rank i runs on host i, with its own credentials.",
        )
    return credentials


T = TypeVar("T", EngineConfig, GroupConfig)


def _parse(text: str, kind: type[T], flag: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} cannot be read: {error}.", remedy=f"It is {kind.__name__} as JSON.") from error
