"""Answers that must match a grammar: the same tokens alone, in a batch, with drafts, preempted and resumed.

The real leader, scheduler, runner and sampler in this process, compared with mlx-lm and a new matcher for each token.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from msgspec import structs
from support.drafts import by_position
from support.examples import examples
from support.grammars import GRAMMARS, reference
from support.models import EOS, make_model
from support.speculation import SAMPLINGS, Answer, Engine, Oracle, load, random_prompts

from phalanx.errors import ModelUnsupported
from phalanx.model.runner import Runner
from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.drafters import CERTAIN, Draft, RandomDrafter
from phalanx.spec.ngram import NgramDrafter
from phalanx.spec.running_grammars import FREE, Grammars
from phalanx.speculation_config import NgramSpeculation
from phalanx.text.grammar import GrammarCompiler
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Cancel, Sampling, SequenceRequest, StopRule, Submit

GREEDY = Sampling(temperature=0.0)
LONGEST = 60
PROMPTS = random_prompts(len(GRAMMARS) + 2, 512, longest=20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("grammars") / "llama")


@pytest.fixture(scope="module")
def loaded(path: Path) -> tuple[Runner, int]:
    return load(path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.eos_ids)


@pytest.fixture
def engine(loaded: tuple[Runner, int], compiler: GrammarCompiler) -> Callable[..., Engine]:
    return lambda **settings: Engine(*loaded, **{"compiler": compiler, **settings})


def ask(name: str, prompt: list[int], grammar: str, sampling: Sampling = GREEDY, **more) -> SequenceRequest:
    stop = StopRule(**{"max_tokens": LONGEST, "stop_ids": frozenset({EOS}), **more.pop("stop", {})})
    return SequenceRequest(id=name, group=name, prompt=prompt, sampling=sampling, stop=stop, grammar=grammar, **more)


def run(engine: Engine, *requests: SequenceRequest) -> dict[str, Answer]:
    """All answers. The leader waits for matchers as it does for messages, without a step."""
    for request in requests:
        engine.post.answers[request.id] = Answer([*request.committed])
        engine.take(Submit(request))
    settle(engine)
    while not engine.scheduler.idle:
        engine.step()
    return {request.id: engine.post.answers[request.id] for request in requests}


def settle(engine: Engine) -> None:
    """Wait until all matchers are made."""
    for row in engine.grammars._rows.values():
        row.making.exception()


def requests(sampling: Callable[[int], Sampling] = lambda i: GREEDY) -> list[SequenceRequest]:
    """One of each grammar, and two without."""
    named = {**GRAMMARS, "free": "", "free too": ""}
    return [ask(name, PROMPTS[i], grammar, sampling(i)) for i, (name, grammar) in enumerate(named.items())]


def tokens(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


@pytest.fixture(scope="module")
def greedy(path: Path, loaded: tuple[Runner, int]) -> dict[str, list[int]]:
    model = loaded[0].model
    return {r.id: reference(model, path, r.prompt, r.grammar, LONGEST, EOS) for r in requests()}


DRAFTERS = {
    "right": lambda greedy: Oracle([r.prompt + greedy[r.id] for r in requests()]),
    "half right": lambda greedy: Oracle([r.prompt + greedy[r.id] for r in requests()], errors=0.3),
    "lookup": lambda greedy: NgramDrafter(NgramSpeculation(prompt_lookup_min=1)),
    "random": lambda greedy: RandomDrafter(512),
}


class TestTokens:
    """A token depends on (seed, position) and the grammar, and on nothing else."""

    def test_greedy_ones_are_mlx_lms(self, engine, greedy, tokenizer):
        assert tokens(run(engine(), *requests())) == greedy
        ended = [name for name, answer in greedy.items() if answer[-1] == EOS]
        assert {"nested", "choice", "person"} <= {*ended}
        assert json.loads(tokenizer.decode(greedy["nested"]))["order"]["lines"] == 3

    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_greedy_ones_with_drafts(self, engine, greedy, drafter):
        speculating = engine().speculate(DRAFTERS[drafter](greedy), 6)
        assert tokens(run(speculating, *requests())) == greedy
        assert speculating.stats.accepted > 20

    def test_greedy_ones_with_the_control_that_weighs_costs(self, engine, greedy):
        speculating = engine().speculate(RandomDrafter(512), 6, AdaptiveControl(6, cheap=True))
        assert tokens(run(speculating, *requests())) == greedy

    def test_sampled_ones_alone_in_a_batch_with_drafts_and_resumed(self, engine):
        asked = requests(lambda i: structs.replace(SAMPLINGS[i % len(SAMPLINGS)], logprobs=None))
        alone = {request.id: run(engine(), request)[request.id].tokens for request in asked}
        assert tokens(run(engine(), *asked)) == alone
        drafted = engine().speculate(NgramDrafter(NgramSpeculation(prompt_lookup_min=1)), 5)
        assert tokens(run(drafted, *asked)) == alone
        half = [structs.replace(r, committed=alone[r.id][: len(alone[r.id]) // 2]) for r in asked]
        assert tokens(run(engine().speculate(RandomDrafter(512), 3), *half)) == alone

    def test_preempted_ones(self, engine, greedy):
        """Two rows, and a second owner, who takes one of the first owner's."""
        first, second = (structs.replace(r, owner="one") for r in requests() if r.id in ("person", "nested"))
        third = next(structs.replace(r, owner="two") for r in requests() if r.id == "any object")
        small = engine(rows=2)
        for request in (first, second):
            small.take(Submit(request))
        settle(small)
        for _ in range(10):
            small.step()
        answers = run(small, third)
        assert small.scheduler.counters.preemptions == 1
        assert tokens(answers | small.post.answers) == {
            name: greedy[name] for name in ("person", "nested", "any object")
        }

    def test_choices_of_one_request_and_a_reused_prefix(self, engine):
        prompt = PROMPTS[3] * 3
        choices = [
            ask(f"r/{i}", prompt, GRAMMARS["person"], Sampling(temperature=1.0, seed=4, choice=i)) for i in range(4)
        ]
        alone = {choice.id: run(engine(), choice)[choice.id].tokens for choice in choices}
        together = engine()
        assert tokens(run(together, *choices)) == alone
        assert tokens(run(together, *[ask(f"s{r.id}", r.prompt, r.grammar, r.sampling) for r in choices])) == {
            f"s{name}": answer for name, answer in alone.items()
        }
        assert together.scheduler.counters.prefix_hits > 0
        assert len({tuple(answer) for answer in alone.values()}) > 1


