"""The sampler against a naive float64 reference, alone and in batches, and as a distribution."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.active_memory import active_memory
from support.kernels import compiled, kernels

import phalanx.model.sampling.gumbel as gumbel_module
from phalanx.errors import NonFiniteLogits
from phalanx.model.sampling import logprobs, sampler
from phalanx.model.sampling.gumbel import gumbel, gumbel_key
from phalanx.model.sampling.logprobs import narrowed
from phalanx.model.sampling.sampler import SamplingMetadata, TokenCounts, noisy, sample, score
from phalanx.types import Sampling

Floats = npt.NDArray[np.float64]
PROMPT, OUTPUT = [1, 5, 5, 9], [2, 5, 2, 2]
MAX_SEED = 2**64 - 1


def position(index: int = 0, *, prompt: list[int] = PROMPT, output: list[int] = OUTPUT, banned: Any = (),
             **sampling: Any) -> SamplingMetadata:  # fmt: skip
    return SamplingMetadata(Sampling(**sampling), index, TokenCounts(prompt, output), frozenset(banned))


def logits_of(seed: int, rows: int, vocabulary: int, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * scale).astype(np.float32)


# -- a naive reference, one row at a time in float64 -----------------------------------------------------------------


def processed(row: npt.NDArray[np.float32], where: SamplingMetadata, prompt: list[int], output: list[int]) -> Floats:
    x, s = row.astype(np.float64), where.sampling
    for token, bias in s.logit_bias.items():
        x[token] += bias
    for token in where.banned:
        x[token] = -math.inf
    for token in set(prompt) | set(output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return x


def kept(x: Floats, s: Sampling) -> list[int]:
    """The tokens that survive the filters, most likely first."""
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    order = order[: s.top_k] if s.top_k else order
    weights = np.exp((x[order] - x.max()) / s.temperature)
    n = int(np.argmax(np.cumsum(weights) >= s.top_p * weights.sum())) + 1 if s.top_p < 1 else len(order)
    return [token for token, weight in zip(order[:n], weights, strict=False) if weight >= s.min_p]


def distribution(x: Floats, s: Sampling) -> Floats:
    tokens = kept(x, s)
    probabilities = np.zeros(len(x))
    probabilities[tokens] = np.exp((x[tokens] - x.max()) / s.temperature)
    return probabilities / probabilities.sum()


def uniform_of(key: int, token: int) -> float:
    """SplitMix64 in Python's integers; the 31 upper bits."""
    mask = 2**64 - 1
    state = (key + (token + 1) * gumbel_module.GAMMA) & mask
    state = ((state ^ (state >> 30)) * gumbel_module.MIX_1) & mask
    state = ((state ^ (state >> 27)) * gumbel_module.MIX_2) & mask
    return (((state ^ (state >> 31)) >> 33) + 0.5) / 2**31


def expected_token(row: npt.NDArray[np.float32], where: SamplingMetadata, prompt: list[int], output: list[int]) -> int:
    x, s = processed(row, where, prompt, output), where.sampling
    if s.temperature == 0:
        return int(np.argmax(x))
    key = gumbel_key(s.seed, s.choice, where.index)
    return max(kept(x, s), key=lambda t: x[t] / s.temperature - math.log(-math.log1p(-uniform_of(key, t))))


# -- one row, any batch ----------------------------------------------------------------------------------------------

samplings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, MAX_SEED),
        "choice": st.integers(0, 3),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 1.0, 0.0, 0.313, 0.907, 0.9993]),
        "top_k": st.sampled_from([0, 0, 1, 3, 40, 5000]),
        "min_p": st.sampled_from([0.0, 0.0, 0.0503, 0.51]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.6, -1.1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, 10), st.sampled_from([-100.0, -1.5, 2.5]), max_size=3),
        "logprobs": st.sampled_from([None, None, 0, 2, 20]),
    }
)
batches = st.lists(st.tuples(samplings, st.integers(0, 10**6), st.sampled_from([(), (3,), (0, 7)])), min_size=1,
                   max_size=7)  # fmt: skip


