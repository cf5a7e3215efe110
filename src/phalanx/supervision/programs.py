"""The two programs that an agent runs: `phalanx rank`, and Open MPI's daemon `prted`, which starts ranks for mpirun.

The server names neither: the agent takes the interpreter that it runs in itself, and the daemon of its own host's Open
MPI. No shell is involved.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from phalanx.config import RUN_PHALANX
from phalanx.dist.collective_backend import file_variables, find_mpi
from phalanx.environment import KERNELS_VARIABLE, child_environment
from phalanx.errors import ConfigError
from phalanx.private_files import write_private
from phalanx.rank_variables import check_variable
from phalanx.supervision.agent_protocol import RunDaemon, RunRank

DAEMON = "prted"
OF_THE_SERVER = (
    KERNELS_VARIABLE, "MLX_RANK", "MLX_WORLD_SIZE", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING", "NCCL_HOST_IP",
    "NCCL_PORT",
)  # fmt: skip
"""Variables by which the server tells a rank its place in the group; hostfiles and flags may not set them."""


class Program(NamedTuple):
    """A command and its whole environment."""

    command: list[str]
    variables: dict[str, str]


def rank(run: RunRank, directory: Path) -> Program:
    """The rank that a server asks for. Writes its files into `directory`, which is the agent's own.

    Raises:
        ConfigError: a variable may not be set; names it.
        OSError: a file cannot be written.
    """
    for name, value in run.variables.items():
        check_variable(name, value, "the server", except_for=OF_THE_SERVER)
    variables = {**child_environment(), **run.variables, **file_variables(directory)}
    for variable, text in run.files.items():
        file = directory / f"{variable}.json"
        file.unlink(missing_ok=True)  # of an earlier rank
        write_private(file, text.encode())
        variables[variable] = str(file)
    return Program([sys.executable, *RUN_PHALANX, "rank", *_whole(run.arguments)], variables)


def daemon(run: RunDaemon, directory: Path) -> Program:
    """The daemon that mpirun on the first host asks for. It and its ranks leave their files in `directory`.

    Raises:
        ConfigError: this host has no Open MPI.
    """
    mpi = find_mpi()
    if mpi is None:
        raise ConfigError("this host has no Open MPI.", remedy="Install `phalanx[mpi]` there, or use --backend ring.")
    prefix = Path(mpi.mpirun).parent.parent
    variables = child_environment()
    libraries = [str(prefix / "lib"), *filter(None, [variables.get("LD_LIBRARY_PATH")])]
    # As mpirun would set them: the wheel's files are not where it was built.
    variables |= {"PRTE_PREFIX": str(prefix), "PMIX_PREFIX": str(prefix), "LD_LIBRARY_PATH": ":".join(libraries)}
    variables |= file_variables(directory)
    return Program([str(prefix / "bin" / DAEMON), *_whole(run.arguments)], variables)


def _whole(arguments: list[str]) -> list[str]:
    """The arguments, after checking that the system will not cut one short.

    Raises:
        ConfigError: one contains NUL.
    """
    if any("\0" in word for word in arguments):
        raise ConfigError("an argument contains NUL.")
    return arguments


def daemon_arguments(line: str) -> list[str]:
    """The arguments of `prted` in the command line that mpirun hands to ssh.

    It is written for the user's shell: statements that prepare the first host's paths, then the daemon, perhaps in
    parentheses. The preparation is left out, since an agent prepares its own host's paths.

        PRTE_PREFIX=/x;export PRTE_PREFIX;...;/x/bin/prted --prtemca ess "env" ...        (bash, zsh)
        ( test ! -r ./.profile || . ./.profile; ...; /x/bin/prted --prtemca ess "env" ... )        (sh, ksh)

    Raises:
        ConfigError: it ends with another program.
    """
    words = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    words.whitespace_split = True
    words.commenters = ""
    statement: list[str] = []
    try:
        for word in words:
            if word == ";":
                statement = []
            else:
                statement.append(word)
    except ValueError as error:
        raise ConfigError(f"mpirun's command line cannot be read: {error}: {line[:200]!r}.") from error
    if not statement or Path(statement[0]).name != DAEMON:
        raise ConfigError(
            f"mpirun asks for {' '.join(statement)[:200]!r} instead of {DAEMON}.",
            remedy="Use Open MPI 5, or another backend.",
        )
    if operator := next((word for word in statement if not word.strip("|&<>")), None):
        raise ConfigError(f"mpirun's command line has {operator!r} after {DAEMON}.")
    return statement[1:-1] if statement[-1] == ")" else statement[1:]
