"""Whoever drafts, and however much: the tokens are those without speculation (A2, A3, A7; design: Keyed sampling).

The real leader, scheduler, runner and sampler in this process. Every combination is tried by `make soak`; CI runs a
set in which every drafter meets five values of k, every family and every number of rows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.models import make_model
from support.mutants import NoRollback
from support.speculation import (
    Answer,
    Engine,
    Job,
    Oracle,
    demo_prompts,
    differences,
    load,
    make_jobs,
    random_prompts,
    with_noise,
)

from phalanx.demo import MODEL_DIR
from phalanx.errors import PhalanxError
from phalanx.memory import process_rss
from phalanx.model.runner import Runner
from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.sched.commit import accept
from phalanx.sched.sequence import Sequence
from phalanx.spec import sampling_metadata, verify
from phalanx.spec.adaptive import AdaptiveControl
from phalanx.spec.draft_model import DraftModel
from phalanx.spec.drafters import Drafter, RandomDrafter
from phalanx.spec.ngram import NgramDrafter
from phalanx.spec.rules import Always
from phalanx.spec.suffix import SuffixDrafter
from phalanx.speculation_config import NgramSpeculation, SuffixSpeculation
from phalanx.types import Sampling, SequenceRequest, StopRule, Submit

FAMILIES = ["llama", "qwen3", "deepseek_v3", "gpt_oss", "demo"]
DRAFTERS = ["ngram", "suffix", "draft model", "hostile", "oracle", "erring oracle"]
MANY = 8
ROWS = [1, 4, MANY]
KS = range(1, 9)
LONG, USUAL, FEW = 270, 60, 32
"""Tokens: of what crosses 256 positions, where a row's memory grows; of the first row where others end by 73; of the
demo model, which is a hundred times larger than the random ones."""
LONGEST = 520
"""Of what crosses 512 as well."""
GREEDY = Sampling(temperature=0.0)
KV = 1 << 27

GRID = list(product(DRAFTERS, KS, FAMILIES, [1, 4, 16]))
FEW_KS = [1, 2, 3, 5, 8]
SMALL = [
    (drafter, k, FAMILIES[(d + i) % len(FAMILIES)], ROWS[(d + 2 * i) % len(ROWS)])
    for d, drafter in enumerate(DRAFTERS)
    for i, k in enumerate(FEW_KS)
]


class Bench:
    """Models and undisturbed answers, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runners: dict[str, tuple[Runner, int]] = {}
        self._plain: dict[Any, dict[str, Answer]] = {}

    def path(self, family: str) -> Path:
        path = MODEL_DIR if family == "demo" else self._folder / family
        if not path.exists():
            make_model(family, path, num_hidden_layers=2)
        return path

    def runner(self, family: str) -> tuple[Runner, int]:
        if family not in self._runners:
            self._runners[family] = load(self.path(family))
        return self._runners[family]

    def engine(self, family: str, rows: int) -> Engine:
        runner, vocab = self.runner(family)
        return Engine(runner, vocab, rows=rows)

    def draft_model(self, family: str, engine: Engine) -> DraftModel:
        """One that is right now and then: the family's model with noise on its weights."""
        name = f"{family}-disturbed"
        if name not in self._runners:
            self._runners[name] = load(with_noise(self.path(family), self._folder / name, 0.02))
        return DraftModel(self._runners[name][0], engine.vocab, KV, engine.place)

    def plain(self, family: str, rows: int, longest: int, greedy: bool = True) -> tuple[list[Job], dict[str, Answer]]:
        """Jobs, and their answers without speculation: computed once for all numbers of rows and all lengths."""
        n_prompts, most = (2, longest) if family == "demo" else (max(rows, MANY), max(longest, LONG if greedy else 0))
        prompts = demo_prompts(n_prompts) if family == "demo" else random_prompts(n_prompts, self.runner(family)[1])
        key = (family, n_prompts, most, greedy)
        if key not in self._plain:
            self._plain[key] = self.engine(family, n_prompts).run(make_jobs(prompts, longest=most, greedy=greedy))
        jobs = make_jobs(prompts, longest=longest, greedy=greedy)[:rows]
        lengths = {job.request.id: job.request.stop.max_tokens for job in jobs}
        answers = self._plain[key]
        return jobs, {name: Answer(answers[name].tokens[:n], answers[name].logprobs[:n]) for name, n in lengths.items()}

    def drafter(self, name: str, family: str, engine: Engine, jobs: list[Job], plain: dict[str, Answer]) -> Drafter:
        whole = [job.request.prompt + plain[job.request.id].tokens for job in jobs]
        match name:
            case "ngram":
                return NgramDrafter(NgramSpeculation())
            case "suffix":
                return SuffixDrafter(SuffixSpeculation())
            case "draft model":
                return self.draft_model(family, engine)
            case "hostile":
                return RandomDrafter(engine.vocab)
            case "oracle":
                return Oracle(whole)
            case _:
                return Oracle(whole, errors=0.3, vocab=engine.vocab)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(tmp_path_factory.mktemp("speculation"))


