"""Stages: a model that is cut between its layers gives the uncut model's bits, and each part reads only its own.

The families here stand for the ways in which models choose masks, caches and heads; `make soak` runs all, and
`tools/conformance.py` writes what it finds into `docs/models.md`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from support.active_memory import active_memory
from support.families import FAMILIES
from support.models import make_model
from support.splitting import UNBUILDABLE, Ranks
from support.stages import drive_cut, even, load_part, runner_of, staged_runner

from phalanx.dist.stage_link import StageConnections
from phalanx.engine.stages import StagedRunner, from_bytes
from phalanx.errors import ConfigError, EngineError, ModelUnsupported
from phalanx.model import registry
from phalanx.model.loading.layer_trace import trace
from phalanx.model.loading.load import Prepared, prepare
from phalanx.model.loading.stage_cut import LayerCosts
from phalanx.model.loading.weights import read_headers
from phalanx.model.runner import Runner
from phalanx.model.stage import ABSENT
from phalanx.sched.plan import Admit, Forward, Resize

COVERING = ["llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3", "kimi_k25", "qwen3_next", "gemma4_text:large", "gpt2"]

NO_STAGES = {
    "afm7": "has no attribute 'shape'",  # later layers read an earlier one's keys
    "gemma3n": "hand on an array of shape",
    "gemma4": "returns beside the array",  # or, elsewhere, an embedding for each layer
    "gemma4_text": "NaN came from elsewhere",  # an embedding for each layer
    "iquestloopcoder": "calls none of them as a whole",
    "nanbeige": "layer 0 is called 2 times",
    "rwkv7": "layer 1 takes 2 arrays from layer 0",
    "talkie": "NaN came from elsewhere",  # each layer adds the embedding
}
"""Families that cannot be cut, and words of the reason."""

UNSERVED = {"bitnet", "deepseek_v41", "longcat_flash_ngram", "muse_spark", "phi3small", *UNBUILDABLE}


def prepared(path: Path, choose: Any, dtype: Any = "float32") -> Prepared:
    return prepare(path, dtype=dtype, trust_remote_code=False, choose_layers=choose)


def layers(first: int, last: int) -> Any:
    return lambda costs: (first, last)


# -- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "stages"), [*[(family, 3) for family in COVERING], ("gemma3", 2)])
def test_stages_give_the_bits_of_the_whole_model(family: str, stages: int, tmp_path: Path) -> None:
    """Prefill in chunks, drafts and rollbacks, rows of several lengths."""
    outcome = drive_cut(make_model(family, tmp_path), stages, prompts=3, longest=20, tokens=14)
    assert outcome.refusal == ""
    assert outcome.forwards > 15
    assert (outcome.different, outcome.left) == (0, 0)


@pytest.mark.soak  # every other family and cut
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNSERVED))
def test_every_family_is_cut_or_refused(family: str, tmp_path: Path) -> None:
    path = make_model(family, tmp_path)
    for stages in (2, 3):
        if family == "longcat_flash" and stages == 3:
            continue  # it has two layers
        outcome = drive_cut(path, stages, prompts=4, longest=24, tokens=24)
        if family == "hunyuan" and stages == 3:
            assert "returns beside the array" in outcome.refusal  # pairs of layers share keys
        elif family == "gemma4" and stages == 3:
            assert outcome.refusal
        elif family in NO_STAGES:
            assert NO_STAGES[family] in outcome.refusal
        else:
            assert (outcome.refusal, outcome.different, outcome.left) == ("", 0, 0)


@pytest.mark.parametrize(
    ("family", "entries", "quantize", "dtype"),
    [
        ("llama", {"tie_word_embeddings": True}, None, "float32"),
        ("qwen3_next", {"tie_word_embeddings": True}, {"bits": 4}, "float32"),
        ("gpt_oss", {}, {"mode": "mxfp4", "bits": 4}, "bfloat16"),
        ("qwen3", {}, {"bits": 8}, "float16"),
    ],
)
def test_tied_and_quantised_models(
    family: str, entries: dict[str, Any], quantize: Any, dtype: str, tmp_path: Path
) -> None:
    path = make_model(family, tmp_path, quantize=quantize, dtype=mx.bfloat16, **entries)
    runner = staged_runner(path, 3, dtype=dtype)
    runner.apply([Resize(0, 2, 16), Admit(0, 0, 0), Admit(0, 1, 1)])
    for row, prompt in enumerate([(7, 11, 30, 5, 80), (9, 4, 2)]):
        runner.forward(Forward(0, row, (row,), (prompt,), (len(prompt),), sample=False), [0])
    for n in range(4):
        logits = runner.forward(Forward(0, 0, (0, 1), ((n + 3,), (90 - n,)), (1, 1), sample=True), [5 + n, 3 + n])
        assert logits is not None
        assert not mx.isnan(logits).any().item()
    assert runner.different == []


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_stages_of_two_ranks_each(family: str, tmp_path: Path) -> None:
    """What rank i of a stage hands on goes to rank i of the next; sums over the ranks of a stage stay within it."""
    path = make_model(family, tmp_path)
    whole = Ranks(path, 2)
    prompt = [7, 11, 30, 5, 80, 3]
    expected = whole.forward(prompt)
    passed = None
    sums = 0
    for number in range(2):
        stage = Ranks(path, 2, choose_layers=even(2, number))
        passed = stage.forward(prompt, passed)
        sums += stage.loaded[0].sums
        assert len(stage.reducers[0].sites) == stage.loaded[0].sums
        assert stage.loaded[0].weights_bytes < whole.loaded[0].weights_bytes
    assert passed is not None
    assert sums == whole.loaded[0].sums
    for rank in range(2):
        assert mx.array_equal(passed[rank], expected[rank])


# -- what a stage reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_layers_and_its_end(tied: bool, tmp_path: Path) -> None:
    """The embedding is the first stage's and the head the last one's; a tied one is read by both."""
    path = make_model("llama", tmp_path, num_hidden_layers=4, tie_word_embeddings=tied, dtype=mx.bfloat16)
    headers = read_headers(path)
    head = "model.embed_tokens" if tied else "lm_head"
    ends = [("model.embed_tokens.",), (), (f"{head}.", "model.norm.")]
    everything: set[str] = set()
    for (first, last), outside in zip([(0, 1), (1, 3), (3, 4)], ends, strict=True):
        own = (*outside, *(f"model.layers.{layer}." for layer in range(first, last)))
        names = {name for name in headers if name.startswith(own)}
        everything |= names
        part = load_part(path, layers(first, last))
        assert part.copied_bytes == sum(headers[name].nbytes for name in names)
        assert part.weights_bytes == 2 * part.copied_bytes
        assert part.stage is not None
    assert everything == headers.keys()


def test_the_peak_is_the_stages_part_and_one_tensor(tmp_path: Path) -> None:
    """8 MB of 46; the largest tensors are those of 4 MB, which are not this stage's."""
    path = make_model("llama", tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=10, head_dim=64,
                      vocab_size=4096, dtype=mx.bfloat16)  # fmt: skip
    whole = load_part(path)
    total = whole.weights_bytes
    largest = max(array.nbytes for _, array in tree_flatten(whole.model.parameters()))
    del whole
    mx.clear_cache()
    before = active_memory()
    part = load_part(path, layers(4, 6))
    assert part.weights_bytes < total / 4
    assert part.peak_bytes - before <= part.weights_bytes + largest
    assert mx.get_active_memory() - before <= part.weights_bytes + (64 << 10)


