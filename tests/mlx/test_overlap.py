"""A rank that builds the next forward ahead, or judges sums late: the same tokens, no copies, and no wrong token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec.structs import replace
from support.models import make_model
from support.speculation import Engine, Oracle, load, make_jobs, random_prompts
from test_runner import BIG, admitted, extra_bytes, make_runner

from phalanx.dist.reduce import Reducer
from phalanx.errors import CollectiveFault, NonFiniteLogits
from phalanx.model.in_flight import InFlight
from phalanx.model.overlap import Overlap, overlap_of
from phalanx.model.runner import Runner
from phalanx.model.sampling.sampler import SamplingMetadata, TokenCounts, sample
from phalanx.sched.plan import Forward, Step
from phalanx.sched.sequence import Sequence
from phalanx.spec.rules import Always
from phalanx.types import Sampling, SequenceRequest, StopRule, Submit

FAMILIES = ["llama", "deepseek_v3", "gpt_oss", "qwen3_next"]


def test_the_rule():
    assert overlap_of(native=True, on_gpu=False) is Overlap.REPLAY
    assert overlap_of(native=False, on_gpu=True) is Overlap.BUILD
    assert overlap_of(native=False, on_gpu=False) is Overlap.NONE


def test_a_forward_built_ahead_serves_only_the_plan_that_asks_for_it_token_for_token():
    ahead = InFlight(0, 2, [3, 5], mx.array([7, 9]), mx.zeros([2, 1, 4]), [])
    plan = Forward(0, 2, (0, 1), ((7,), (9,)), (1, 1), sample=True)
    assert ahead.computes(plan, [3, 5])
    changes = ({"tokens": ((7,), (8,))}, {"tokens": ((7, 1), (9, 1))}, {"arena": 1}, {"start": 1}, {"score": True})
    others = [(replace(plan, **change), [3, 5]) for change in (*changes, {"sample": False})]
    assert not any(ahead.computes(*other) for other in [*others, (plan, [3, 6])])


class Counting(Runner):
    """Counts the forwards that were built ahead, and those of them that the next plan contained."""

    built = used = 0

    def dispatch_next(self, tokens: mx.array) -> None:
        super().dispatch_next(tokens)
        self.built += self.has_in_flight

    def forward(self, fwd: Forward, kv_len, hidden=None):
        ahead = self._in_flight
        self.used += ahead is not None and ahead.computes(fwd, kv_len)
        return super().forward(fwd, kv_len, hidden)


def runner_of(path: Path, overlap: Overlap, reducer: Reducer | None = None) -> tuple[Counting, int]:
    runner, vocab = load(path)
    return overlapping(runner, overlap, reducer), vocab


def overlapping(runner: Runner, overlap: Overlap, reducer: Reducer | None = None) -> Counting:
    """Another runner of the same model."""
    return Counting(runner.model, runner.facts, runner.dtype, reducer, overlap)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Callable[[str], tuple[Runner, int]]:
    folder = tmp_path_factory.mktemp("overlap")
    return cache(lambda family: load(make_model(family, folder / family)))


@pytest.mark.parametrize(
    ("family", "at_once", "greedy"),
    [*product(FAMILIES, [1], [True, False]), ("llama", 3, True), ("qwen3_next", 3, True)],
)
def test_the_tokens_are_those_of_a_rank_that_waits(loaded, family, at_once, greedy):
    """Greedy and seeded, with requests that end by length, stop ids, cancellation and stop strings."""
    base, vocab = loaded(family)
    jobs = make_jobs(random_prompts(5, vocab), longest=40, greedy=greedy)
    waited = Engine(overlapping(base, Overlap.NONE), vocab).run(jobs, at_once=at_once)
    runner = overlapping(base, Overlap.BUILD)
    built = Engine(runner, vocab).run(jobs, at_once=at_once)
    assert {name: answer.tokens for name, answer in built.items()} == {
        name: answer.tokens for name, answer in waited.items()
    }
    assert runner.used > (20 if greedy else 5)  # drawn with penalties, a row waits
    assert runner.built > runner.used or at_once > 1 or not greedy  # some were forgotten
    assert not runner.has_in_flight


def reading_beside_a_stream(runner: Counting, vocab: int, decode_share: float) -> tuple[Engine, Sequence]:
    """An engine that has begun to read a prompt beside a decoding row, and the prompt's row."""
    engine = Engine(runner, vocab, batched=16, decode_share=decode_share)
    stop = StopRule(max_tokens=200)
    for name, prompt in (("stream", [5, 6, 7]), ("prompt", [*range(10, 200)])):
        request = SequenceRequest(id=name, group=name, prompt=prompt, sampling=Sampling(temperature=0.0), stop=stop)
        engine.take(Submit(request))
        for _ in range(4):
            engine.step()
    row = engine.scheduler.by_id["prompt"]
    assert runner.built and row.to_prefill > 50
    return engine, row


