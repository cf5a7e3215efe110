"""`phalanx`: finds the command, runs it, and turns errors into one line and an exit code.

A command's module is imported only when that command runs, so that `phalanx --help` is fast and works on machines
without MLX. typer parses the words of all commands but `rank`.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import zip_longest

from phalanx.cli import streams
from phalanx.cli.engine_extra import ENGINE, refuse
from phalanx.cli.exits import INTERRUPTED, exit_code, flushed, for_launchd
from phalanx.environment import under_launchd
from phalanx.errors import ConfigError, ExitCode
from phalanx.text.word_wrap import fitted

COMMANDS = {
    "serve": "Load a model and serve it over an OpenAI-compatible HTTP API.",
    "gateway": "One address for many servers: health, queue, dispatch.",
    "generate": "Write one answer to a prompt, then end.",
    "chat": "Talk to a model, or to a running server, in this terminal.",
    "launch": "Start a coding agent that works with a server of phalanx.",
    "demo": "Serve a small model, ask it three things, and kill a rank meanwhile.",
    "plan": "What fits on which hosts, and how fast it will be, before anything is loaded.",
    "selftest": "Test a group of ranks: all-reduces, speed, equal tokens, memory.",
    "install": "Bring phalanx to hosts through ssh; --upgrade, --rollback.",
    "uninstall": "Delete phalanx on hosts.",
    "up": "Start a cluster: ranks on several hosts, a server on the first.",
    "down": "Stop a cluster.",
    "restart": "Stop a cluster and start it again as it was.",
    "status": "What runs on every host of a cluster.",
    "logs": "The logs of a cluster's hosts.",
    "doctor": "Look at every host and every link; say what is wrong and what to do.",
    "hostfile": "Write a hostfile from host names, or check one.",
    "net": "Set up, test or undo the network between hosts.",
    "pull": "Download a model onto this machine.",
    "list": "The models on this machine: size, family, bits, context, last use, whether they fit.",
    "show": "Describe a model on this machine.",
    "rm": "Delete models that were downloaded.",
    "ps": "The servers and gateways that run on this machine.",
    "stop": "End a server or a gateway of this machine.",
    "top": "What a server or a gateway does, live in this terminal.",
    "bench": "Measure a running server, compare two, report.",
    "explain": "Why a request took so long, and why its prompt was computed again.",
    "model": "Bring a model to the hosts of a cluster.",
    "credentials": "Make the keys of a cluster's hosts, where units start it.",
    "agent": "Runs ranks on this host for a server on another. Started by `up`, not by hand.",
    "host": "Commands that a cluster command runs on this host, through ssh.",
    "reach": "What ssh is for mpirun.",
    "rank": "One engine process. Started by `serve`, not by hand.",
}
"""Command -> its line in `phalanx --help`. The code of each is the function `command` in the file of its name."""

HIDDEN = frozenset({"agent", "host", "rank", "reach"})
PASSES_ON = frozenset({"up"})
"""Commands that pass everything after `--` to other commands; they find it in their context's `obj`."""

TAKES_SEVERAL = {"gateway": "--worker-urls"}
"""Command without arguments -> its flag that takes all words up to the next one, as in the routers of SMG and vLLM."""

OWN_PARSER = frozenset({"rank"})
"""Commands that parse their words themselves: typer imports pydantic, for which a starting rank would wait."""


SERVING = frozenset({"agent", "gateway", "host", "rank", "serve"})
"""Commands that go on without a reader of their output."""


ELSEWHERE = {"run": "chat", "ls": "list", "remove": "rm", "delete": "rm", "kill": "stop", "start": "serve"}
"""Commands of other programs -> the one here that does the same."""


UNITS = {"serve": "org.phalanx.server", "agent": "org.phalanx.agent", "gateway": "org.phalanx.gateway"}
"""Command -> label of its unit for launchd."""


def run() -> None:
    """The `phalanx` executable."""
    arguments = sys.argv[1:]
    streams.secure(goes_on=not SERVING.isdisjoint(arguments[:1]))
    for argument in arguments:
        if fault := _undecoded(argument):
            print(fitted(f"error: {fault}", sys.stderr), file=sys.stderr)
            sys.exit(ExitCode.USAGE)
    code = flushed(main(arguments))
    if under_launchd() and arguments[:1] != [] and arguments[0] in UNITS:
        code = for_launchd(code, UNITS[arguments[0]])
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. typer prints usage errors (2), `report` prints phalanx's own."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        if not arguments:
            return exit_code(importlib.import_module("phalanx.cli.first_words").command)
        if arguments[0] in ELSEWHERE:
            return exit_code(lambda: _named_elsewhere(arguments))
        if asked in OWN_PARSER and arguments[0] == asked:
            command = importlib.import_module(f"phalanx.cli.{asked}").command
            return exit_code(lambda: command(arguments[1:]))
        app = importlib.import_module("phalanx.cli.typer_app").build(asked, COMMANDS, HIDDEN)
        if asked == "serve" and not {"-h", "--help"} & {*arguments}:
            arguments = _planned(arguments)
        own, after = _divided(asked, _repeated(TAKES_SEVERAL.get(asked or ""), arguments))
        app(own, prog_name="phalanx", obj=after)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ENGINE:
            raise
        return exit_code(lambda: refuse(missing))
    except KeyboardInterrupt:  # while the command's module is imported, for seconds on a busy machine
        return INTERRUPTED
    return 0


def _named_elsewhere(arguments: Sequence[str]) -> int:
    here = shlex.join(["phalanx", ELSEWHERE[arguments[0]], *arguments[1:]])
    raise ConfigError(f"There is no command '{arguments[0]}'.", remedy=f"Did you mean `{here}`?")


def _planned(arguments: Sequence[str]) -> Sequence[str]:
    """The words of `serve` with the ranks and stages that `auto` stands for."""
    if not any(word.rpartition("=")[2] == "auto" for word in arguments):
        return arguments
    words: list[str] = []

    def choose() -> int:
        words.extend(importlib.import_module("phalanx.cli.auto_plan").planned_here(arguments))
        return 0

    if code := exit_code(choose):
        raise SystemExit(code)
    return words


def _repeated(flag: str | None, arguments: Sequence[str]) -> list[str]:
    """The words for typer, which takes one value behind a flag: `--flag A B` as `--flag=A --flag=B`."""
    words: list[str] = []
    is_open = False
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
        if word.startswith("-"):
            is_open = word.partition("=")[0] == flag
            if word == flag and not following.startswith("-"):
                continue
        words.append(f"{flag}={word}" if is_open and not word.startswith("-") else word)
    return words


def _divided(asked: str | None, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The words for typer, and those after `--`, if the command passes these on."""
    words = list(arguments)
    if asked not in PASSES_ON or "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def _undecoded(argument: str) -> str:
    """Describe an argument that Python could not decode (it keeps the bytes); "" if it could."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        try:
            meant = os.fsencode(argument).decode()
        except UnicodeDecodeError:
            return f"the argument {argument!r} is not UTF-8."
        return f"the locale's encoding, {encoding}, lacks characters of the argument {meant!r}. Set LC_ALL=C.UTF-8."
    return ""