class TestForcedDrafts:
    def test_what_a_grammar_forces_costs_no_forward_of_its_own(self, engine, greedy):
        request = ask("nested", PROMPTS[1], GRAMMARS["nested"])
        plain, drafted = engine(), engine().speculate(RandomDrafter(512), 8)
        assert run(plain, request)["nested"].tokens == greedy["nested"]
        answer = run(drafted, request)["nested"]
        assert answer.tokens == greedy["nested"]
        assert answer.finished.drafted_tokens == answer.finished.accepted_tokens > 10
        assert drafted.scheduler.counters.decode_steps <= plain.scheduler.counters.decode_steps - 10

    def test_no_drafts_where_the_request_wants_none(self, engine, greedy):
        speculating = engine().speculate(RandomDrafter(512), 8)
        answer = run(speculating, ask("nested", PROMPTS[1], GRAMMARS["nested"], max_drafts=0))["nested"]
        assert answer.tokens == greedy["nested"] and answer.finished.drafted_tokens == 0


class TestGrammars:
    """What a grammar makes of a drafter's drafts, and when a row may run ahead."""

    @pytest.fixture
    def begun(self, compiler) -> Callable[[str], Grammars]:
        def begin(regex: str) -> Grammars:
            grammars = Grammars(lambda: compiler, lambda: None)
            grammars.begin(1, ask("one", [5], LLMatcher.grammar_from_regex(regex)))
            grammars._rows[1].making.exception()
            assert not grammars.take_made() and not grammars.held
            return grammars

        return begin

    def test_drafts_are_cut_and_forced(self, begun, tokenizer):
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def constrained(grammars: Grammars, text: str, **more) -> Draft | None:
            drafts = {1: by_position(ids(text)), 2: by_position(ids("ZZ"))}
            found = grammars.constrain(drafts, {1: 9, 2: 9, **more}, force=True)
            assert found.pop(2) == drafts[2], "a row without a grammar keeps its draft"
            return found.get(1)

        free = begun("[A-F]+X")
        assert constrained(free, "ABCZA") == Draft(ids("ABC"), [0, 1, 2])
        assert constrained(free, "ZAB") is None
        assert constrained(free, "ABX") == Draft(ids("ABX"), [0, 1, 2])
        forced = begun("KLM[A-F]+")
        assert constrained(forced, "ZZZ") == Draft(ids("KLM"), [CERTAIN] * 3)
        assert constrained(forced, "KLMABZ") == Draft(ids("KLMAB"), [CERTAIN] * 3 + [3, 4])
        assert constrained(forced, "KL") == Draft(ids("KLM"), [CERTAIN] * 3)
        cut = forced.constrain({}, {1: 2}, force=True)
        assert cut == {1: Draft(ids("KL"), [CERTAIN] * 2)}
        assert forced.constrain({}, {1: 9}, force=False) == {} == forced.constrain({}, {1: 0}, force=True)
        assert forced.forces({1}) and not forced.forces({2}) and not free.forces({1})

    def test_drafts_of_tokens_that_a_grammar_names(self, compiler):
        """llguidance 1.9 does not take such a token back (its pull request 364)."""
        named = [300, 301]
        lark = f"start: /[A-F]*/ <[{named[0]}]> inner\ninner: <[{named[1]}]> /[K-M]+/"
        grammars = Grammars(lambda: compiler, lambda: None)
        grammars.begin(1, ask("one", [5], LLMatcher.grammar_from_lark(lark)))
        grammars._rows[1].making.exception()
        assert not grammars.take_made()
        for tokens in ([named[0]], [named[1]]):
            grammars.forces({1})
            once = grammars.masks({1: tokens})[1].copy()
            assert (grammars.masks({1: tokens})[1] == once).all()
            grammars.advance(1, tokens)
            assert not grammars._error(1)

    def test_what_has_ended_is_not_compiled(self, compiler):
        """A client that asks and leaves, again and again, must not fill the queue before others' grammars."""
        asked, go_on = threading.Event(), threading.Event()

        def load() -> GrammarCompiler:
            asked.set()
            go_on.wait()
            return compiler

        grammars = Grammars(load, lambda: None)
        for number in (1, 2, 3):
            grammars.begin(number, ask("one", [5], LLMatcher.grammar_from_regex("A+")))
        making = {number: row.making for number, row in grammars._rows.items()}
        asked.wait()
        grammars.keep({3})
        assert set(grammars.held) == {3}
        go_on.set()
        assert making[3].result() is not None
        assert making[2].cancelled() and not making[1].cancelled()
        assert not grammars.take_made() and not grammars.held

    def test_the_compiler_is_loaded_ahead_of_the_first_grammar(self, tokenizer):
        prepared, loaded = threading.Event(), []

        class Prepared(GrammarCompiler):
            def prepare(self) -> None:
                super().prepare()
                prepared.set()

        def load() -> GrammarCompiler:
            loaded.append(Prepared(tokenizer, tokenizer.eos_ids))
            return loaded[-1]

        grammars = Grammars(load, lambda: None)
        grammars.prepare()
        assert prepared.wait(60)
        grammars.begin(1, ask("one", [5], LLMatcher.grammar_from_regex("A+")))
        assert grammars._rows[1].making.result() is not None and len(loaded) == 1

    def test_a_compiler_that_cannot_be_loaded_is_said_with_the_first_grammar(self):
        def load() -> GrammarCompiler:
            raise ModelUnsupported("it has no tokenizer")

        grammars = Grammars(load, lambda: None)
        grammars.prepare()
        grammars.begin(1, ask("one", [5], LLMatcher.grammar_from_regex("A+")))
        assert isinstance(grammars._rows[1].making.exception(), ModelUnsupported)
        assert grammars.take_made() == {1: "it has no tokenizer"}

    def test_a_row_runs_ahead_while_nothing_is_forced(self, begun, tokenizer):
        (a, k) = tokenizer.encode("AK", add_special_tokens=False)
        grammars = begun(f"[A-F]{{{FREE + 2}}}K[A-F]+")
        ahead = []
        for token in [a] * (FREE + 2) + [k, a, a]:
            grammars.masks({1: []})
            ahead.append(grammars.may_run_ahead(1))
            grammars.advance(1, [token])
        assert ahead == [False] * FREE + [True] * 2 + [False] * 3
        assert grammars.may_run_ahead(2)


