"""API keys with limits each, from a file. The file's text is given.

[[key]]
name = "ci"                      # for the log
key = "..."
max_in_flight = 4                # each answer (`n`, each prompt) counts. The three limits are optional
requests_per_minute = 60
tokens_per_minute = 100000
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from phalanx.errors import ConfigError
from phalanx.gateway.settings.key_limits import KeyLimits
from phalanx.gateway.settings.toml_tables import parse_tables
from phalanx.http.api_keys import NOT_SENDABLE, is_sendable

Limit = Annotated[int, Meta(ge=1, le=2**31)]


class NamedKey(Struct, frozen=True, kw_only=True):
    """One key of the file."""

    name: str
    key: str
    limits: KeyLimits


class _Table(Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    key: Annotated[str, Meta(min_length=8, max_length=512)]
    max_in_flight: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


def parse_keys(text: str, file: str) -> tuple[NamedKey, ...]:
    """The keys of a file.

    Raises:
        ConfigError: names file, line and what is wrong; the whole file is refused.
    """
    found: dict[str, NamedKey] = {}
    for table, line in parse_tables(text, "key", _Table, file):
        if not is_sendable(table.key):
            raise ConfigError(f"{file}, line {line}: the key of {table.name!r} {NOT_SENDABLE}.")
        if any(known.name == table.name for known in found.values()):
            raise ConfigError(f"{file}, line {line}: there is a key named {table.name!r} before.")
        if table.key in found:
            raise ConfigError(f"{file}, line {line}: the key of {table.name!r} is that of {found[table.key].name!r}.")
        limits = KeyLimits(
            max_in_flight=table.max_in_flight,
            requests_per_minute=table.requests_per_minute,
            tokens_per_minute=table.tokens_per_minute,
        )
        found[table.key] = NamedKey(name=table.name, key=table.key, limits=limits)
    if not found:
        raise ConfigError(f"{file} has no key.", remedy="Write [[key]], name and key.")
    return tuple(found.values())