def test_all_layers_are_no_stage(tmp_path: Path) -> None:
    """Whoever has all layers has mlx-lm's own classes and no stage."""
    path = make_model("qwen3", tmp_path)
    part, whole = load_part(path, even(1, 0)), load_part(path)
    assert part.stage is None
    kinds = [[(name, type(module)) for name, module in one.model.named_modules()] for one in (part, whole)]
    assert kinds[0] == kinds[1]
    assert all(type(module).__module__.startswith(("mlx.", "mlx_lm.")) for module in part.model.modules())


def test_own_layers_are_unchanged(tmp_path: Path) -> None:
    path = make_model("gemma3", tmp_path)
    part, whole = load_part(path, layers(1, 3)), load_part(path)
    for number in (1, 2):
        own, original = part.model.layers[number], whole.model.layers[number]
        assert [type(module) for module in own.modules()] == [type(module) for module in original.modules()]
    foreign = part.model.layers[0]
    assert tree_flatten(foreign.parameters()) == []
    assert foreign.self_attn.is_sliding == whole.model.layers[0].self_attn.is_sliding


@pytest.mark.parametrize(
    "quantize",
    [
        None,
        {"bits": 4},
        {"bits": 8, "group_size": 64},
        {"mode": "mxfp4", "bits": 4},
        {"mode": "mxfp8", "bits": 8},
        {"mode": "nvfp4", "bits": 4, "group_size": 16},
    ],
    ids=str,
)
def test_an_embedding_that_was_not_read_is_nan(quantize: Any, tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, quantize=quantize, dtype=mx.bfloat16)
    for dtype in ("float32", "bfloat16"):
        model = load_part(path, layers(1, 3), dtype).model
        assert mx.isnan(model.model.embed_tokens(mx.array([[3, 9]]))).all().item()