class TestNothingLeft:
    """What leaves a row no token ends the row, with a reason, and no other."""

    def asked(self, grammar: str, **more) -> list[SequenceRequest]:
        return [ask("bad", PROMPTS[0], grammar, **more), *requests()]

    @pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS[:4]], ids=str)
    @pytest.mark.parametrize("drafts", [False, True])
    def test_a_token_that_cannot_be_drawn(self, engine, greedy, tokenizer, sampling, drafts):
        """The bias takes the one token that the grammar allows after "ab"."""
        (z,) = tokenizer.encode("Z", add_special_tokens=False)
        sampling = structs.replace(sampling, logit_bias={z: -math.inf})
        ran = engine().speculate(RandomDrafter(512), 6) if drafts else engine()
        answers = run(ran, *self.asked(LLMatcher.grammar_from_regex("ABZ+C"), sampling=sampling))
        bad = answers.pop("bad")
        assert tokenizer.decode(bad.tokens) == "AB"
        assert (bad.finished.reason, bad.finished.n_tokens) == ("length", len(bad.tokens))
        assert "allows no token" in bad.finished.detail
        assert tokens(answers) == greedy

    def test_the_first_token(self, engine, greedy, tokenizer):
        (a,) = tokenizer.encode("A", add_special_tokens=False)
        sampling = Sampling(logit_bias={a: -math.inf})
        answers = run(engine(), *self.asked(LLMatcher.grammar_from_regex("A"), sampling=sampling))
        bad = answers.pop("bad")
        assert bad.tokens == [] and bad.finished.reason == "length"
        assert tokens(answers) == greedy

    def test_a_matcher_that_fails_while_it_runs(self, engine, greedy, tokenizer, monkeypatch):
        """The ways to read what was written become more than the limits allow."""
        limits = LLParserLimits(max_items_in_row=40, verbose_errors=False)
        monkeypatch.setattr("phalanx.text.grammar.LIMITS", limits)
        compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids)
        grammar = LLMatcher.grammar_from_lark('start: a\na: a a | "XY"')
        for ran in (engine(compiler=compiler), engine(compiler=compiler).speculate(RandomDrafter(512), 6)):
            answers = run(ran, *self.asked(grammar, sampling=Sampling(temperature=0.0, logit_bias={EOS: -100.0})))
            bad = answers.pop("bad")
            assert len(bad.tokens) > 4 and re.fullmatch("(XY)+X?", tokenizer.decode(bad.tokens))
            assert bad.finished.reason == "length" and "40" in bad.finished.detail
            assert tokens(answers) == greedy

    def test_min_tokens_yields_to_a_forced_end(self, engine, tokenizer, greedy):
        """It bans the end while the grammar allows more, and no longer."""
        regex = LLMatcher.grammar_from_regex("[A-F]{2,5}")
        for ran in (engine(), engine().speculate(RandomDrafter(512), 4)):
            answers = run(ran, *self.asked(regex, stop={"min_tokens": 30}))
            bad = answers.pop("bad")
            assert re.fullmatch("[A-F]{5}", tokenizer.decode(bad.tokens[:-1]))
            assert (bad.tokens[-1], bad.finished.reason, bad.finished.stop_id) == (EOS, "stop", EOS)
            assert tokens(answers) == greedy

    def test_a_bias_against_what_is_forced(self, engine, greedy, tokenizer):
        (b,) = tokenizer.encode("B", add_special_tokens=False)
        sampling = Sampling(temperature=0.0, logit_bias={b: -100.0, EOS: -100.0}, repetition_penalty=1.5)
        bad = run(engine(), ask("bad", PROMPTS[0], LLMatcher.grammar_from_regex("ABBBB"), sampling))["bad"]
        assert tokenizer.decode(bad.tokens[:-1]) == "ABBBB" and bad.finished.reason == "stop"

    def test_a_tokenizer_without_an_end(self, engine, tokenizer):
        endless = GrammarCompiler(tokenizer, frozenset())
        bad = run(engine(compiler=endless), ask("bad", PROMPTS[0], LLMatcher.grammar_from_regex("AB"), stop={}))["bad"]
        assert tokenizer.decode(bad.tokens) == "AB"
        assert (bad.finished.reason, bad.finished.detail) == ("stop", "")