def assert_same_alone(logits: npt.NDArray[np.float32], positions: Callable[[], list[SamplingMetadata]]) -> list[int]:
    """Sample a batch, and each of its rows alone."""
    together = sample(mx.array(logits), positions())
    for row, where in enumerate(positions()):
        alone = sample(mx.array(logits[row : row + 1]), [where])
        assert alone.tokens == [together.tokens[row]], row
        assert alone.logprobs == [together.logprobs[row]], row
    return together.tokens


@settings(max_examples=60, deadline=None)
@given(batch=batches, vocabulary=st.sampled_from([11, 64, 257, 1500]), seed=st.integers(0, 2**31))
def test_a_row_gives_the_same_token_alone_in_a_batch_and_in_the_reference(
    batch: list[tuple[dict[str, Any], int, tuple[int, ...]]], vocabulary: int, seed: int
) -> None:
    logits = logits_of(seed, len(batch), vocabulary)

    def positions() -> list[SamplingMetadata]:
        return [position(index, banned=banned, **options) for options, index, banned in batch]

    tokens = assert_same_alone(logits, positions)
    expected = [expected_token(row, where, PROMPT, OUTPUT) for row, where in zip(logits, positions(), strict=True)]
    assert tokens == expected


def test_a_wide_nucleus_is_searched_beyond_the_first_candidates() -> None:
    logits = logits_of(4, 3, 20_000, scale=0.3)
    for p in (0.2, 0.9):  # about 2,500 and 17,000 tokens

        def positions(p: float = p) -> list[SamplingMetadata]:
            return [position(i, seed=i, top_p=p, logprobs=2) for i in range(3)]

        tokens = assert_same_alone(logits, positions)
        assert tokens == [expected_token(logits[i], positions()[i], PROMPT, OUTPUT) for i in range(3)]


