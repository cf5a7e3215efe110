"""From an HTTP request to a typed body: checks media type, size, JSON, field types and API key.

Every failure is an `InvalidRequest`. Does not know what the fields mean (`validate.py`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError

from phalanx.errors import InvalidApiKey, InvalidRequest, RequestTooLarge, WrongMediaType
from phalanx.server.schema import Body

B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B], max_bytes: int) -> B:
    """The request's JSON body as `kind`.

    Raises:
        WrongMediaType: the Content-Type is not JSON.
        RequestTooLarge: more than `max_bytes`, by its Content-Length or while reading.
        InvalidRequest: the body is not JSON, not an object, or has a field of a wrong type.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Requiring JSON also keeps foreign web pages out: a browser sends it across origins only after a pre-flight.
    if not (media_type == "application/json" or media_type.endswith("+json")):
        raise WrongMediaType(f"Content-Type is {media_type[:80] or 'missing'!r}; it must be application/json.")
    try:
        value = msgspec.json.decode(await _read(request, max_bytes))
    except RecursionError as error:
        raise InvalidRequest("The JSON body is nested too deeply.") from error
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError
        raise InvalidRequest(f"We could not parse the JSON body of your request: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The JSON body must be an object.")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _shape_error(error, value) from error


def check_key(authorization: str | None, keys: Sequence[str]) -> str:
    """The accepted key in an Authorization header; "" if the server needs no key.

    Compares with every key, each time in constant time, so that the delay does not reveal how close a guess is.

    Raises:
        InvalidApiKey: no key, or one that is not among `keys`.
    """
    if not keys:
        return ""
    scheme, _, given = (authorization or "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    raw = given.encode("latin-1")  # headers are decoded as latin-1: these are the bytes that the client sent
    matches = [key for key in keys if hmac.compare_digest(_digest(key.encode()), _digest(raw))]
    if not matches:
        seen = "Incorrect API key provided." if given else "You didn't provide an API key."
        raise InvalidApiKey(f"{seen} Send it as 'Authorization: Bearer KEY'.", code="invalid_api_key")
    return matches[0]


def cache_salt(key: str) -> str:
    """A salt that separates the cached prefixes of different API keys. It does not reveal the key."""
    return _digest(key.encode()).hex()[:16] if key else ""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is larger than the {max_bytes} bytes this server accepts.")


def _shape_error(error: ValidationError, value: dict[str, Any]) -> InvalidRequest:
    """The deepest of pydantic's errors in the first wrong field: in a union, that is the branch the client meant."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]["loc"][:1]
    chosen = max(
        (entry for entry in errors if entry["loc"][:1] == first), key=lambda entry: len(_path(entry["loc"], value))
    )
    path = _path(chosen["loc"], value)
    if chosen["type"] == "missing":
        path = [*path, chosen["loc"][-1]] if path[-1:] != [chosen["loc"][-1]] else path
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:80]}" for part in path).lstrip(".")
    if chosen["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return InvalidRequest(f"Invalid type for '{param}': {chosen['msg']}.", param=param, code="invalid_type")


def _path(loc: tuple[int | str, ...], value: Any) -> list[int | str]:
    """The parts of `loc` that exist in the client's value; pydantic also puts names of union branches into it."""
    path: list[int | str] = []
    for part in loc:
        in_object = isinstance(value, dict) and part in value
        in_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if in_object or in_list:
            value = value[part]
            path.append(part)
    return path