class TestWaiting:
    """A sequence gets no row before its matcher is made; others run meanwhile."""

    class Gate(GrammarCompiler):
        opened = threading.Event()

        def matcher(self, grammar):
            assert self.opened.wait(60)
            return super().matcher(grammar)

    def test_others_run_meanwhile(self, engine, tokenizer, greedy):
        gate = self.Gate(tokenizer, tokenizer.eos_ids)
        ran = engine(compiler=gate)
        constrained, free, leaving = (
            ask("nested", PROMPTS[1], GRAMMARS["nested"]),
            next(r for r in requests() if r.id == "free"),
            ask("leaving", PROMPTS[1], GRAMMARS["person"]),
        )
        for request in (constrained, free, leaving):
            ran.take(Submit(request))
        while "free" in ran.scheduler.by_id:
            ran.step()
        ran.step()
        assert ran.post.answers["free"].tokens == greedy["free"]
        assert ran.leader._is_idle and not ran.scheduler.idle
        assert ran.scheduler.n_running == 0
        ran.take(Cancel("leaving"))
        self.Gate.opened.set()
        settle(ran)
        while not ran.scheduler.idle:
            ran.step()
        assert ran.post.answers["nested"].tokens == greedy["nested"]
        assert ran.post.answers["leaving"].finished.reason == "cancelled"

    def test_a_grammar_that_does_not_compile_ends_its_sequence(self, engine, greedy):
        free = next(r for r in requests() if r.id == "free")
        answers = run(engine(), ask("bad", PROMPTS[0], LLMatcher.grammar_from_regex("(")), free)
        assert (answers["bad"].tokens, answers["bad"].finished.reason) == ([], "error")
        assert "regex" in answers["bad"].finished.detail
        assert answers["free"].tokens == greedy["free"]

    def test_tokens_that_the_grammar_does_not_allow(self, engine):
        answer = run(engine(), ask("bad", PROMPTS[0], GRAMMARS["choice"], committed=[5, 6]))["bad"]
        assert answer.finished.reason == "error" and "tokens so far" in answer.finished.detail


