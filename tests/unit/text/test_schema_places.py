"""The parts of a schema, and the smallest one that is refused for a reason."""

from __future__ import annotations

import pytest

from phalanx.text.schema_places import MAX_TRIED, place_of, with_parts

BAD = {"bad": True}


def refuses(schema) -> str:
    """A compiler that knows references to definitions, and refuses `bad` wherever it stands."""

    seen: set[str] = set()

    def has_bad(part) -> bool:
        if isinstance(part, list):
            return any(map(has_bad, part))
        if not isinstance(part, dict):
            return False
        target = part.get("$ref", "").removeprefix("#/$defs/")
        inner = [value for key, value in part.items() if key not in ("$defs", "$ref")]
        if target and target not in seen:
            seen.add(target)
            inner.append(schema["$defs"][target])
        return "bad" in part or any(map(has_bad, inner))

    return "it is bad" if has_bad(schema) else ""


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (BAD, []),
        ({"properties": {"a": {}, "b": BAD}}, ["properties", "b"]),
        ({"items": {"anyOf": [{}, {"not": BAD}]}}, ["items", "anyOf", "1", "not"]),
        ({"items": [{}, BAD]}, ["items", "1"]),
        ({"properties": {"items": {"items": BAD}}}, ["properties", "items", "items"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"items": BAD}}}, ["$defs", "A", "items"]),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"$ref": "#/$defs/B"}, "B": BAD}}, ["$defs", "B"]),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"items": {"$ref": "#/$defs/A"}, "not": BAD}}}, ["$defs", "A", "not"]),
    ],
)
def test_the_smallest_part(schema, place):
    assert place_of(schema, "it is bad", refuses) == place


def test_another_reason_is_no_place():
    assert place_of({"items": BAD}, "it is worse", refuses) == []


def test_the_search_ends():
    schema = {"properties": {f"p{i}": {} for i in range(2 * MAX_TRIED)} | {"last": BAD}}
    assert place_of(schema, "it is bad", refuses) == []


def test_a_change_of_all_parts_leaves_the_schema_alone():
    schema = {"properties": {"a": {}}, "anyOf": [{}, True], "items": {}, "$defs": {"D": {}}, "enum": [{}]}
    marked = with_parts(schema, lambda part: {**part, "seen": True})
    seen = {"seen": True}
    assert marked == {
        "properties": {"a": seen},
        "anyOf": [seen, True],
        "items": seen,
        "$defs": {"D": seen},
        "enum": [{}],
    }
    assert schema == {"properties": {"a": {}}, "anyOf": [{}, True], "items": {}, "$defs": {"D": {}}, "enum": [{}]}
