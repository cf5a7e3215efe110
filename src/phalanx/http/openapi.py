"""Builds /openapi.json from operations and the types of their bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import Struct

from phalanx import __version__
from phalanx.http.error_responses import Failure, messages_error, ollama_error, writer_of

VERSION = "3.1.0"  # of OpenAPI
REF = "#/components/schemas/{name}"
TEXT = {"type": "string"}
JSON = "application/json"
PARAMETER = re.compile(r"\{(\w+)\}")


def _object(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


OR_NULL = {"type": ["string", "null"]}
ERRORS: dict[str, dict[str, Any]] = {
    "OpenAIError": _object(error=_object(message=TEXT, type=TEXT, param=OR_NULL, code=OR_NULL)),
    "MessagesError": _object(type=TEXT, error=_object(type=TEXT, message=TEXT)),
    "OllamaError": _object(error=TEXT),
}
"""Schemas of errors; see `error_responses.py`."""
ERROR_NAMES: dict[Callable[[Failure], dict[str, Any]], str] = {
    messages_error: "MessagesError",
    ollama_error: "OllamaError",
}


KEY = "key"
SECURITY = {KEY: {"type": "http", "scheme": "bearer"}}


class Operation(Struct, frozen=True):
    """A method at a path."""

    method: str
    path: str  # {NAME} in it is a parameter
    summary: str
    body: type[Struct] | None = None  # of the request, in JSON
    needs_key: bool = True  # if the server has keys


def document(title: str, operations: Iterable[Operation]) -> dict[str, Any]:
    """The description of a server with these operations."""
    paths: dict[str, dict[str, Any]] = {}
    bodies: set[type[Struct]] = set()
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
        bodies |= {operation.body} if operation.body is not None else set()
    _, schemas = msgspec.json.schema_components(sorted(bodies, key=lambda body: body.__name__), ref_template=REF)
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": {**ERRORS, **schemas}, "securitySchemes": SECURITY},
    }


def _described(operation: Operation) -> dict[str, Any]:
    path = operation.path
    described: dict[str, Any] = {
        "operationId": operation.method.lower() + re.sub(r"\W", "_", path),
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer."},
            "default": {
                "description": "An error.",
                "content": _content(ERROR_NAMES.get(writer_of(path), "OpenAIError")),
            },
        },
    }
    if operation.needs_key:
        described["security"] = [{KEY: []}]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body.__name__)}
    if names := PARAMETER.findall(path):
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    return described


def _content(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REF.format(name=schema)}}}