ALPHABET = "ABCab{}"


def expressions() -> st.SearchStrategy[str]:
    letters = st.sampled_from(ALPHABET).map(re.escape)
    return st.recursive(
        letters,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            st.tuples(inner, st.integers(0, 2), st.integers(2, 4)).map(lambda t: f"({t[0]}){{{t[1]},{t[2]}}}"),
        ),
        max_leaves=12,
    )


@examples(12, soak=400)
@given(regex=expressions(), seed=st.integers(0, 1000), least=st.sampled_from([0, 3, 40]), k=st.integers(1, 8))
def test_any_expression_with_any_drafts(loaded, compiler, tokenizer, regex, seed, least, k):
    grammar = LLMatcher.grammar_from_regex(regex)
    sampling = Sampling(temperature=1.0, seed=seed)
    request = ask("one", PROMPTS[seed % len(PROMPTS)], grammar, sampling, stop={"min_tokens": least})
    plain = run(Engine(*loaded, compiler=compiler), request)["one"]
    rnd = random.Random(seed)
    oracle = Oracle([request.prompt + plain.tokens], errors=rnd.choice((0.0, 0.3, 1.0)))
    drafted = run(Engine(*loaded, compiler=compiler).speculate(oracle, k), request)["one"]
    assert drafted.tokens == plain.tokens
    assert (drafted.finished.reason, drafted.finished.detail) == (plain.finished.reason, plain.finished.detail)
    if plain.finished.reason == "stop":
        assert re.fullmatch(regex, tokenizer.decode(plain.tokens[:-1]))
    else:
        assert len(plain.tokens) == LONGEST