def test_a_shared_stream_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: noise that depends on how often it was asked for."""
    stream = itertools.count()
    monkeypatch.setattr(sampler, "gumbel_key", lambda seed, choice, index: next(stream))
    with pytest.raises(AssertionError):
        assert_same_alone(logits_of(0, 8, 64), lambda: [position(i, seed=i) for i in range(8)])


# -- the distribution ------------------------------------------------------------------------------------------------


def chi_square_excess(counts: Floats, expected: Floats) -> float:
    """Standard deviations by which chi-square lies above its mean; cells with little expectation are merged."""
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(1, len(wanted) - 1)
    return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


def excess_over(n: int, axis: str, options: dict[str, Any]) -> float:
    """Sample n times along seeds, choices or positions; how far the counts are from the exact distribution."""
    row = logits_of(8, 1, 24, scale=1.5)
    fixed = {"seed": 7, "choice": 0, "index": 0}
    where = [position(**{**fixed, axis: i, **options}) for i in range(n)]
    tokens = sample(mx.broadcast_to(mx.array(row), (n, 24)), where).tokens
    expected = distribution(processed(row[0], where[0], PROMPT, OUTPUT), where[0].sampling)
    counts = np.bincount(tokens, minlength=24).astype(np.float64)
    assert not counts[expected == 0].any(), "a filtered token was sampled"
    return chi_square_excess(counts, expected * n)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {"logit_bias": {0: 2.0, 3: -100.0}},
        {"banned": [4, 6], "temperature": 1.2},
    ],
    ids=str,
)
def test_tokens_follow_the_processed_distribution(options: dict[str, Any]) -> None:
    assert excess_over(6000, "index", options) < 4


@pytest.mark.parametrize("axis", ["seed", "choice", "index"])
def test_seeds_choices_and_positions_are_independent(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert excess_over(6000, axis, {}) < 4
    names = ("seed", "choice", "index")
    blind = names.index(axis)
    monkeypatch.setattr(
        sampler, "gumbel_key", lambda *key: gumbel_key(*(key[i] if i != blind else 0 for i in range(3)))
    )
    assert excess_over(500, axis, {}) > 20, "noise that ignores it must be noticed"


def test_the_chi_square_notices_a_slightly_wrong_temperature() -> None:
    row = logits_of(8, 1, 24, scale=1.5)
    tokens = sample(mx.broadcast_to(mx.array(row), (6000, 24)), [position(i, temperature=1.15) for i in range(6000)])
    counts = np.bincount(tokens.tokens, minlength=24).astype(np.float64)
    assert chi_square_excess(counts, distribution(row[0].astype(np.float64), Sampling()) * 6000) > 4


# -- noise -----------------------------------------------------------------------------------------------------------


def test_the_generator_is_splitmix64() -> None:
    bits = gumbel_module._splitmix(mx.array(np.zeros(1, np.uint64)), mx.arange(3, dtype=mx.uint64))
    assert [hex(n) for n in bits.tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_noise_is_precise_and_finite_at_both_ends() -> None:
    uniform = np.array([2.0**-32, 1e-8, 3e-8, 1e-4, 0.3, 0.9999, 1 - 2.0**-24], dtype=np.float32)
    exact = -np.log1p(-uniform.astype(np.float64))
    np.testing.assert_allclose(np.array(gumbel_module._exponential(mx.array(uniform))), exact, rtol=1e-6)


def test_noise_of_neighbours_is_uncorrelated() -> None:
    """Along tokens, positions, choices and seeds: uniform after the distribution function, no correlation."""
    n, tokens = 600, 64
    for names in itertools.permutations(["seed", "choice", "index"]):
        keys = [gumbel_key(**dict(zip(names, (i, 1, 2**40), strict=True))) for i in range(n)]
        values = gumbel(mx.array(np.array(keys, np.uint64)[:, None]), mx.arange(tokens, dtype=mx.uint64))
        uniform = np.exp(-np.exp(-np.array(values, dtype=np.float64)))
        counts = np.histogram(uniform, bins=64, range=(0, 1))[0].astype(np.float64)
        assert chi_square_excess(counts, np.full(64, uniform.size / 64)) < 4
        for shift in ((1, 0), (0, 1), (1, 1), (2, 1)):
            a, b = uniform[shift[0] :, shift[1] :], uniform[: n - shift[0], : tokens - shift[1]]
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4.5 / math.sqrt(a.size)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, MAX_SEED])
def test_any_seed_of_64_bits_works_and_counts(seed: int) -> None:
    logits = mx.zeros((1, 4096))
    first, again = (sample(logits, [position(seed=seed)]).tokens for _ in range(2))
    assert first == again
    assert first != sample(logits, [position(seed=seed ^ 2**63)]).tokens
    assert first != sample(logits, [position(seed=seed, choice=1)]).tokens
    assert first != sample(logits, [position(1, seed=seed)]).tokens


# -- ties, extremes, dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}], ids=str)
def test_the_lowest_id_wins_a_tie(options: dict[str, Any]) -> None:
    for vocabulary in (40, 2000):
        logits = np.zeros((3, vocabulary), np.float32)
        logits[0, [7, 9, 30]] = 2.0
        logits[1, [0, 39]] = 1.0
        assert sample(mx.array(logits), [position(i, seed=3, **options) for i in range(3)]).tokens == [7, 0, 0]


def test_filters_cut_inside_a_tie_by_id() -> None:
    logits = mx.broadcast_to(mx.array([1.0] + [0.0] * 30), (3000, 31))
    tokens = sample(logits, [position(i, top_k=4, temperature=50.0) for i in range(3000)]).tokens
    assert set(tokens) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-300])
def test_a_cold_row_is_greedy_and_a_hot_one_uniform(temperature: float) -> None:
    logits = logits_of(1, 5, 100)
    cold = sample(mx.array(logits), [position(i, temperature=temperature, top_p=0.9) for i in range(5)])
    assert cold.tokens == logits.argmax(axis=1).tolist()
    row = mx.broadcast_to(mx.array(logits[:1]), (3000, 100))
    hot = sample(row, [position(i, temperature=1e6) for i in range(3000)]).tokens
    assert chi_square_excess(np.bincount(hot, minlength=100).astype(float), np.full(100, 30.0)) < 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_sixteen_bit_logits_are_sampled_as_their_float32_values(dtype: mx.Dtype) -> None:
    logits = mx.array(logits_of(2, 4, 300)).astype(dtype)
    where = [position(i, seed=9, logprobs=3, top_p=p) for i, p in enumerate((1.0, 0.9, 0.5, 0.99))]
    assert sample(logits, where) == sample(logits.astype(mx.float32), where)


def test_masked_tokens_are_never_sampled() -> None:
    logits = np.full((400, 50), -np.inf, np.float32)
    logits[:, [4, 11]] = [1.0, 0.0]
    for options in ({}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.01}, {"temperature": 5.0}):
        tokens = sample(mx.array(logits), [position(i, **options) for i in range(400)]).tokens
        assert set(tokens) == {4, 11}, options


# -- unusable logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "logprobs": 2}], ids=str)
def test_one_bad_number_is_an_error_that_names_the_row(bad: float, options: dict[str, Any]) -> None:
    logits = logits_of(3, 4, 1500)
    logits[2, 777] = bad
    with pytest.raises(NonFiniteLogits, match="row 2"):
        sample(mx.array(logits), [position(i, **options) for i in range(4)])
    with pytest.raises(NonFiniteLogits, match="row 2"):
        score(mx.array(logits), [0, 0, 0, 0], 1)


def test_a_row_without_any_possible_token_is_an_error() -> None:
    logits = logits_of(3, 2, 30)
    logits[1] = -math.inf
    with pytest.raises(NonFiniteLogits, match="row 1 hold nothing but -inf"):
        sample(mx.array(logits), [position(temperature=0.0)] * 2)


# -- penalties, log-probabilities, the wait --------------------------------------------------------------------------


def test_counts_grow_with_the_sequence_as_if_counted_at_once() -> None:
    grown = TokenCounts([4, 4, 1])
    grown.columns()
    for token in (1, 7, 7, 4):
        grown.add([token])
        grown.columns()
    ids, counts = grown.columns()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {4: 1, 1: 1, 7: 2}


def test_tokens_beyond_the_vocabulary_change_nothing() -> None:
    logits = mx.array(logits_of(0, 1, 20))
    options = {"temperature": 0.0, "repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {25: 100.0}}
    where = position(prompt=[900], output=[20], banned=[21], **options)
    assert sample(logits, [where]).tokens == [int(mx.argmax(logits).item())]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(5, 3, 700)
    logits[1] = np.round(logits[1])  # many ties
    exact = logits.astype(np.float64)
    exact = exact - exact.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    order = [sorted(range(700), key=lambda t: (-logits[row, t], t)) for row in range(3)]
    where = [position(i, logprobs=m, temperature=2.0, top_k=30, presence_penalty=1.0) for i, m in enumerate((0, 20, 5))]
    sampled = sample(mx.array(logits), where)
    scored = score(mx.array(logits), [3, 699, 0], 4)
    for row, token, entry, m in [
        *((i, sampled.tokens[i], sampled.logprobs[i], m) for i, m in enumerate((0, 20, 5))),
        *((i, (3, 699, 0)[i], scored[i], 4) for i in range(3)),
    ]:
        assert entry is not None
        assert entry.token == token
        assert entry.logprob == pytest.approx(exact[row, token], abs=2e-5)
        assert entry.rank == order[row].index(token)
        assert [t for t, _ in entry.top] == order[row][:m]
        assert [value for _, value in entry.top] == pytest.approx([exact[row, t] for t in order[row][:m]], abs=2e-5)


def test_other_arrays_are_evaluated_as_well() -> None:
    before = active_memory()
    cache = mx.zeros((1 << 20,)) + 1
    sample(mx.zeros((1, 50)), [position(temperature=0.0)], [cache])
    assert mx.get_active_memory() - before >= 4 << 20


@pytest.mark.parametrize("ahead", [(), (3,), (9, 9, 2), (1, 3, 9, 3, 9)])
def test_tokens_ahead_count_as_output_once_and_are_not_kept(ahead: tuple[int, ...]) -> None:
    counts, after = TokenCounts([1, 2, 2], [3]), TokenCounts([1, 2, 2], [3, *ahead])
    before = [column.tolist() for column in counts.columns()]
    assert [c.tolist() for c in counts.columns(ahead)] == [c.tolist() for c in after.columns()]
    assert [c.tolist() for c in counts.columns()] == before
    counts.add(ahead)
    assert [c.tolist() for c in counts.columns()] == [c.tolist() for c in after.columns()]


class Counted(dict[int, float]):
    """A logit bias that counts how often somebody walks through it."""

    walks = 0

    def keys(self) -> Any:
        self.walks += 1
        return super().keys()

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


def test_the_entries_of_a_bias_are_read_once_a_row_and_not_in_every_step() -> None:
    """4,096 entries in 16 rows, read in every step, made the steps of a neighbour 47 times as long."""
    bias, banned = Counted(dict.fromkeys(range(1024), 1.0)), frozenset(range(1024, 2048))
    metadata = SamplingMetadata(Sampling(logit_bias=bias), 0, TokenCounts([]), banned)
    raw = mx.array(logits_of(1, 2, 4096))
    first = sample(raw, [metadata, position(temperature=0.0)])
    walks = bias.walks
    columns = metadata.bias_columns()
    assert len(columns[0]) == 2048
    for _ in range(5):
        assert sample(raw, [metadata, position(temperature=0.0)]) == first
    assert bias.walks == walks
    assert all(mine is kept for mine, kept in zip(metadata.bias_columns(), columns, strict=True))
    metadata.banned = frozenset()
    assert len(metadata.bias_columns()[0]) == 1024


# -- what a GPU does in another way ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([17, 512, 5_000, 32_003]), width=st.sampled_from([1, 16, 64, 1024]),
    levels=st.sampled_from([1, 3, 200, 10**6]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_narrowing_keeps_the_smallest_keys(vocabulary: int, width: int, levels: int, seed: int) -> None:
    """In any order, with ties, and where the best tokens are beside each other or -inf is all there is."""
    random = np.random.default_rng(seed)
    z = -random.integers(0, levels, (2, vocabulary)).astype(np.float32)
    z[0] = np.sort(z[0])
    z[1, random.integers(0, vocabulary) :] = -math.inf
    keys = (z.view(np.uint32).astype(np.uint64) << np.uint64(32)) | np.arange(vocabulary, dtype=np.uint64)
    width = min(width, vocabulary)
    fewer = np.sort(np.array(narrowed(mx.array(keys), width)), axis=-1)
    assert (fewer[:, :width] == np.sort(keys, axis=-1)[:, :width]).all()


def test_narrowing_sorts_a_part_of_the_vocabulary() -> None:
    sizes = {width: narrowed(mx.zeros((1, 152_000), dtype=mx.uint64), width).shape[1] for width in (16, 64, 1024)}
    assert sizes == {16: 2048, 64: 4096, 1024: 16_384}
    assert narrowed(mx.zeros((1, 1500), dtype=mx.uint64), 1024).shape == (1, 1500)


@pytest.mark.parametrize(
    "options", [{"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.7}, {"top_p": 0.95, "min_p": 0.02}]
)
def test_a_gpus_ranking_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    logits = logits_of(7, 6, 20_000, scale=2.0)

    def positions() -> list[SamplingMetadata]:
        return [position(i, seed=i, logprobs=3, **options) for i in range(6)]

    expected = sample(mx.array(logits), positions())
    calls: list[int] = []

    def on_gpu(keys: mx.array, width: int) -> mx.array:
        calls.append(width)
        return narrowed(keys, width)

    monkeypatch.setattr(logprobs, "fewer_keys", on_gpu)
    assert sample(mx.array(logits), positions()) == expected
    assert calls


def test_noise_is_few_kernels_where_functions_are_compiled(tmp_path: Path) -> None:
    arrays = mx.zeros((2, 64)), mx.array([[3], [4]], dtype=mx.uint64), mx.arange(64, dtype=mx.uint64)
    mx.eval(arrays)
    assert kernels(lambda: noisy(*arrays), tmp_path / "graph.dot").total() == 27
    with compiled():
        assert kernels(lambda: noisy(*arrays), tmp_path / "graph.dot").total() == 6


@pytest.mark.skipif(not shutil.which("g++"), reason="MLX compiles with g++ on CPUs")
def test_compiled_noise_is_the_same_noise() -> None:
    """Up to the two logarithms, which MLX takes from another library when it compiles for a CPU."""
    z = mx.array(logits_of(1, 3, 5_000))
    keys, tokens = mx.array([[3], [4], [MAX_SEED >> 1]], dtype=mx.uint64), mx.arange(5_000, dtype=mx.uint64)
    plain = noisy(z, keys, tokens)
    mx.eval(plain)
    with compiled():
        fused = noisy(z, keys, tokens)
        mx.eval(fused)
    assert mx.allclose(plain, fused, rtol=0, atol=4e-6)
    assert (mx.argmax(plain, axis=-1) == mx.argmax(fused, axis=-1)).all()
