"""One command's words as typer parses them: its help, and errors for words that it does not take.

typer checks the values against the declarations of `setting_flags.py`.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand

from phalanx.cli.foreign_flags import FOREIGN_FLAGS, SERVING_COMMANDS
from phalanx.cli.setting_flags import Setting, settings_of
from phalanx.cli.terminal import report
from phalanx.errors import ConfigError, ExitCode
from phalanx.server.settings.server_settings import ServerConfig

NAME_COLUMN = 32  # of help: longer names stand on lines of their own
AFTER_DASHES = "phalanx up HOSTFILE -- MODEL"
REPLICAS_OF_GATEWAY = (
    "The file lists replicas; --worker-urls takes their addresses, and `phalanx up --replicas N` starts N of them."
)


class Command(TyperCommand):
    """Prints every flag whole at any width: on a line of its own where it is long, with its help below.

    typer's table would cut long flags on 80 columns and leave out their short forms.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, arguments and, panel by panel, options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or title, []).append(record)
        for title in filter(panels.get, panels):
            formatter.write(f"\n{title}:\n{two_columns(panels[title], formatter.width)}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command's words.

        Raises:
            Exit: this command does not take a word; the error is printed.
        """
        if not ctx.ignore_unknown_options:
            try:
                self._check(ctx, args)
            except ConfigError as error:
                report(error)
                raise typer.Exit(ExitCode.USAGE) from None
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, by which typer checks choices
            if (error.param.name if error.param else "", self.name) == ("replicas", "gateway"):
                error.message += f" {REPLICAS_OF_GATEWAY}"
            raise
        return rest

    def _check(self, ctx: Any, words: Sequence[str]) -> None:
        """Refuse flags that the command does not have, and arguments beyond those that it takes.

        Raises:
            ConfigError: names the word, and where it belongs.
        """
        arguments = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        most = math.inf if any(argument.nargs == -1 for argument in arguments) else len(arguments)
        given = []
        for word, is_flag in self._sorted(ctx, words):
            if is_flag:
                name = word.partition("=")[0]
                raise ConfigError(f"`phalanx {self.name}` has no flag {name}.", remedy=self._remedy(ctx, name))
            given.append(word)
        if len(given) > most:
            word = given[len(arguments)]
            raise ConfigError(f"{word!r} is one argument too many.", remedy=self._place_of(word))

    def _sorted(self, ctx: Any, words: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Arguments, with False, and flags that the command does not have, with True."""
        known = {name: option for option in self._options(ctx) for name in (*option.opts, *option.secondary_opts)}
        rest = iter(words)
        for word in rest:
            if word == "--":
                yield from ((argument, False) for argument in rest)
            elif word in known:
                if not (known[word].is_flag or known[word].count):
                    next(rest, None)
            elif word.startswith("--"):
                if word.partition("=")[0] not in known:
                    yield word, True
            elif not word.startswith("-") or word == "-":
                yield word, False
            elif word[:2] not in known:  # a known short flag may have its value attached, as in -n2
                yield word, True

    def _options(self, ctx: Any) -> list[Any]:
        return [parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "option"]

    @property
    def _is_up(self) -> bool:
        return self.name == "up"

    def _place_of(self, word: str) -> str:
        """The remedy for an argument too many: where such a word belongs."""
        if self._is_up:
            return f"A model stands after `--`: `phalanx up HOSTFILE -- {word}`."
        if self.name == "generate":
            return f"The prompt stands after -p: `phalanx generate MODEL -p {shlex.quote(word)}`."
        if self.name == "gateway" and word.startswith(("http://", "https://")):
            return f"Servers stand after --worker-urls: `phalanx gateway --worker-urls {word}`."
        if self.name == "model":
            return "The hostfile stands after --hostfile: `phalanx model pull MODEL --hostfile FILE`."
        return f"`phalanx {self.name} --help` shows all."

    def _remedy(self, ctx: Any, name: str) -> str:
        """The remedy for a flag that the command does not have."""
        shown = [spelled for option in self._options(ctx) if not option.hidden for spelled in option.opts]
        if self._is_up and name in serve_flags():
            return f"It is a flag of `phalanx serve`, and stands after `--`: `{AFTER_DASHES} {name} ...`."
        if self._is_up and name == "--model":
            return f"The model is an argument, and stands after `--`: `{AFTER_DASHES}`."
        if self.name in SERVING_COMMANDS and name in FOREIGN_FLAGS:
            return FOREIGN_FLAGS[name]
        if name == "--url" and self.name in ("chat", "top"):
            return f"The address is an argument: `phalanx {self.name} http://HOST:PORT`."
        if name.startswith("--") and (close := get_close_matches(name, shown, n=1, cutoff=0.7)):
            return f"Did you mean {close[0]}?"
        return f"`phalanx {self.name} --help` shows all flags."


def two_columns(records: Sequence[tuple[str, str]], width: int) -> str:
    """Names, and beside them what they are. No word is cut, not even at a hyphen: flags have some."""
    left = min(NAME_COLUMN, max(len(name) for name, _ in records) + 4)
    lines = []
    for name, text in records:
        first, *rest = textwrap.wrap(text, width - left, break_on_hyphens=False, break_long_words=False) or [""]
        head = f"  {name}"
        lines += [f"{head:{left}}{first}"] if len(head) < left - 1 else [head, " " * left + first]
        lines += [" " * left + line for line in rest]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def check_serve_words(words: Sequence[str]) -> None:
    """Refuse flags after `--` that `phalanx serve` does not have, and a last one without its value.

    No host has been asked yet. `up` appends flags of its own, the first of which would become the missing value.

    Raises:
        ConfigError: names the flag, and what does the same.
    """
    flags = _serve_settings()
    known = {name: setting.type is not bool for name, setting in flags.items()}
    known |= dict.fromkeys((f"--no-{name[2:]}" for name, setting in flags.items() if setting.type is bool), False)
    known |= dict.fromkeys((f"{name}-file" for name, setting in flags.items() if setting.flag.is_key), True)
    rest = iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name in known:
            if known[name] and not value and next(rest, None) is None:
                raise ConfigError(f"{name} after `--` has no value.", remedy=f"Write it behind the flag: `{name} ...`.")
        elif word.startswith("--") and name not in OTHERS_OF_SERVE:
            close = get_close_matches(name, flags, n=1, cutoff=0.7)
            hint = FOREIGN_FLAGS.get(name) or (f"Did you mean {close[0]}?" if close else "")
            raise ConfigError(
                f"{name} after `--`: `phalanx serve` has no such flag.",
                remedy=hint or "`phalanx serve --help` shows all.",
            )


OTHERS_OF_SERVE = frozenset({"--no-prefix-caching", "--no-enable-prefix-caching", "--attach", "--cluster", "--help"})
"""Its flags beside the settings."""


def serve_flags() -> set[str]:
    """Every flag of `phalanx serve` that takes a setting, with its short forms, without MODEL."""
    return set(_serve_settings())


def _serve_settings() -> dict[str, Setting]:
    nested = [setting.type for setting in settings_of(ServerConfig).values() if setting.is_nested]
    settings = [setting for owner in (ServerConfig, *nested) for setting in settings_of(owner).values()]
    flags = [setting for setting in settings if not (setting.is_nested or setting.flag.positional)]
    return {name: setting for setting in flags for name in (setting.spelled, *setting.flag.aliases)}