# -- caches and facts ----------------------------------------------------------------------------------------------


def test_facts_are_the_whole_models_and_bytes_the_stages_own(tmp_path: Path) -> None:
    """A stage with nothing but attention, of a model with recurrent layers, cannot roll back either."""
    path = make_model("qwen3_next", tmp_path)
    parts = [load_part(path, layers(first, first + 1)) for first in range(4)]
    facts = [registry.inspect(part.model, part.config, part.stage) for part in parts]
    whole_model = load_part(path)
    whole = registry.inspect(whole_model.model, whole_model.config)
    for one in facts:
        for name in ("supports_rollback", "recurrent", "one_row", "max_len", "mask_dims", "description"):
            assert getattr(one, name) == getattr(whole, name), name
        assert len(one.layouts) == len(whole.layouts)
    assert [one.bytes_per_token > 0 for one in facts] == [False, True, False, True]
    assert [one.bytes_per_row > 0 for one in facts] == [True, False, True, False]
    assert sum(one.bytes_per_token for one in facts) == whole.bytes_per_token
    assert sum(one.bytes_per_row for one in facts) == whole.bytes_per_row


def test_what_is_known_of_a_model_only_from_some_layers_holds_for_every_stage(tmp_path: Path) -> None:
    """`dynamic` RoPE limits the length, wherever the layers that have it are."""
    path = make_model("llama:dynamic", tmp_path)
    part = load_part(path, layers(2, 3))
    assert part.stage is not None
    facts = registry.inspect(part.model, part.config, part.stage)
    assert facts.one_row == part.stage.whole.one_row != ""
    assert facts.max_len == part.stage.whole.max_len


def test_windows_of_other_stages_layers_count(tmp_path: Path) -> None:
    """Drafts beyond a window are planned alike on all stages."""
    path = make_model("llama:sliding", tmp_path)
    runner = runner_of(load_part(path, layers(2, 3)))  # the one layer with full attention
    runner.apply([Resize(0, 1, 16)])
    assert runner._arenas[0].windows == [8]


def test_costs_are_the_whole_models(tmp_path: Path) -> None:
    found: list[LayerCosts] = []

    def choose(costs: LayerCosts) -> tuple[int, int]:
        found.append(costs)
        return 0, 1

    path = make_model("qwen3_next", tmp_path / "a", dtype=mx.bfloat16)
    prepared(path, choose)
    [costs] = found
    headers = read_headers(path)
    assert sum(costs.weights) + costs.before + costs.behind == sum(info.nbytes for info in headers.values())
    assert costs.everywhere == 0
    assert costs.before == headers["model.embed_tokens.weight"].nbytes
    prepared(make_model("qwen3", tmp_path / "b", tie_word_embeddings=True), choose)
    tied = found[1]
    assert tied.behind == tied.before + 64 * 4  # the norm


