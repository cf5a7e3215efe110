"""Grammars for tokenizers of every kind: what a mask allows, read back as text, matches, and every match is allowed."""

from __future__ import annotations

import itertools
import json
import random
import re
import string

import numpy as np
import pytest
from llguidance import LLMatcher
from support.grammars import PERSON, json_schema
from support.serving import make_tokenizer
from support.tokenizers_of_each_kind import BYTE_KINDS, KINDS, qwen

from phalanx.errors import GrammarRefused
from phalanx.text.grammar import GrammarCompiler
from phalanx.text.tokenizer import Tokenizer

REGEX = "(the|quick|hello)( [a-z]{1,4}){0,3}[é!]?"


@pytest.fixture(scope="module", params=[*KINDS, "qwen"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer]:
    make = {**KINDS, "qwen": qwen}[request.param]
    return request.param, Tokenizer.load(make(tmp_path_factory.mktemp("kind") / request.param))


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert not matcher.is_error(), matcher.get_error()
    return [int(token) for token in bits.nonzero()[0]]


def write(matcher: LLMatcher, ends: frozenset[int], rnd: random.Random) -> list[int]:
    """Random tokens that the masks allow, up to an end."""
    tokens: list[int] = []
    for _ in range(200):
        choice = allowed(matcher)
        token = rnd.choice([t for t in choice if t in ends] or choice if rnd.random() < 0.3 else choice)
        assert matcher.consume_token(token)
        if token in ends:
            return tokens
        tokens.append(token)
    raise AssertionError("no end")


def test_what_masks_allow_matches(kind):
    name, tokenizer = kind
    if name == "wordpiece":  # its decoder shows the marks of a text's first token
        return
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
    for seed in range(40):
        tokens = write(compiler.matcher(LLMatcher.grammar_from_regex(REGEX)), tokenizer.eos_ids, random.Random(seed))
        text = tokenizer.decode(tokens)
        assert re.fullmatch(REGEX, text), (tokens, text)


def test_what_matches_is_allowed(kind):
    """In the tokenizer's own tokens, where it can spell every text."""
    name, tokenizer = kind
    if name not in (*BYTE_KINDS, "qwen") or name == "llama2":  # llama2 puts a space before every text
        return
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
    for text in ("the", "hello brow fox!", "quick a bc defg é"):
        matcher = compiler.matcher(LLMatcher.grammar_from_regex("(.|\\n)*"))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert matcher.validate_tokens([*tokens, min(tokenizer.eos_ids)]) == len(tokens) + 1


def test_what_is_forced_is_spelled_in_tokens_that_spell_nothing_else(kind):
    """Some tokenizers put a space before a text, and all read the name of a special token as that token."""
    _, tokenizer = kind
    special = tokenizer.decode([min(tokenizer.eos_ids)], skip_special_tokens=False)
    every_text = kind[0] in (*BYTE_KINDS, "qwen")
    for forced in ("the quick brown", "lazy dog", special) if every_text else ("hello",):
        regex = LLMatcher.grammar_from_regex("(t|w)" + re.escape(forced))
        matcher = GrammarCompiler(tokenizer, tokenizer.eos_ids).matcher(regex)
        tokens = write(matcher, tokenizer.eos_ids, random.Random(1))
        spelled = b"".join(map(tokenizer.token_bytes, tokens)).decode()
        assert spelled[1:] == forced and tokenizer.special_ids.isdisjoint(tokens)


def test_a_schema(kind):
    _, tokenizer = kind
    if kind[0] not in (*BYTE_KINDS, "qwen"):
        return
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
    for seed in range(10):
        tokens = write(compiler.matcher(json_schema(PERSON)), tokenizer.eos_ids, random.Random(seed))
        assert set(json.loads(tokenizer.decode(tokens))) == set(PERSON["required"])


def test_every_end_is_allowed_where_the_grammar_may_end(kind):
    _, tokenizer = kind
    others = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    ends = {*tokenizer.eos_ids, others[-1]}
    matcher = GrammarCompiler(tokenizer, [*ends, 1 << 30]).matcher(LLMatcher.grammar_from_regex("(the)?"))
    assert ends <= {*allowed(matcher)}
    assert matcher.consume_token(others[-1]) and matcher.is_stopped() and not matcher.is_error()


def test_special_tokens_are_allowed_where_they_are_named(tmp_path):
    tokenizer = Tokenizer.load(qwen(tmp_path))
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
    (start,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    text = compiler.matcher(LLMatcher.grammar_from_regex("(.|\\n)*"))
    assert tokenizer.special_ids & {*allowed(text)} == tokenizer.eos_ids
    assert allowed(compiler.matcher(LLMatcher.grammar_from_lark('start: <|im_start|> "a"'))) == [start]


def test_matchers_of_one_grammar_are_independent(kind):
    _, tokenizer = kind
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
    one, other = (compiler.matcher(LLMatcher.grammar_from_regex(REGEX)) for _ in range(2))
    before = allowed(other)
    assert one.consume_token(before[0])
    assert allowed(other) == before


REFUSED = {
    "not a regular expression": (LLMatcher.grammar_from_regex("("), "regex"),
    "not a grammar": ('{"grammars": [{"lark_grammar": "start: missing"}]}', "missing"),
    "not JSON": ("{", "JSON|line 1"),
    "an unknown special token": (LLMatcher.grammar_from_lark("start: <|nowhere|>"), "special token"),
    "nothing can match": (json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "[Uu]nsatisfiable|length"),
    "nested too deeply": ('{"grammars":[{"json_schema":' + '{"items":' * 4000 + "{}" + "}" * 4000 + "}]}", "recursion"),
    "an expression that is nested too deeply": (LLMatcher.grammar_from_regex("(" * 9000 + "a" + ")" * 9000), "regex"),
    "too many values": (
        json_schema({"enum": [f"value number {i}" for i in range(100_000)]}),
        "too big|too large|limit",
    ),
    "too many branches": (
        json_schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(20)]}),
        "too large",
    ),
    "too many optional properties": (
        json_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}),
        "items|large|big|limit",
    ),
}


