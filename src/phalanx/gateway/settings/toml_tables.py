"""Parses files of TOML tables of one kind, `[[name]]`; an error names the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from phalanx.errors import ConfigError

T = TypeVar("T", bound=Struct)
BOUND = re.compile(r"Expected `\w+`( of length)? (>=|<=) (\S+)")
"""msgspec's message on a number out of range, or a text that is too short or too long."""
MIN_OR_MAX = {">=": "least", "<=": "most"}


def parse_tables(text: str, name: str, kind: type[T], file: str) -> list[tuple[T, int]]:
    """The tables of a file, each with the number of its first line, from 1.

    Args:
        name: of the tables.
        kind: type of each table; its fields are the allowed keys.
        file: its name, for messages.

    Raises:
        ConfigError: names file, line, key and what is wrong.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number without end
        raise ConfigError(f"{file} is not TOML: {error}.") from error
    for key in document:
        if key != name:
            line = _line_of(text.splitlines(), rf"\s*\[*\s*{re.escape(key)}\b", 0)
            raise ConfigError(
                f"{file}, line {line}: {key!r} is not known here.", remedy=f"Tables are called [[{name}]]."
            )
    tables = document.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: {name!r} is not a list of tables.", remedy=f"Write [[{name}]] before each.")
    lines = text.splitlines()
    heads = [at for at, line in enumerate(lines) if re.match(rf"\s*\[\[\s*{name}\s*\]\]", line)]
    heads += [0] * (len(tables) - len(heads))  # written inline
    return [(_parse(table, kind, file, lines, at), at + 1) for table, at in zip(tables, heads, strict=False)]


def _parse(table: dict[str, object], kind: type[T], file: str, lines: Sequence[str], at: int) -> T:
    known = {field.name for field in msgspec.structs.fields(kind)}
    for key in table:
        if key not in known:
            line = _line_of(lines, rf"\s*{re.escape(key)}\b", at)
            raise ConfigError(
                f"{file}, line {line}: {key!r} is not known here.", remedy=f"Known are {', '.join(sorted(known))}."
            )
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        path = re.search(r"\$\.(\w+)", str(error))
        line = _line_of(lines, rf"\s*{path[1]}\b", at) if path else at + 1
        message = str(error)
        if path and (found := BOUND.match(message)):
            what = f"have at {MIN_OR_MAX[found[2]]} {found[3]} characters" if found[1] else ""
            message = f"{path[1]!r} has to {what or f'be at {MIN_OR_MAX[found[2]]} {found[3]}'}"
        raise ConfigError(f"{file}, line {line}: {message}.") from error


def _line_of(lines: Sequence[str], pattern: str, begin: int) -> int:
    """Number of the first line from `begin` on that matches, from 1; that of `begin` if none does."""
    return next((at + 1 for at in range(begin, len(lines)) if re.match(pattern, lines[at])), begin + 1)
