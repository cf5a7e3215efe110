"""The replicas that a user names, by URLs or in a file. The file's text is given.

[[replica]]
name = "studio"                  # for messages, metrics and the admin API
url = "http://10.0.0.5:8000"
weight = 2.0                     # relative share of requests; default 1
max_in_flight = 16               # default: the limit in its /health, else 1
key = "..."                      # API key that it asks for
admin_key = "..."                # its --admin-key: its streams can move, and it keeps clients' keys apart
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.structs import replace

from phalanx.errors import ConfigError
from phalanx.gateway.settings.replica_addresses import address_fault
from phalanx.gateway.settings.toml_tables import parse_tables
from phalanx.http.api_keys import NOT_SENDABLE, is_sendable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\[\]-]{0,63}")


class ReplicaSpec(Struct, frozen=True, kw_only=True):
    """One replica as the user names it."""

    name: str
    url: str  # without /v1 and without a slash at the end
    weight: float = 1.0  # relative share of requests
    max_in_flight: int | None = None  # None: the limit in its /health, else `ALONE`
    key: str | None = None  # API key that it asks for
    admin_key: str | None = None  # its --admin-key, for records of its streams and for owners
    by_api: bool = False  # the admin API added it: it gets no keys but its own, and some addresses are refused


class ReplicaFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A replica as a file's table or the admin API's JSON names it."""

    name: str
    url: str
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    max_in_flight: Annotated[int, Meta(ge=1, le=65536)] | None = None
    key: str | None = None
    admin_key: str | None = None

    def spec(self, keys: DefaultKeys) -> ReplicaSpec:
        """The replica, checked; `keys` are the defaults.

        Raises:
            ConfigError: says what is wrong with its name, URL or keys.
        """
        own = DefaultKeys(self.key or keys.key, self.admin_key or keys.admin_key)
        return make_spec(self.name, self.url, weight=self.weight, max_in_flight=self.max_in_flight, keys=own)

    def spec_by_api(self) -> ReplicaSpec:
        """The replica as the admin API adds it, checked and without default keys: see `admin.py`.

        Raises:
            ConfigError: as of `spec`, or its URL has an address that is refused.
        """
        spec = replace(self.spec(DefaultKeys()), by_api=True)
        host = urlsplit(spec.url).hostname or ""
        with suppress(ValueError):  # a name, whose address is checked when it is connected to
            ipaddress.ip_address(host)
            if fault := address_fault(host):
                raise ConfigError(f"{spec.url}: {fault}.")
        return spec


class DefaultKeys(Struct, frozen=True):
    """Keys for replicas without keys of their own; see `ReplicaSpec`."""

    key: str | None = None
    admin_key: str | None = None


def parse_replicas(text: str, file: str, *, keys: DefaultKeys = DefaultKeys()) -> tuple[ReplicaSpec, ...]:
    """The replicas of a file.

    Args:
        file: its name, for messages.

    Raises:
        ConfigError: names file, line and what is wrong; the whole file is refused.
    """
    specs: dict[str, ReplicaSpec] = {}
    for table, line in parse_tables(text, "replica", ReplicaFields, file):
        try:
            spec = table.spec(keys)
        except ConfigError as error:
            raise ConfigError(f"{file}, line {line}: {error.message}", remedy=error.remedy) from error
        if spec.name in specs:
            raise ConfigError(f"{file}, line {line}: there is a replica {spec.name!r} before.")
        if any(other.url == spec.url for other in specs.values()):
            raise ConfigError(f"{file}, line {line}: {spec.url} is a replica above already.")
        specs[spec.name] = spec
    if not specs:
        raise ConfigError(f"{file} has no replica.", remedy="Write [[replica]], name and url.")
    return tuple(specs.values())


def specs_of_urls(given: Sequence[str], *, keys: DefaultKeys = DefaultKeys()) -> tuple[ReplicaSpec, ...]:
    """The replicas of `--worker-urls`; each is called by its host and port.

    Raises:
        ConfigError: names the URL and what is wrong with it.
    """
    urls = " ".join(given).replace(",", " ").split()
    specs: dict[str, ReplicaSpec] = {}
    for url in urls:
        spec = make_spec(_name_in(url), url, keys=keys)
        if spec.name in specs:
            raise ConfigError(f"--worker-urls has {spec.name} twice.")
        specs[spec.name] = spec
    return tuple(specs.values())


def make_spec(
    name: str, url: str, *, weight: float = 1.0, max_in_flight: int | None = None, keys: DefaultKeys = DefaultKeys()
) -> ReplicaSpec:
    """A replica, checked.

    Raises:
        ConfigError: says what is wrong with its name or URL.
    """
    if not _is_base(url.strip()):
        raise ConfigError(f"{url!r} is not the base URL of a server.", remedy="For example http://10.0.0.5:8000.")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a name.", remedy="Letters, digits and . _ : - are, 64 at most.")
    for which, key in (("key", keys.key), ("admin_key", keys.admin_key)):
        if key is not None and not is_sendable(key):
            raise ConfigError(f"The {which} of {name} {NOT_SENDABLE}.")
    base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    return ReplicaSpec(
        name=name, url=base, weight=weight, max_in_flight=max_in_flight, key=keys.key, admin_key=keys.admin_key
    )


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or a bracket is open
        return False
    blank = not url.isprintable() or " " in url
    return usable and not blank and not parts.query and not parts.fragment and "@" not in parts.netloc


def _name_in(url: str) -> str:
    """Host and port of a base URL, which name the replica; of anything else, any text."""
    return urlsplit(url).netloc if _is_base(url) else url
