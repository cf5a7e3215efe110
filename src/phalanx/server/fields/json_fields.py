"""Reads a JSON object field by field, in short calls whatever a client sends.

A call of the JSON library holds the interpreter's lock, and with it the event loop and every stream. So the first pass
only finds where each field begins and ends, at a nanosecond or two per byte. Then each field is checked by its size and
converted by itself; the first error ends the work. The bodies are those of `requests/body_parsing.py` and `dialects/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, defstruct
from msgspec.structs import astuple, fields

from phalanx.errors import InvalidRequest
from phalanx.server.fields.openai_bodies import Body, HistoryBody, TolerantBody
from phalanx.server.fields.refusals import MAX_DEPTH, ONLY_TEXT, check_depth, foreign_type, unsupported

FIELD_BYTES = 1 << 16  # of a field without a reader of its own; the worst content of this size takes 3 ms
VARIABLES_BYTES = 1 << 18  # of chat_template_kwargs, which may hold documents, or of a call's arguments; at worst 10 ms
TOOLS_BYTES = 1 << 20  # of all tools; a large tool server's have 100 KB
SCHEMA_BYTES = 1 << 17  # of a JSON schema; OpenAI takes 120,000 characters of names and values
MANY_NAMES = 1 << 18  # colons, an upper bound of names, up to which one call finds an object's fields, in 25 ms
MAX_STRANGE = 1 << 16  # colons outside known fields; looking for the fields there takes 20 ms
CONTENT = {
    name: b'"%b"' % name.encode()
    for name in "image_url input_audio file file_data file_url images audio audio_url video_url".split()
}
"""Fields with content that no model here can read, plain and in JSON. Ignoring them would change the question."""
HAS_VALUE = re.compile(rb'\s*+:\s*+(?!null|""|\[\s*+\]|\{\s*+\})')
"""Follows the name of a field that is neither null nor empty."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")
Reader = Callable[[bytes, str], Any]
"""(JSON of a field, name of the field) -> value."""
Readers = Mapping[tuple[type, str], Reader]
"""(Struct that declares a field, name of the field) -> its reader; other fields are small."""


def read_object(data: bytes, kind: type[B], path: str, readers: Readers) -> B:
    """A JSON object as `kind`. null counts as absent.

    Raises:
        InvalidRequest: it is not a JSON object, or has a field that is missing, too large or of a wrong type; that is
            unknown or repeated, unless `kind` is tolerant; or that is unknown and holds content in a conversation.
    """
    raw = _raw_fields(data, kind, path)
    if issubclass(kind, HistoryBody):
        _refuse_content(data, raw, path)
    elif not issubclass(kind, TolerantBody):
        _refuse_strange(data, raw, path)
    values: dict[str, Any] = {}
    for name, type, required in _fields(kind):
        where = f"{path}.{name}" if path else name
        if raw.get(name, b"null") != b"null":
            reader = next((readers[owner, name] for owner in kind.__mro__ if (owner, name) in readers), None)
            values[name] = _small(raw[name], type, where) if reader is None else reader(raw[name], where)
        elif required:
            code = "missing_required_parameter"
            raise InvalidRequest(f"Missing required parameter: '{where}'.", param=where, code=code)
    return kind(**values)


def _raw_fields(data: bytes, kind: type[Body], path: str) -> dict[str, bytes]:
    """The JSON of each field; of a repeated one, the last."""
    names = kind.__struct_fields__
    # A repeated name costs 30 ns more with all fields at once than with one.
    groups = [names] if _colons(data) <= MANY_NAMES else [(name,) for name in names]
    raw: dict[str, bytes] = {}
    for group in groups:
        found = decode(data, _raw_struct(group), path)
        raw |= {name: value for name in group if (value := bytes(getattr(found, name)))}
    return raw


def _small(data: bytes, type: Any, path: str) -> Any:
    """A field without a reader of its own."""
    return at_most(FIELD_BYTES, lambda data, path: decode(data, type, path))(data, path)