def check(bench: Bench, drafter: str, k: int, family: str, rows: int, longest: int, greedy: bool = True) -> None:
    jobs, plain = bench.plain(family, rows, longest, greedy)
    engine = bench.engine(family, rows)
    got = engine.speculate(bench.drafter(drafter, family, engine, jobs, plain), k).run(jobs)
    assert differences(got, plain) == []
    assert max(len(answer.tokens) for answer in plain.values()) >= longest
    assert len(set(plain["0"].tokens)) >= 8, "the model only repeats itself"
    stats = engine.stats
    assert stats.drafted or drafter in ("ngram", "suffix")
    if drafter == "oracle":
        assert stats.accepted > 0.95 * stats.drafted
    if drafter in ("draft model", "erring oracle"):
        assert 0 < stats.accepted < stats.drafted
    assert engine.scheduler.idle and not engine.metadata._next
    for number, answer in plain.items():
        assert len(got[number].logprobs) == len(answer.logprobs)
        for mine, theirs in zip(got[number].logprobs, answer.logprobs, strict=True):
            if got[number].tokens == answer.tokens:
                assert mine.token == theirs.token and abs(mine.logprob - theirs.logprob) < 1e-3


def test_the_small_grid_meets_every_pair() -> None:
    values = (DRAFTERS, FEW_KS, FAMILIES, ROWS)
    for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (1, 3)):
        met = {(entry[i], entry[j]) for entry in SMALL}
        assert met == set(product(values[i], values[j])), f"{i} with {j}: {set(product(values[i], values[j])) - met}"


@pytest.mark.parametrize(("drafter", "k", "family", "rows"), SMALL)
def test_greedy_tokens_are_the_same(bench, drafter, k, family, rows):
    """The largest k crosses 256 positions, except where it meets the demo model."""
    if family == "demo":
        check(bench, drafter, k, family, min(rows, 2), FEW)
    else:
        check(bench, drafter, k, family, rows, LONG if k == KS[-1] else USUAL)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("drafter", "k", "family", "rows"), GRID)
def test_greedy_tokens_are_the_same_everywhere(bench, drafter, k, family, rows):
    check(bench, drafter, k, family, rows, LONGEST)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drawn_tokens_are_the_same(bench, drafter):
    """Temperatures, filters, penalties, biases and bans; log-probabilities as well."""
    check(bench, drafter, 5, "llama", MANY, USUAL, greedy=False)


def test_drawn_tokens_of_a_trained_model_are_the_same(bench):
    check(bench, "draft model", 3, "demo", 2, 48, greedy=False)


def test_choices_of_one_request_draft_for_themselves(bench):
    """`n`: the same prompt, other noise."""
    prompt = random_prompts(3, 512)[2]
    stop = StopRule(max_tokens=60)
    jobs = [
        Job(SequenceRequest(id=f"r/{i}", group="r", prompt=prompt, sampling=Sampling(seed=9, choice=i), stop=stop))
        for i in range(4)
    ]
    plain = bench.engine("llama", 4).run(jobs)
    assert len({tuple(answer.tokens) for answer in plain.values()}) == 4
    engine = bench.engine("llama", 4)
    assert differences(engine.speculate(bench.draft_model("llama", engine), 4).run(jobs), plain) == []
    assert engine.stats.accepted