def test_arithmetic_is_that_of_the_elements_however_many_bits_they_have(tmp_path: Path) -> None:
    found: list[LayerCosts] = []

    def choose(costs: LayerCosts) -> tuple[int, int]:
        found.append(costs)
        return 0, 1

    prepared(make_model("qwen3", tmp_path / "a"), choose)
    for bits in (4, 8):
        prepared(make_model("qwen3", tmp_path / str(bits), quantize={"group_size": 32, "bits": bits}), choose)
    whole, *quantised = found
    assert whole.elements == tuple(n // 4 for n in whole.weights) and min(whole.elements) > 0
    assert [costs.elements for costs in quantised] == [whole.elements] * 2
    assert quantised[0].weights < quantised[1].weights < whole.weights


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(NO_STAGES))
def test_a_model_that_hands_on_more_is_refused_by_name(family: str, tmp_path: Path) -> None:
    path = make_model(family, tmp_path / "one-of-them")
    with pytest.raises(ModelUnsupported, match=r"^one-of-them cannot be cut into stages: .*--pp 1") as caught:
        for number in range(2):
            runner_of(load_part(path, even(2, number)))
    assert NO_STAGES[family] in caught.value.message


def test_a_layer_that_uses_anothers_cache_is_refused_where_they_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("llama", tmp_path / "model")

    def shared(self: Any) -> list[KVCache]:
        first, last = KVCache(), KVCache()
        return [first, last, last]

    monkeypatch.setattr(llama.Model, "make_cache", shared)
    with pytest.raises(ModelUnsupported, match="layer 2 uses the cache of layer 1, which would be in another stage"):
        prepared(path, layers(2, 3))
    prepared(path, layers(1, 3))


@pytest.mark.parametrize("ends", [(1, 1), (2, 1), (-1, 2), (0, 4)])
def test_layers_that_a_model_does_not_have(ends: tuple[int, int], tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="model has layers 0 to 2"):
        prepared(path, layers(*ends))


def staged_llama(tmp_path: Path, first: int, last: int) -> Runner:
    runner = runner_of(load_part(make_model("llama", tmp_path), layers(first, last)))
    runner.apply([Resize(0, 1, 16), Admit(0, 0, 0)])
    return runner


ONE = Forward(0, 0, (0,), ((5, 9),), (2,), sample=False)


def test_a_forward_takes_hidden_states_exactly_where_there_is_a_stage_before(tmp_path: Path) -> None:
    hidden = mx.zeros((1, 2, 64))
    runner = staged_llama(tmp_path / "b", 1, 3)
    for wrong in (None, hidden[:, :1], hidden[..., :32], mx.zeros((2, 2, 64))):
        with pytest.raises(EngineError, match=r"layers 1-2 of 0-2: hidden states of .* \(1, 2, 64\) is needed"):
            runner.forward(ONE, [0], wrong)
    with pytest.raises(EngineError, match="floating dtype"):
        runner.forward(ONE, [0], hidden.astype(mx.int32))
    assert runner.forward(ONE, [0], hidden) is None
    first = staged_llama(tmp_path / "a", 0, 1)
    with pytest.raises(
        EngineError, match=r"layer 0 of 0-2: hidden states of shape \(1, 2, 64\) were given; None is needed"
    ):
        first.forward(ONE, [0], hidden)
    passed = first.forward(ONE, [0])
    assert passed is not None
    assert passed.shape == (1, 2, 64)


