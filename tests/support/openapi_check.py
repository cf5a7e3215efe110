"""Whether a document is a description by OpenAPI 3.1."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator

TEXT = {"type": "string", "minLength": 1}
OPERATION = {
    "type": "object",
    "required": ["operationId", "summary", "responses"],
    "additionalProperties": False,
    "properties": {
        "operationId": {"type": "string", "pattern": r"^\w+$"},
        "summary": TEXT,
        "security": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "array"}}},
        "parameters": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "in", "required", "schema"],
                "properties": {"in": {"const": "path"}, "required": {"const": True}},
            },
        },
        "requestBody": {"type": "object", "required": ["content"]},
        "responses": {
            "type": "object",
            "required": ["200", "default"],
            "additionalProperties": {"type": "object", "required": ["description"]},
        },
    },
}
METHODS = ["get", "post", "put", "patch", "delete"]
DOCUMENT = {
    "type": "object",
    "required": ["openapi", "info", "paths", "components"],
    "properties": {
        "openapi": {"const": "3.1.0"},
        "info": {"type": "object", "required": ["title", "version"], "additionalProperties": TEXT},
        "paths": {
            "type": "object",
            "propertyNames": {"pattern": "^/"},
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"enum": METHODS},
                "additionalProperties": OPERATION,
            },
        },
    },
}
"""What of OpenAPI 3.1's own schema a description of ours can go against."""


def check_openapi(document: dict[str, Any]) -> set[tuple[str, str]]:
    """The operations of a description that is right: (method, path)."""
    Draft202012Validator(DOCUMENT).validate(document)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/components/schemas/([^"]*)"', json.dumps(document)):
        assert name in schemas
    found = {(method.upper(), path): said for path, at in document["paths"].items() for method, said in at.items()}
    ids = [said["operationId"] for said in found.values()]
    assert len(set(ids)) == len(ids)
    for (_, path), said in found.items():
        assert [one["name"] for one in said.get("parameters", [])] == re.findall(r"{(\w+)}", path)
        for scheme in said.get("security", []):
            assert scheme.keys() <= document["components"]["securitySchemes"].keys()
    return set(found)