def test_no_forward_is_begun_before_a_chunk(loaded):
    """It would be dropped."""
    base, vocab = loaded("llama")
    runner = overlapping(base, Overlap.BUILD)
    engine, row = reading_beside_a_stream(runner, vocab, decode_share=0.0)
    built, left = runner.built, row.to_prefill
    for _ in range(3):
        engine.step()
    assert runner.built == built and 0 < row.to_prefill < left
    engine.scheduler.cancel("prompt", 0.0)
    for _ in range(4):
        engine.step()
    assert runner.built > built


def test_forwards_are_begun_while_a_prompt_waits_for_its_next_chunk(loaded):
    """Decoding rows are owed more time than they will get here."""
    base, vocab = loaded("llama")
    runner = overlapping(base, Overlap.BUILD)
    engine, row = reading_beside_a_stream(runner, vocab, decode_share=0.5)
    engine.scheduler.prefill_budget.observe(16, 1e4, 0.1)
    built, left = runner.built, row.to_prefill
    for _ in range(5):
        engine.step()
    assert (row.to_prefill, runner.built) == (left, built + 5)


class InTurns(Always):
    """Six steps with drafts, then six that may overlap, and so on."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._steps = 0

    def request(self, room, unread, *, overlapped):
        self._steps += 1
        return {} if self._overlaps else super().request(room, unread, overlapped=overlapped)

    def can_overlap(self, keys: Collection[int]) -> bool:
        return self._overlaps

    @property
    def _overlaps(self) -> bool:
        return self._steps // 6 % 2 == 1


def test_steps_with_drafts_and_steps_built_ahead_take_turns(tmp_path):
    path = make_model("llama", tmp_path / "llama")
    runner, vocab = runner_of(path, Overlap.NONE)
    prompts = random_prompts(3, vocab)
    waited = Engine(runner, vocab).run(make_jobs(prompts, longest=60), at_once=1)
    runner, _ = runner_of(path, Overlap.BUILD)
    engine = Engine(runner, vocab).speculate(
        Oracle([prompt + waited[str(i)].tokens for i, prompt in enumerate(prompts)], errors=0.3), 3, InTurns(3)
    )
    built = engine.run(make_jobs(prompts, longest=60), at_once=1)
    assert {name: answer.tokens for name, answer in built.items()} == {
        name: answer.tokens for name, answer in waited.items()
    }
    assert runner.used > 5
    assert engine.stats.drafted > engine.stats.accepted > 5


def decode_ahead(runner: Runner, rows: int, start: int, apart: int = 3) -> Callable[[int], None]:
    """A step of decoding rows as the leader does it: sample, and build the next forward meanwhile."""
    lengths = [start + apart * row for row in range(rows)]
    tokens = [[1 + row] for row in range(rows)]
    positions = [SamplingMetadata(Sampling(temperature=0.0), 0, TokenCounts([], [])) for _ in range(rows)]

    def step(i: int) -> None:
        fwd = Forward(0, 0, tuple(range(rows)), tuple(map(tuple, tokens)), (1,) * rows, sample=True)
        runner.begin(i)
        logits = runner.forward(fwd, lengths)
        assert logits is not None
        drawn = sample(logits[:, -1], positions, runner.written_caches(), runner.dispatch_next)
        runner.start_in_flight()
        tokens[:] = [[token] for token in drawn.tokens]
        lengths[:] = [length + 1 for length in lengths]

    return step


@pytest.mark.parametrize("rows", [1, 3])
def test_a_forward_that_is_built_ahead_writes_in_place(rows):
    """Nor is a buffer of 67 MB copied where the forward is forgotten: every fourth plan contains another token."""
    base = make_runner(**BIG)
    runner = Runner(base.model, base.facts, base.dtype, None, Overlap.BUILD)
    admitted(runner, 4, 16384)
    step, again = decode_ahead(runner, rows, 10), decode_ahead(runner, rows, 5)
    assert extra_bytes(runner, 8, lambda i: (again if i % 4 == 3 else step)(i)) < 16 << 20
    assert runner.has_in_flight


def test_recurrent_state_is_written_in_place():
    """State of 16 rows of 25 MB, two of them decoding: the new state beside the old, and no copy of the rest."""
    base = make_runner("mamba2", hidden_size=256, intermediate_size=512, num_heads=32, head_dim=64, n_groups=1,
                       state_size=1024, ssm_state_size=1024)  # fmt: skip
    runner = Runner(base.model, base.facts, base.dtype, None, Overlap.BUILD)
    admitted(runner, 16, 64)
    for row in range(2):
        prompt = Forward(0, row, (row,), (tuple(range(1, 11)),), (10,), sample=False)
        runner.forward(prompt, [0])
    step = decode_ahead(runner, 2, 10, apart=0)
    assert extra_bytes(runner, 6, step) < runner.kv_bytes // 2
    assert runner.has_in_flight


# -- sums over ranks that are judged after the wait for the tokens ---------------------------------------------------


class Echo:
    """Stands for a group whose other rank contributes the same vectors: a sum is twice this rank's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group=None: x + x)

    def reducer(self, fault=None) -> Reducer:
        reducer = Reducer(None, fault=fault)
        reducer.size, reducer.checked, reducer.names = 2, True, ["rank 0", "rank 1"]
        return reducer


