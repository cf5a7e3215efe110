"""Describes request bodies in /openapi.json.

FastAPI cannot do it by itself, because the endpoints read their bodies themselves (`server/requests/intake.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct

REF = "#/components/schemas/{name}"


def json_body(kind: type[Struct]) -> dict[str, Any]:
    """The `openapi_extra` argument for a route with this body."""
    schema = {"$ref": REF.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_bodies(app: FastAPI, kinds: Collection[type[Struct]]) -> None:
    """Make `app.openapi()` include the schemas of the bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            _drop_422(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _drop_422(document: dict[str, Any]) -> None:
    """Remove FastAPI's own validation error: this server answers 400 with OpenAI's error object instead."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
