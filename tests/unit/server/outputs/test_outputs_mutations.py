"""Well-formed calls, cut and mutated at random: nothing crashes, and nothing is run that was not written whole."""

from __future__ import annotations

import json
import random
import re

import pytest
from answers_of_models import ANSWERS, TOOLS, calls_of, finite, output_formats_of, read, shown_json
from support.examples import SOAK

from phalanx.server.outputs.formats import TOOLS as FORMATS
from phalanx.server.outputs.json_scanner import is_json
from phalanx.server.outputs.markup_calls import MarkupCalls
from phalanx.server.outputs.pieces import CallArguments, CallBegin, CallEnd, Piece
from phalanx.server.outputs.values import types_of

MUTANTS = 10_000 if SOAK else 600
IN_JSON = ("hermes", "llama3_json", "llama4_json", "mistral", "kimi_k2", "deepseek_v3", "deepseek_v31", "openai")
"""Formats whose arguments are sent on as the model wrote them."""
ODD = ["{", "}", '"', "]", ")", ",", ":", "<", ">", "=", "\n", " ", "\\", "x", "é", "null", "</think>", "<think>"]


def mutant(rnd: random.Random, name: str) -> str:
    """One or two answers of a format with a few cuts, doubled parts and odd insertions."""
    text = "".join(rnd.choices(ANSWERS[name], k=rnd.randint(1, 2)))
    marks = [mark for mark in FORMATS[name].texts if mark]
    for _ in range(rnd.randint(1, 3)):
        found = [match.span() for mark in marks for match in re.finditer(re.escape(mark), text)]
        start, end = sorted((rnd.randint(0, len(text)), rnd.randint(0, len(text))))
        match rnd.randrange(6):
            case 0:
                text = text[:end]
            case 1:
                text = text[:start] + text[min(end, start + rnd.randint(1, 12)) :]
            case 2 if found:  # a mark is missing
                start, end = rnd.choice(found)
                text = text[:start] + text[end:]
            case 3 if found:  # a mark is written twice
                start, end = rnd.choice(found)
                text = text[:end] + text[start:]
            case 4:
                text = text[:start] + rnd.choice([*ODD, *marks]) + text[start:]
            case _:
                text = text[:start] + text[start : start + rnd.randint(1, 30)] + text[start:]
    return text


def whole_calls(pieces: list[Piece]) -> list[tuple[str, str, str]]:
    """Name, arguments and source of each call that ended."""
    found = []
    name = arguments = ""
    for piece in pieces:
        if isinstance(piece, CallBegin):
            name, arguments = piece.name, ""
        elif isinstance(piece, CallArguments):
            arguments += piece.text
        elif isinstance(piece, CallEnd):
            found.append((name, arguments, piece.source))
    return found


def assert_written_whole(name: str, text: str, called: str, arguments: str, source: str) -> None:
    """The text has all of the call: its name, its arguments, and what ends it."""
    source = source or text  # of Gemma's calls between two marks the first one has all
    form = FORMATS[name]
    values = json.loads(arguments, parse_float=finite)
    assert isinstance(values, dict) and source in text and called in source
    if name in IN_JSON:
        as_text = re.search(r'"(arguments|parameters)"\s*:\s*("|null)', source)
        assert arguments in source or (arguments == "{}") or as_text
    if not isinstance(form, MarkupCalls) or "{" in source.partition(form.call[0])[2][:3]:
        return
    assert form.call[1] in source.partition(form.call[0])[2]
    schema = next(tool.parameters for tool in TOOLS if tool.name == called)
    for key, value in values.items():
        at = source.index(key)
        if types_of(schema.get("properties", {}).get(key), schema) == {"string"} and isinstance(value, str):
            assert value in source[at:], (key, value)


@pytest.mark.grows
@pytest.mark.parametrize("part", range(4))
def test_mutants_are_read_alike_and_run_only_if_whole(part: int) -> None:
    rnd = random.Random(part)
    n_called = n_broken = 0
    for _ in range(MUTANTS // 4):
        name = rnd.choice(sorted(ANSWERS))
        text = mutant(rnd, name)
        formats = output_formats_of(name, None if name == "openai" else rnd.choice([None, "qwen3"]))
        whole = read(formats, text)
        assert read(formats, *text) == whole, text
        cuts = sorted(rnd.randint(0, len(text)) for _ in range(rnd.randint(1, 6)))
        steps = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(formats, *steps) == whole, text  # as drafts come, several tokens at once
        pieces, detail = whole
        calls_of(pieces)
        for called, arguments, source in whole_calls(pieces):
            assert_written_whole(name, text, called, arguments, source)
            n_called += 1
        for shown in shown_json(pieces):
            assert shown and not is_json(shown) and detail, text
            n_broken += 1
    assert n_called > MUTANTS / 16 and n_broken > MUTANTS / 64


@pytest.mark.grows
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_what_a_cut_leaves_is_run_as_it_was_meant_or_not_at_all(name: str) -> None:
    """Also where text goes on after the cut, whether another call or anything else."""
    rnd = random.Random(name)
    for answer in ANSWERS[name]:
        meant = calls_of(read(output_formats_of(name), answer)[0])
        for _ in range(200 if SOAK else 20):
            cut = answer[: rnd.randint(0, len(answer))]
            for rest in ("", "\n\nOh, I forgot.", "\n" + answer):
                for called in calls_of(read(output_formats_of(name), cut + rest)[0]):
                    assert called in meant, (cut, rest, called)
