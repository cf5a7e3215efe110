"""Parses `response_format`, `structured_outputs` and `guided_*` into the grammar that an answer must match.

Accepts the fields of OpenAI's and vLLM's clients, at most one in a request. `grammar_checks.py` compiles the grammar,
`outputs/` adds the model's reasoning before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from phalanx.server.fields.json_schemas import bounded, check_size
from phalanx.server.fields.openai_bodies import ResponseFormatBody, SamplingBody, StructuredOutputs
from phalanx.server.fields.refusals import ANSWER_FORMATS, foreign_type, invalid, unsupported
from phalanx.server.fields.schema_numbers import check_numbers
from phalanx.server.outputs.lark import literal, pattern, schemas_in
from phalanx.server.requests.parsed import AnswerGrammar

WHITESPACE = r"[ \t]|\n[ \t]{0,24}"
"""Between two tokens of JSON: as usual on one line, or indented. A small model that may write more may never stop."""
MAX_CHOICES = 4096  # as values of an enum (`json_schemas.py`)
MAX_GRAMMAR_CHARS = 1 << 15  # of a grammar or an expression; SQL takes 5,000
JSON_OBJECT = ("json_object", "json")
"""The type of a `response_format` that is a JSON object, and TGI's name for it."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs


def parse_answer(body: SamplingBody) -> AnswerGrammar | None:
    """The grammar of the answer; None if it may be any text.

    Raises:
        InvalidRequest: a field is wrong, or several exclude each other; names it.
    """
    found = list(_all(body))
    if len(found) > 1:
        one, other = found[0].param, found[1].param
        raise invalid(other, f"{one} and {other} exclude each other; send one of them.")
    return found[0] if found else None


def _all(body: SamplingBody) -> Iterator[AnswerGrammar]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield answer_of_schema("guided_json", "guided_json", body.guided_json)
    if body.guided_regex is not None:
        yield _regex("guided_regex", "guided_regex", body.guided_regex)
    if body.guided_choice is not None:
        yield _choice("guided_choice", "guided_choice", body.guided_choice)
    if body.guided_grammar is not None:
        yield _grammar("guided_grammar", "guided_grammar", body.guided_grammar)


def _response_format(form: ResponseFormatBody) -> Iterator[AnswerGrammar]:
    param = "response_format"
    if form.type not in ("text", "json_schema", *JSON_OBJECT):
        raise foreign_type(param, form.type, ANSWER_FORMATS)
    if (form.type == "json_schema") != (form.json_schema is not None):
        what = "needs" if form.json_schema is None else "does not go with"
        raise invalid(f"{param}.json_schema", f"{param} of type {form.type} {what} json_schema.")
    schemas = {f"{param}.{name}": schema for name in ("schema", "value") if (schema := getattr(form, name)) is not None}
    if schemas and form.type not in JSON_OBJECT:
        place = next(iter(schemas))
        raise invalid(place, f"{place} goes with the type json_object, not with {form.type}.")
    if len(schemas) > 1:
        raise invalid(f"{param}.value", f"{' and '.join(schemas)} exclude each other; send one of them.")
    if form.json_schema is not None:
        yield answer_of_schema(param, f"{param}.json_schema.schema", form.json_schema.schema)
    elif form.type in JSON_OBJECT:
        place, schema = next(iter(schemas.items()), (param, {}))
        yield answer_of_schema(param, place, schema or {"type": "object"})


def _structured_outputs(form: StructuredOutputs) -> AnswerGrammar:
    param = "structured_outputs"
    kinds = [kind for kind in KINDS if getattr(form, kind) not in (None, False)]
    if len(kinds) != 1:
        sent = " and ".join(kinds) or "none of them"
        raise invalid(param, f"{param} needs exactly one of {', '.join(KINDS)}, not {sent}.")
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(form, name):
            raise unsupported(f"{param}.{name}")
    (kind,) = kinds
    place, whitespace = f"{param}.{kind}", _whitespace(form, kind)
    if form.json is not None:
        return answer_of_schema(param, place, form.json, whitespace)
    if form.regex is not None:
        return _regex(param, place, form.regex)
    if form.choice is not None:
        return _choice(param, place, form.choice)
    if form.grammar is not None:
        return _grammar(param, place, form.grammar)
    return answer_of_schema(param, place, {"type": "object"}, whitespace)


def _whitespace(form: StructuredOutputs, kind: str) -> str | None:
    """The regular expression for white space between two tokens of JSON; None: no white space."""
    named = [name for name in ("whitespace_pattern", "disable_any_whitespace") if getattr(form, name)]
    if named and not kind.startswith("json"):
        raise invalid(f"structured_outputs.{named[0]}", f"{named[0]} goes with json and json_object, not with {kind}.")
    if len(named) > 1:
        raise invalid("structured_outputs.whitespace_pattern", f"{' and '.join(named)} exclude each other.")
    return None if form.disable_any_whitespace else form.whitespace_pattern or WHITESPACE


# -- the kinds of grammars -----------------------------------------------------------------------------------------


def answer_of_schema(
    param: str, place: str, schema: dict[str, Any] | str, whitespace: str | None = WHITESPACE
) -> AnswerGrammar:
    """An answer that matches a JSON schema, which may be a text.

    Args:
        param: the field, for errors.
        place: of the schema in it, for errors.
        whitespace: regular expression for white space between two tokens of JSON; None: none.

    Raises:
        InvalidRequest: names the place.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise invalid(place, f"{place} is not the text of a JSON object: {error}") from error
    check_size(schema, place)
    check_numbers(schema, place)
    if "x-guidance" in schema:
        raise unsupported(f"{place}.x-guidance")
    spacing = {"whitespace_flexible": whitespace is not None, "whitespace_pattern": whitespace}
    return _of(param, place, {"json_schema": {**bounded(schema), "x-guidance": spacing}})


def _regex(param: str, place: str, expression: str) -> AnswerGrammar:
    _check_length(place, expression)
    return _of(param, place, {"lark_grammar": f"start: {pattern(expression)}"})


def _choice(param: str, place: str, choices: Sequence[str]) -> AnswerGrammar:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise invalid(place, f"{place} has {len(choices)} texts; from 1 to {MAX_CHOICES} are allowed.")
    if not all(choices):
        raise invalid(place, f"{place} has an empty text.")
    return _of(param, place, {"lark_grammar": f"start: {pattern('|'.join(map(literal, choices)))}"})


def _grammar(param: str, place: str, text: str) -> AnswerGrammar:
    """A Lark grammar, recognised by its start rule, or GBNF, recognised by its arrows."""
    _check_length(place, text)
    for schema in schemas_in(text):
        check_size(schema, place)
        check_numbers(schema, place, "%json")
    is_lark = any(line.lstrip().startswith(("start:", "start ", "%llguidance")) for line in text.splitlines())
    if not is_lark and "::=" in text:
        return AnswerGrammar(param=param, place=place, grammar={"lark_grammar": text}, is_gbnf=True)
    return _of(param, place, {"lark_grammar": text})


def _of(param: str, place: str, grammar: dict[str, Any]) -> AnswerGrammar:
    return AnswerGrammar(param=param, place=place, grammar=grammar)


def _check_length(place: str, text: str) -> None:
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARS:
        raise invalid(place, f"{place} has {len(text)} characters; from 1 to {MAX_GRAMMAR_CHARS} are allowed.")
