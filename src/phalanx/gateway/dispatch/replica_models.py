"""The models of all replicas as one list, and the names by which clients may ask for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.errors import ConfigError
from phalanx.gateway.dispatch.replica import Replica
from phalanx.http.foreign_json import decoder
from phalanx.http.model_lists import TAG, name_meant


class _List(Struct):
    data: list[dict[str, Any]]


class _Tags(Struct):
    models: list[dict[str, Any]]


_read = decoder(_List)
_read_tags = decoder(_Tags)


def cards_in(body: bytes) -> list[dict[str, Any]] | None:
    """The entries of a /v1/models; None if the body is not such a list."""
    try:
        cards = _read(body).data
    except msgspec.DecodeError:
        return None
    return [card for card in cards if isinstance(card.get("id"), str)]


def names_in(cards: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names of a replica's models; Ollama's `llama3:latest` is also `llama3`."""
    names = {str(card["id"]) for card in cards}
    return frozenset(names | {name.removesuffix(TAG) for name in names})


def model_meant(asked: str, replicas: Collection[Replica], aliases: Mapping[str, str]) -> str:
    """The model that a client means by a name, as its replicas call it; the name itself if it is unknown."""
    served = sorted({name for replica in replicas for name in replica.models or ()})
    found = name_meant(asked, (*aliases, *served))
    if found is None or (found != asked and any(one.models is None and one.health.state == "up" for one in replicas)):
        return asked  # a replica that does not list its models may know it by this very name
    return aliases.get(found, found)


def merged(replicas: Iterable[Replica], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """One entry for each model that a replica serves, the first replica's; then one for each alias of such a model."""
    found: dict[str, dict[str, Any]] = {}
    for replica in replicas:
        for card in replica.cards:
            found.setdefault(str(card["id"]), dict(card))
    named = {alias: {**found[model], "id": alias} for alias, model in aliases.items() if model in found}
    return list({**found, **named}.values())


def tags_in(body: bytes) -> list[dict[str, Any]]:
    """The entries of an Ollama's /api/tags; empty if the body is not such a list."""
    try:
        entries = _read_tags(body).models
    except msgspec.DecodeError:
        return []
    return [entry for entry in entries if isinstance(entry.get("name"), str)]


def merged_tags(lists: Iterable[Sequence[dict[str, Any]]], aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """As `merged`, of lists of `tags_in`. A name without a tag is `NAME:latest`."""
    found: dict[str, dict[str, Any]] = {}
    for entry in (entry for entries in lists for entry in entries):
        found.setdefault(str(entry["name"]).removesuffix(TAG), entry)
    named = {
        alias: {**found[model.removesuffix(TAG)], "name": alias, "model": alias}
        for alias, model in aliases.items()
        if model.removesuffix(TAG) in found
    }
    return list({**found, **named}.values())


def parse_aliases(given: Sequence[str]) -> dict[str, str]:
    """Alias -> model, of "ALIAS=MODEL".

    Raises:
        ConfigError: names the alias and what is wrong with it.
    """
    aliases: dict[str, str] = {}
    for text in given:
        alias, sign, model = (part.strip() for part in text.partition("="))
        if not (alias and sign and model):
            raise ConfigError(f"--model-aliases {text!r} is not ALIAS=MODEL.", remedy="For example gpt-4o=demo.")
        if aliases.setdefault(alias, model) != model:
            raise ConfigError(f"--model-aliases gives {alias!r} two models: {aliases[alias]!r} and {model!r}.")
    for alias, model in aliases.items():
        if model in aliases:
            raise ConfigError(
                f"--model-aliases {alias}={model}: {model!r} is an alias itself.", remedy="Name its model."
            )
    return aliases