def test_every_stage_before_the_last_hands_on_whether_tokens_are_drawn_or_not(tmp_path: Path) -> None:
    """And none of them runs ahead: what comes in is not known before."""
    runner = staged_llama(tmp_path, 0, 2)
    runner.samples = False  # as a worker
    prefill = runner.forward(ONE, [0])
    decode = Forward(0, 0, (0,), ((5,),), (1,), sample=True)
    drawn = runner.forward(decode, [2])
    assert prefill is not None
    assert drawn is not None
    assert not runner.may_dispatch_next([decode])
    assert not np.isnan(np.array(drawn)).any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_sent_is_computed_in_the_stages_own_evaluation(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And arrives as it was sent."""
    plain, runner = staged_llama(tmp_path, 0, 2), staged_llama(tmp_path, 0, 2)
    sent: list[bytes] = []
    sender = cast(Any, SimpleNamespace(send=lambda frame, data: sent.append(data)))
    staged = StagedRunner(runner, 0, StageConnections(None, (sender,)), dtype)
    outgoing, evaluate = runner.outgoing, mx.eval
    made: list[mx.array] = []
    evaluated: list[int] = []

    def noted(hidden: mx.array) -> mx.array:
        made.append(outgoing(hidden))
        return made[-1]

    def watched(*arrays: Any) -> None:
        evaluated.extend(id(array) for _, array in tree_flatten(arrays))
        evaluate(*arrays)

    expected = plain.forward(ONE, [0])
    assert expected is not None
    runner.outgoing = noted
    monkeypatch.setattr(mx, "eval", watched)
    assert staged.forward(ONE, [0]) is None
    assert [id(array) in evaluated for array in made] == [True]
    arrived = from_bytes(sent[0], dtype, tuple(expected.shape))
    assert arrived.dtype == getattr(mx, dtype) and mx.array_equal(arrived, expected.astype(arrived.dtype))


def test_the_last_stage_draws_tokens_and_does_not_run_ahead(tmp_path: Path) -> None:
    runner = staged_llama(tmp_path, 2, 3)
    assert runner.forward(ONE, [0], mx.ones((1, 2, 64))) is None
    decode = Forward(0, 0, (0,), ((5,),), (1,), sample=True)
    logits = runner.forward(decode, [2], mx.ones((1, 1, 64)))
    assert logits is not None
    assert logits.shape == (1, 1, 512)
    assert not runner.may_dispatch_next([decode])
    runner.dispatch_next(mx.array([7], dtype=mx.uint32))
    assert not runner.has_in_flight
    whole = runner_of(load_part(tmp_path))
    whole.apply([Resize(0, 1, 16), Admit(0, 0, 0)])
    whole.forward(decode, [0])
    assert whole.may_dispatch_next([decode])


def test_what_another_stage_returns_beside_cannot_be_used() -> None:
    uses: list[Any] = [bool, len, list, lambda it: it.keys, lambda it: it[0], lambda it: it == 1,
                       lambda it: mx.ones(1) + it]  # fmt: skip
    for use in uses:
        with pytest.raises((EngineError, TypeError, ValueError)):
            use(ABSENT)


def with_skip(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
    """llama's model, but the first layer's output is added to the last one's."""
    h = self.embed_tokens(inputs)
    mask = llama.create_attention_mask(h, cache[0])
    outputs = []
    for layer, c in zip(self.layers, cache, strict=True):
        outputs.append(h := layer(h, mask, cache=c))
    return self.norm(h + outputs[0])


@pytest.mark.parametrize("tied", [False, True])
def test_what_skips_layers_shows_even_where_the_embedding_is_there(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied embeddings the last stage has the embedding. Layers of other stages must not pass it on."""
    monkeypatch.setattr(llama.LlamaModel, "__call__", with_skip)
    path = make_model("llama", tmp_path / "model", tie_word_embeddings=tied)
    with pytest.raises(ModelUnsupported, match="layer 2 of 0-2 cannot do with the array"):
        runner_of(load_part(path, layers(2, 3)))
    runner_of(load_part(path, layers(1, 3)))  # here the skipped array is the one that is handed on


def test_a_refused_model_is_left_as_it_was(tmp_path: Path) -> None:
    for family in ("nanbeige", "llama"):
        model, _ = load_model(make_model(family, tmp_path / family), lazy=True)
        before = [(name, type(module)) for name, module in model.named_modules()]
        with contextlib.suppress(ModelUnsupported):
            trace(model, family)
        assert [(name, type(module)) for name, module in model.named_modules()] == before
