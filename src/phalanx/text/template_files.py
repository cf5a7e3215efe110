"""Finds the chat templates of a model's directory, and chooses the one to render.

As in transformers, `chat_template.jinja` takes precedence over tokenizer_config.json, and
`additional_chat_templates/NAME.jinja` adds templates. Processors of older image models keep theirs in
chat_template.json, which counts last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import ModelUnsupported
from phalanx.text.model_files import read_json, read_text

DEFAULT = "default"
BYTE_ORDER_MARK = "\ufeff"


def read_templates(path: Path) -> dict[str, str]:
    """Name -> source of every template; a template without a name is "default". Empty ones are left out.

    Raises:
        ModelUnsupported: a file cannot be read, or a template is neither a text nor a list of named texts.
    """
    more = sorted((path / "additional_chat_templates").glob("[!.]*.jinja"))  # macOS writes ._NAME on other file systems
    found = {file.stem: read_template(file) for file in more}
    try:
        found[DEFAULT] = read_template(path / "chat_template.jinja")
    except FileNotFoundError:
        found = {**_in_settings(path), **found}
    return {name: source for name, source in found.items() if source.strip()}


def read_template(file: Path) -> str:
    """The source in a file, without a byte order mark.

    Raises:
        FileNotFoundError, ModelUnsupported: as `read_text`.
    """
    return read_text(file).removeprefix(BYTE_ORDER_MARK)


def choose(templates: Mapping[str, str], given: str | None, *, tools: bool) -> str:
    """The source of the template to render.

    Args:
        given: a source, or the name of one of the templates.
        tools: whether the conversation has tools.

    Raises:
        ValueError: there are several and none is the default.
    """
    if given is not None:
        return templates.get(given, given)
    for name in ("tool_use", DEFAULT) if tools else (DEFAULT,):
        if name in templates:
            return templates[name]
    raise ValueError(
        "This model has multiple chat templates with no default specified! Available template names are "
        f"{sorted(templates)}."
    )


def shown(templates: Mapping[str, str], given: str | None) -> str:
    """The source that `choose` takes for a conversation with tools; empty without one."""
    try:
        return choose(templates, given, tools=True)
    except ValueError:
        return ""


def _in_settings(path: Path) -> dict[str, str]:
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        try:
            value = read_json(file).get("chat_template")
        except FileNotFoundError:
            continue
        if value is not None:
            return _by_name(file, value)
    return {}


def _by_name(file: Path, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        if isinstance(value, dict):
            return msgspec.convert(value, dict[str, str])
        return {entry["name"]: entry["template"] for entry in msgspec.convert(value, list[dict[str, str]])}
    except (msgspec.ValidationError, KeyError) as error:
        raise ModelUnsupported(
            f"{file}: chat_template is neither a text nor a list of objects with name and template.",
            remedy="Repair it, or give a template with --chat-template.",
        ) from error