def _refuse_strange(data: bytes, raw: Mapping[str, bytes], path: str) -> None:
    """Refuse unknown fields, unless null, and repeated fields."""
    strange = _strange(data, raw)
    if strange == 0:
        return
    for name, value in _everything(data, strange, path).items():
        if name not in raw and value != b"null":
            field = f"{path}.{name[:80]}" if path else name[:80]
            raise InvalidRequest(f"Unrecognized request argument supplied: {field}", param=field)


def _refuse_content(data: bytes, raw: Mapping[str, bytes], path: str) -> None:
    """Refuse unknown fields that hold content, at any depth, and repeated fields."""
    strange = _strange(data, raw)
    if strange == 0 or (strange > MAX_STRANGE and not any(quoted in data for quoted in CONTENT.values())):
        return
    for name, value in _everything(data, strange, path).items():
        if name in raw:
            continue
        if name in CONTENT and HAS_VALUE.match(b":" + value):
            raise unsupported(f"{path}.{name}", ONLY_TEXT)
        inner = next((one for one, quoted in CONTENT.items() if _has(quoted, value)), None)
        if inner is not None:
            raise unsupported(f"{path}.{name[:80]}", f"it has {inner}; {ONLY_TEXT}")


def _has(quoted: bytes, data: bytes) -> bool:
    """Whether the JSON has a field of this name anywhere that is neither null nor empty."""
    at = data.find(quoted)
    while at >= 0:
        at += len(quoted)
        if HAS_VALUE.match(data, at):
            return True
        at = data.find(quoted, at)
    return False


def _strange(data: bytes, raw: Mapping[str, bytes]) -> int:
    """Colons outside of known fields.

    An object without unknown or repeated fields has one colon for each known field outside their values. Counting is
    cheap even if there are millions.
    """
    return _colons(data) - sum(1 + _colons(value) for value in raw.values())


def _everything(data: bytes, strange: int, path: str) -> dict[str, bytes]:
    """The JSON of all fields, known or not.

    Raises:
        InvalidRequest: there are too many unknown ones, or one is repeated.
    """
    where = path or "The JSON body"
    if strange > MAX_STRANGE:
        message = f"{where} has {strange} names that are unknown or there more than once."
        raise InvalidRequest(message, param=path or None)
    found: dict[str, Raw] = decode(data, dict[str, Raw], path)
    everything = {name: bytes(value) for name, value in found.items()}
    if _colons(data) != sum(1 + name.count(":") + _colons(value) for name, value in everything.items()):
        raise InvalidRequest(f"{where} has a field twice.", param=path or None)
    return everything


def _colons(data: bytes) -> int:
    return data.count(b":")


# -- readers ---------------------------------------------------------------------------------------------------------


def read_text(data: bytes, path: str) -> str:
    """A text of any length."""
    text: str = decode(data, str, path)
    return text


def read_dict(data: bytes, path: str) -> dict[str, Any]:
    """An object of any fields."""
    found: dict[str, Any] = decode(data, dict[str, Any], path)
    return found


def at_most(n_bytes: int, reader: Reader) -> Reader:
    """Reads a value of at most so many bytes."""

    def read(data: bytes, path: str) -> Any:
        if len(data) > n_bytes:
            raise InvalidRequest(f"{path} has {len(data)} bytes; at most {n_bytes} are allowed.", param=path)
        return reader(data, path)

    return read


read_variables: Reader = at_most(VARIABLES_BYTES, read_dict)
"""An object of any fields, of limited size."""


def read_arguments(data: bytes, path: str) -> str | dict[str, Any]:
    """The arguments of a call, which most clients send as the text of a JSON object."""
    if data[:1] != b'"':
        variables: dict[str, Any] = read_variables(data, path)
        return variables
    text = read_text(data, path)
    if len(text) > VARIABLES_BYTES:
        raise InvalidRequest(f"{path} has {len(text)} characters; at most {VARIABLES_BYTES} are allowed.", param=path)
    return text


def unread(data: bytes, path: str) -> bool:
    """A value that is refused or ignored, whatever it is."""
    return True


def unread_list(data: bytes, path: str) -> list[None]:
    """A list that matters only in being empty or not."""
    if data[:1] != b"[":
        decode(data, list[None], path)  # raises
    return [] if re.fullmatch(rb"\[\s*\]", data) else [None]