def test_a_draft_model_that_is_the_model_is_always_right(bench):
    """It draws with the target's noise, so it agrees at every temperature, across penalties as well."""
    jobs, plain = bench.plain("llama", MANY, USUAL, False)
    engine = bench.engine("llama", MANY)
    model = DraftModel(load(bench.path("llama"))[0], engine.vocab, KV, engine.place)
    assert differences(engine.speculate(model, 4).run(jobs), plain) == []
    assert engine.stats.accepted >= 0.99 * engine.stats.drafted


def test_a_draft_model_without_memory_for_all_drafts_for_some(bench):
    """Its rows come and go; the budget is never exceeded."""
    jobs, plain = bench.plain("llama", MANY, USUAL)
    engine = bench.engine("llama", MANY)
    runner = load(bench.path("llama"))[0]
    budget = 3 * 256 * runner.facts.bytes_per_token
    peak = 0

    class Watched(DraftModel):
        def draft(self, wanted):
            nonlocal peak
            drafts = super().draft(wanted)
            peak = max(peak, runner.kv_bytes)
            return drafts

    model = Watched(runner, engine.vocab, budget, engine.place)
    assert differences(engine.speculate(model, 3).run(jobs), plain) == []
    assert engine.stats.accepted > 0
    assert 0 < peak <= budget
    assert runner.kv_bytes == 0


@pytest.mark.parametrize("counted", [True, False])
def test_long_prompts_of_short_answers_are_not_read(bench, counted):
    """What a draft model computes is bounded by what is known to pay: at first nothing (A8)."""

    class Watched(DraftModel):
        n_read = 0

        def read(self, tokens):
            done = super().read(tokens)
            self.n_read += done
            return done

    def jobs() -> list[Job]:
        stop = StopRule(max_tokens=12)
        prompts = [[(7 * i + j) % 500 for j in range(400)] for i in range(5)]
        return [
            Job(SequenceRequest(id=f"{i}", group=f"{i}", prompt=prompt, sampling=GREEDY, stop=stop))
            for i, prompt in enumerate(prompts)
        ]

    plain = bench.engine("llama", 1).run(jobs())
    engine = bench.engine("llama", 1)
    model = Watched(load(bench.path("llama"))[0], engine.vocab, KV, engine.place)
    control = AdaptiveControl(4, cheap=False) if counted else Always(4)
    assert differences(engine.speculate(model, 4, control).run(jobs()), plain) == []
    assert model.n_read < 100 if counted else model.n_read >= 5 * 390


def test_a_restarted_stream_is_drafted_for_from_where_it_was(bench):
    jobs, plain = bench.plain("llama", 4, LONG)
    resumed = []
    for job in jobs:
        said = plain[job.request.id].tokens[:10][: len(plain[job.request.id].tokens) - 1]
        request = job.request
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        resumed.append(Job(SequenceRequest(**{**fields, "committed": said}), job.leaves_after, job.string_after))
    engine = bench.engine("llama", 4)
    for job in resumed:  # what the client has already
        n, answer = len(job.request.committed), plain[job.request.id]
        engine.post.answers[job.request.id] = Answer(answer.tokens[:n], answer.logprobs[:n])
    got = engine.speculate(bench.draft_model("llama", engine), 4).run(resumed)
    assert differences(got, plain) == []


# Mutants: the tests above would notice -----------------------------------------------------------------------------


def notices(bench: Bench, engine: Engine, greedy: bool) -> bool:
    jobs, plain = bench.plain("llama", MANY, USUAL, greedy)
    drafter = bench.drafter("erring oracle", "llama", engine, jobs, plain)
    try:
        return bool(differences(engine.speculate(drafter, 4).run(jobs), plain))
    except (PhalanxError, AssertionError, IndexError):
        return True