AMBIGUOUS = 'start: s\ns: s s | "=" | "-" | "#" | s "-" s'
"""Has a tree for every way to put the characters of a token together."""
PLAIN = [
    {"lark_grammar": 'start: w (" " w)*\nw: C+\nC: /[a-z]/'},
    {"json_schema": {"type": "array", "items": {"enum": list("abcdefgh")}}},
]


@pytest.fixture(scope="module")
def many_words(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Of a vocabulary of 36,000 tokens; as in others, some are long rows of one character."""
    folder = tmp_path_factory.mktemp("many words")
    make_tokenizer(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    words = ["".join(letters) for n in (2, 3) for letters in itertools.product(string.ascii_lowercase, repeat=n)]
    vocabulary = saved["model"]["vocab"]
    for word in [*words, *(f"Ġ{word}" for word in words), *(c * n for c in "=-#" for n in range(2, 65))]:
        vocabulary.setdefault(word, len(vocabulary))
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer.load(folder)
    return GrammarCompiler(tokenizer, tokenizer.eos_ids)


def test_no_mask_takes_long_over_a_large_vocabulary(many_words):
    """The steps of all clients' rows wait for it. The limit is of the work, not of the time."""
    with pytest.raises(GrammarRefused, match=r"Too many items \(limit 10000; mask\)"):
        many_words.check(json.dumps({"grammars": [{"lark_grammar": AMBIGUOUS}]}))


@pytest.mark.parametrize("grammar", PLAIN)
def test_grammars_of_single_letters_have_masks_over_a_large_vocabulary(grammar, many_words):
    matcher = many_words.matcher(json.dumps({"grammars": [grammar]}))
    write(matcher, many_words._tokenizer.eos_ids, random.Random(0))


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_the_reason(what, tmp_path):
    tokenizer = Tokenizer.load(qwen(tmp_path))
    grammar, words = REFUSED[what]
    with pytest.raises(GrammarRefused, match=words):
        GrammarCompiler(tokenizer, tokenizer.eos_ids).check(grammar)