def object_of(kind: type[Body], readers: Readers) -> Reader:
    """Reads an object of known fields, for the names of its unknown ones."""
    return lambda data, path: read_object(data, kind, path, readers)


def list_by(reader: Callable[[bytes, str], T], most: int) -> Callable[[bytes, str], list[T]]:
    """Reads a list of at most so many items."""
    return lambda data, path: [reader(item, f"{path}[{i}]") for i, item in enumerate(read_items(data, most, path))]


def list_of(kind: type[Body], most: int, readers: Readers) -> Reader:
    """Reads a list of at most so many objects."""
    return list_by(object_of(kind, readers), most)


class _Typed(TolerantBody):
    """An object whose type alone is read."""

    type: str | None = None


def _type_of(data: bytes, path: str) -> str | None:
    return read_object(data, _Typed, path, {}).type


def of_type(kind: type[B], types: Collection[str], detail: str, readers: Readers) -> Callable[[bytes, str], B]:
    """Reads an object of one of these types. Another type is refused by its name, not by its fields."""

    def read(data: bytes, path: str) -> B:
        try:
            return read_object(data, kind, path, readers)
        except InvalidRequest as error:
            found = _type_of(data, path)
            raise error if found is None or found in types else foreign_type(path, found, detail) from None

    return read


def object_or_record(kind: type[B], records: Collection[str], readers: Readers) -> Callable[[bytes, str], B]:
    """Reads an object; if its type is among `records`, only the type."""

    def read(data: bytes, path: str) -> B:
        found = _type_of(data, path)
        return kind(type=found) if found in records else read_object(data, kind, path, readers)

    return read


def text_or(reader: Reader) -> Reader:
    """Reads a text, or a value of `reader`."""
    return lambda data, path: read_text(data, path) if data[:1] == b'"' else reader(data, path)


# -- the JSON library ----------------------------------------------------------------------------------------------


def decode(data: bytes, type: Any, path: str, *, first: int = 0) -> Any:
    """Convert JSON.

    Args:
        first: added to the index of a list's wrong item in the error.
    """
    try:
        value = _decoder(type).decode(data)
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$")
        place = re.sub(r"^\[(\d+)\]", lambda match: f"[{int(match[1]) + first}]", place.rstrip("`"))
        param = f"{path}{place}".lstrip(".")
        if not param:
            raise InvalidRequest("The JSON body must be an object.") from error
        raise InvalidRequest(f"Invalid type for '{param}': {wrong}.", param=param, code="invalid_type") from error
    except RecursionError as error:
        raise InvalidRequest("The JSON body is nested too deeply.", param=path or None) from error
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError
        if not data.strip():
            raise InvalidRequest("The body is empty; send a JSON object.") from error
        message = f"We could not parse the JSON body of your request: {error}"
        raise InvalidRequest(message, param=path or None) from error
    if isinstance(value, (dict, list)) and data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        check_depth(path, value)
    return value


def read_items(data: bytes, most: int, path: str) -> list[bytes]:
    """The JSON of each item of a list. Stops at item `most + 1`."""
    if data[:1] != b"[":
        decode(data, list[Any], path)  # raises
    try:
        found = _decoder(_raw_list(most)).decode(data)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path} has more than {most} items.", param=path) from error
    return list(takewhile(bool, map(bytes, astuple(found))))


@lru_cache(maxsize=256)
def _decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type)


@lru_cache(maxsize=64)
def _fields(kind: type[Body]) -> list[tuple[str, Any, bool]]:
    """Name, type and whether it is required, of each field."""
    return [(field.name, field.type, field.required) for field in fields(kind)]


@lru_cache(maxsize=128)
def _raw_struct(names: tuple[str, ...]) -> type[Struct]:
    """A struct with these fields, each as its JSON in the body; empty for an absent field."""
    return defstruct("RawFields", [(name, Raw, Raw()) for name in names])


@lru_cache(maxsize=16)
def _raw_list(most: int) -> type[Struct]:
    """A list of at most so many items as a struct, which unlike `list` refuses the next item without reading it."""
    items = [(f"item{i}", Raw, Raw()) for i in range(most)]
    return defstruct(f"AtMost{most}", items, array_like=True, forbid_unknown_fields=True)