def test_one_draft_too_many_is_noticed(bench, monkeypatch):
    def generous(drafts, sampled):
        right = accept(drafts, sampled)
        n = len(right)
        return [*drafts[:n], sampled[n]] if n <= len(drafts) else right

    monkeypatch.setattr(verify, "accept", generous)
    assert notices(bench, bench.engine("llama", MANY), True)


def test_cache_that_does_not_roll_back_is_noticed(bench):
    assert notices(bench, Engine(*load(bench.path("llama"), NoRollback), rows=MANY), True)


@pytest.mark.parametrize("field", ["index", "ahead"])
def test_position_that_does_not_advance_is_noticed(bench, monkeypatch, field):
    """The noise of another position; penalties over too short a history."""
    stick(monkeypatch, field)
    assert notices(bench, bench.engine("llama", MANY), False)


@pytest.mark.parametrize("mutant", [False, True])
def test_stop_ids_are_banned_until_enough_tokens_are_there(bench, monkeypatch, mutant):
    """Drafts reach from where a stop id is banned to where it is not; banned for too long, it is noticed."""

    def request(**stop: Any) -> list[Job]:
        rule = StopRule(max_tokens=30, **stop)
        return [Job(SequenceRequest(id="a", group="a", prompt=[5, 6, 7], sampling=GREEDY, stop=rule))]

    free = bench.engine("llama", 1).run(request())["a"].tokens
    at = next(i for i in range(6, 9) if free[i] not in free[:i])
    if mutant:
        stick(monkeypatch, "banned")
    engine = bench.engine("llama", 1).speculate(Oracle([[5, 6, 7, *free]]), 8)
    got = engine.run(request(min_tokens=4, stop_ids=frozenset({free[at]})))["a"].tokens
    assert (got == free[: at + 1]) is not mutant


def stick(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    """SamplingMetadataCache behind drafts keep a field of the first one."""
    original: Callable[..., SamplingMetadata] = sampling_metadata._after

    def stuck(seq: Sequence, first: SamplingMetadata, drafts: tuple[int, ...]) -> SamplingMetadata:
        position = original(seq, first, drafts)
        setattr(position, field, getattr(first, field))
        return position

    monkeypatch.setattr(sampling_metadata, "_after", stuck)


# Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "steps"),
    [
        ("hostile", 600),
        pytest.param("hostile", 20_000, marks=pytest.mark.soak),
        pytest.param("draft model", 5000, marks=pytest.mark.soak),
    ],
)
def test_memory_is_flat_over_thousands_of_steps(bench, drafter, steps):
    """Two rows of one capacity, again and again: neither a lazy graph nor anything else grows, within or between.

    MLX's memory and Python's objects are counted; what neither knows shows in the process only if it is large.
    """
    engine = bench.engine("llama", 2)
    engine.scheduler.prefix.budget = 0
    engine.speculate(bench.drafter(drafter, "llama", engine, [], {}), 2)
    prompts = random_prompts(2, engine.vocab)
    active: list[list[int]] = []
    resident: list[int] = []
    blocks: list[int] = []
    gc.collect()  # what earlier tests left in cycles is MLX's memory too
    while engine.scheduler.step_id < steps:
        for i, prompt in enumerate(prompts):
            rule = StopRule(max_tokens=190)
            engine.take(Submit(SequenceRequest(id=f"{i}", group=f"{i}", prompt=prompt, sampling=GREEDY, stop=rule)))
        active.append([])
        while not engine.scheduler.idle:
            engine.step()
            if engine.scheduler.n_running == 2:
                active[-1].append(mx.get_active_memory())
        engine.post.answers.clear()
        resident.append(process_rss())
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    steady = [values[len(values) // 4] for values in active]
    assert max(steady) - min(steady) < 64 << 10
    assert all(abs(values[-2] - values[len(values) // 4]) < 64 << 10 for values in active)
    assert blocks[-1] - blocks[0] < 1.5 * steps  # `active` itself grows by one a step
    assert resident[-1] - resident[len(resident) // 4] < min(24 << 20, max(10 << 20, 5000 * steps))
