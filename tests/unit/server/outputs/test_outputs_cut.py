"""An answer's pieces do not depend on where its text is cut, and a call's source is the model's own text."""

from __future__ import annotations

import pytest
from answers_of_models import ANSWERS, CASES, IDS, calls_of, output_formats_of, read, text_of
from answers_of_models import TOOLS as TOOLS_OFFERED
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.server.outputs.formats import TOOLS
from phalanx.server.outputs.output_formats import make_parser
from phalanx.server.outputs.pieces import CallArguments, CallEnd

THINKING = "<think>\nThe user asks; <b> </th\n</think>\n\n"


@pytest.mark.parametrize(("name", "answer"), CASES, ids=IDS)
def test_cut_at_every_place(name: str, answer: str) -> None:
    formats = output_formats_of(name)
    whole = read(formats, answer)
    assert whole[1] == ""
    assert read(formats, *answer) == whole
    for i in range(1, len(answer)):
        assert read(formats, answer[:i], answer[i:]) == whole, answer[:i]


@pytest.mark.parametrize(("name", "answer"), CASES, ids=IDS)
def test_sources_are_the_models_own_text(name: str, answer: str) -> None:
    pieces, _ = read(output_formats_of(name), answer)
    sources = [piece.source for piece in pieces if isinstance(piece, CallEnd)]
    at = 0
    for source in sources:
        at = answer.index(source, at) + len(source)
    if name != "openai" and not name.startswith("llama4"):
        rest = answer
        for source in sources:
            rest = rest.replace(source, "", 1)
        assert rest.split() == text_of(pieces).split()


@examples(150, soak=3000)
@given(data=st.data())
def test_random_answers_and_cuts(data: st.DataObject) -> None:
    """Parts of answers of one format, in any order, some of them cut off or damaged, with reasoning before them."""
    name = data.draw(st.sampled_from(sorted(ANSWERS)))
    reasoning = None if name == "openai" else data.draw(st.sampled_from([None, "qwen3"]))
    answers = ANSWERS[name]
    marks = sorted(filter(None, TOOLS[name].texts))
    part = st.one_of(
        st.sampled_from(answers),
        st.builds(lambda answer, i: answer[:i], st.sampled_from(answers), st.integers(0, 200)),
        st.builds(lambda answer, i: answer[i:], st.sampled_from(answers), st.integers(0, 200)),
        st.sampled_from([THINKING, "<think>", "</think>", " \n", "{", "[", "<", *marks]),
        st.text(max_size=8),
    )
    text = "".join(data.draw(st.lists(part, max_size=5)))
    in_reasoning = data.draw(st.booleans()) and reasoning is not None
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    formats = output_formats_of(name, reasoning)
    whole = read(formats, text, in_reasoning=in_reasoning)
    assert read(formats, *parts, in_reasoning=in_reasoning) == whole
    calls_of(whole[0])


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - {"gemma4", "functiongemma"}))
def test_arguments_come_in_fragments(name: str) -> None:
    """Strings of arguments are sent on before the call ends. (Gemma's calls come whole.)"""
    parser = make_parser(output_formats_of(name), tools=TOOLS_OFFERED, in_reasoning=False, parse_tools=True)
    assert parser is not None
    answer = ANSWERS[name][0]
    pieces = [piece for char in answer for piece in parser.add(char)]
    fragments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    assert len(fragments) > 2, fragments