class Spoil:
    """A wrong buffer in one step, at one place."""

    def __init__(self, step: int, value: float) -> None:
        self._at, self._value, self._step = step, value, 0

    def at_step(self, step: int) -> None:
        self._step = step

    def __call__(self, wire: mx.array, forward: int, site: int) -> mx.array:
        if self._step != self._at or site != 1:
            return wire
        return wire + mx.array(self._value, wire.dtype)


def summing_engine(path: Path, overlap: Overlap, reducer: Reducer) -> Engine:
    """An engine whose model sums the output of every layer's attention."""
    runner, vocab = runner_of(path, overlap, reducer)
    for number, layer in enumerate(runner.model.layers):
        block = layer.self_attn.o_proj
        site = reducer.site(f"layer {number}", block.weight.shape[0])
        layer.self_attn.o_proj = lambda x, block=block, site=site: reducer.all_sum(block(x), site)
    return Engine(runner, vocab)


def submit(engine: Engine, n: int) -> None:
    stop = StopRule(max_tokens=n)
    request = SequenceRequest(id="a", group="a", prompt=[5, 6, 7, 9], sampling=Sampling(temperature=0.0), stop=stop)
    engine.take(Submit(request))


def test_sums_are_judged_once_a_forward_and_the_tokens_are_the_same(tmp_path, monkeypatch):
    path, echo = make_model("llama", tmp_path / "llama"), Echo(monkeypatch)
    found = []
    for overlap in Overlap:
        reducer = echo.reducer()
        engine = summing_engine(path, overlap, reducer)
        submit(engine, 20)
        while not engine.scheduler.idle:
            engine.step()
        found.append((engine.post.answers["a"].tokens, reducer.tally.forwards, reducer.tally.reductions))
        assert not engine._runner.has_in_flight
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 20 and found[0][1] >= 21


def test_a_leader_that_replays_graphs_waits_once_for_sums_and_tokens(tmp_path, monkeypatch):
    path, echo = make_model("llama", tmp_path / "llama"), Echo(monkeypatch)
    waits = {}
    for overlap in Overlap:
        engine = summing_engine(path, overlap, echo.reducer())
        decoded = Forward(0, 0, (0,), ((5,),), (1,), sample=True)
        waits[overlap] = engine._runner.blocks(Step(2, (), (), (decoded,), 0))
    assert waits == {Overlap.NONE: True, Overlap.REPLAY: False, Overlap.BUILD: False}


@pytest.mark.parametrize("overlap", [Overlap.REPLAY, Overlap.BUILD])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_wrong_sum_that_is_found_late_stops_before_the_token_leaves(tmp_path, monkeypatch, value, overlap):
    """Named as a wrong sum also where it makes numbers that cannot be sampled."""
    path, echo = make_model("llama", tmp_path / "llama"), Echo(monkeypatch)
    engine = summing_engine(path, overlap, echo.reducer(Spoil(6, value)))
    submit(engine, 20)
    with pytest.raises(CollectiveFault, match="step 6: the all-reduce is wrong at layer 1") as raised:
        for _ in range(20):
            engine.step()
    assert isinstance(raised.value.__context__, NonFiniteLogits) == (value != value)
    before = engine.scheduler.by_id["a"].tokens[4:]
    assert len(before) == 5  # of steps 1 to 5, the first of which computed the prompt
    assert engine.post.answers["a"].tokens == before[: len(engine.post.answers["a"].tokens)]
