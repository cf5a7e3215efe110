"""Splitting: every rank's part is what the recipe says, read from nowhere else, and together they are the model."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from support.active_memory import active_memory
from support.families import FAMILIES
from support.models import WEIGHTS, Weights, build, make_config, make_model
from support.splitting import (
    CHECKED,
    KINDS,
    NO_RECIPE,
    OVERRIDES,
    SPLIT,
    UNBUILDABLE,
    UNCHECKED,
    Board,
    HandReducer,
    Ranks,
)

from phalanx.config import EngineConfig
from phalanx.errors import ModelUnsupported, WeightsError
from phalanx.model.loading import shard
from phalanx.model.loading.load import Prepared, prepare
from phalanx.model.loading.shard import StubGroup
from phalanx.model.loading.weights import read_headers
from phalanx.model.model_limits import check_limits
from phalanx.model.modules import copy_structure

soak = pytest.mark.soak
PROMPT = [5, 9, 30, 7, 8, 100, 200, 33, 2, 11]
WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip
"""Sizes whose halves hold whole quantisation groups."""

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "4-bit g32": {"bits": 4},
    "4-bit g64": {"bits": 4, "group_size": 64},
    "6-bit": {"bits": 6},
    "8-bit": {"bits": 8},
    "mxfp4": {"mode": "mxfp4", "bits": 4},
    "nvfp4": {"mode": "nvfp4", "bits": 4, "group_size": 16},
}


def covering(families: Sequence[str]) -> list[Any]:
    """Each quantisation of two families, and each family in two or more; `make soak` adds the other pairs."""
    return [
        pytest.param(family, quantize, id=f"{family}-{name}", marks=() if (i - f) % len(families) < 2 else soak)
        for i, (name, quantize) in enumerate(QUANTIZATIONS.items())
        for f, family in enumerate(families)
        if (family, name) != ("deepseek_v3", "4-bit g64")  # its value heads are 32 wide on a rank
    ]


def parameters(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def part(path: Path, rank: int, size: int, dtype: Any = "auto") -> Prepared:
    reducer: Any = HandReducer(Board(), rank, size)
    return prepare(path, dtype=dtype, trust_remote_code=False, reducer=reducer)


def reference(path: Path) -> mx.array:
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return model(mx.array([PROMPT]), cache=make_prompt_cache(model))


def assert_same_output(path: Path, ranks: Ranks) -> None:
    expected = reference(path)
    scale = mx.abs(expected).max().item()
    for logits in ranks.forward(PROMPT):
        assert mx.abs(logits - expected).max().item() <= 2e-5 * scale


# -- the parts together are the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CHECKED)
def test_two_ranks_compute_the_same_as_one(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path, **OVERRIDES.get(family, {}))
    ranks = Ranks(tmp_path, 2)
    assert_same_output(tmp_path, ranks)
    assert all(loaded.unchecked == () for loaded in ranks.loaded)
    assert ranks.reducers[0].sites == ranks.reducers[1].sites
    assert len(set(ranks.reducers[0].sites)) == ranks.loaded[0].sums > 0


FOUR = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k25", "gpt_oss", "glm4_moe", "gemma2", "olmo2", "minimax"]


@pytest.mark.parametrize("family", FOUR)
def test_four_ranks_with_fewer_key_heads_than_ranks(family: str, tmp_path: Path) -> None:
    """The configurations have two key heads (but those with latent attention): each is kept by two ranks."""
    make_model(family, tmp_path)
    assert_same_output(tmp_path, Ranks(tmp_path, 4))


@pytest.mark.parametrize(
    ("family", "quantize"), covering(["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3", "olmo2"])
)
def test_quantised_models_are_split_between_their_groups(family: str, quantize: dict[str, Any], tmp_path: Path) -> None:
    make_model(family, tmp_path, quantize=quantize, **WIDE)
    assert_same_output(tmp_path, Ranks(tmp_path, 2))


def test_the_sum_of_partial_outputs_is_the_whole_layers(tmp_path: Path) -> None:
    """One row-parallel layer with a bias, by itself."""
    make_model("starcoder2", tmp_path)
    whole, _ = load_model(tmp_path)
    ranks = Ranks(tmp_path, 2)
    x = mx.random.normal((3, 64))
    layers = [model.model.layers[1].self_attn.o_proj for model in ranks.models]
    halves = mx.split(x, 2, axis=-1)
    partial = [h @ layer.weight.T for h, layer in zip(halves, layers, strict=True)]
    for layer in layers:
        layer.all_sum = lambda y: partial[0] + partial[1]
    expected = whole.model.layers[1].self_attn.o_proj(x)
    assert mx.allclose(layers[0](halves[0]), expected, atol=1e-5)


# -- every rank's part is what the recipe says -----------------------------------------------------------------------


def assert_recipe(path: Path, size: int) -> None:
    for rank in range(size):
        lazy, _ = load_model(path, lazy=True)
        recipe = shard._recipe(lazy, path.name)
        shard._apply(recipe, lazy, StubGroup(rank, size))
        expected = parameters(lazy)
        loaded = part(path, rank, size, "float32").materialise(0, lambda *_: None)
        ours = parameters(loaded.model)
        assert ours.keys() == expected.keys()
        for name, array in expected.items():
            wide = array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
            assert mx.array_equal(ours[name], wide), name


@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family in KINDS else soak) for family in SPLIT])
def test_the_rows_read_are_those_that_the_recipe_leaves(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path, dtype=mx.bfloat16, **OVERRIDES.get(family, {}))
    assert_recipe(tmp_path, 2)


@pytest.mark.parametrize(("family", "quantize"), covering(["llama", "qwen3_moe", "gpt_oss", "phi3"]))
def test_the_rows_read_of_quantised_weights(family: str, quantize: dict[str, Any], tmp_path: Path) -> None:
    make_model(family, tmp_path, quantize=quantize, dtype=mx.bfloat16, **WIDE)
    assert_recipe(tmp_path, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "glm4_moe", "phi3", "gemma2"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4}], ids=str)
def test_a_rank_copies_its_part_and_nothing_else(family: str, quantize: dict[str, Any] | None, tmp_path: Path) -> None:
    make_model(family, tmp_path, quantize=quantize, dtype=mx.bfloat16, **WIDE)
    loaded = part(tmp_path, 1, 2, "bfloat16").materialise(0, lambda *_: None)
    assert loaded.copied_bytes <= 1.01 * loaded.weights_bytes
    assert loaded.computed_bytes == 0
    assert loaded.copied_bytes < 0.8 * sum(info.nbytes for info in read_headers(tmp_path).values())


def test_weights_of_a_checkpoint_that_mlx_lm_renames_are_still_read_in_part(tmp_path: Path) -> None:
    """Names as the hub's own checkpoints have them; experts one by one, which mlx-lm stacks: those are computed."""
    make_model("qwen3_moe", tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    stored = {}
    for name, array in mx.load(str(file)).items():
        if ".switch_mlp." in name:
            for i in range(array.shape[0]):
                stored[name.replace(".switch_mlp.", f".experts.{i}.")] = array[i]
        else:
            stored[name] = array
    mx.save_safetensors(str(file), stored)
    assert_recipe(tmp_path, 2)
    loaded = part(tmp_path, 0, 2).materialise(0, lambda *_: None)
    experts = sum(array.nbytes for name, array in parameters(loaded.model).items() if "switch_mlp" in name)
    assert loaded.computed_bytes == experts
    assert_same_output(tmp_path, Ranks(tmp_path, 2))


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(NO_RECIPE))
def test_a_model_without_a_recipe_is_refused_by_name(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    with pytest.raises(ModelUnsupported, match=rf"`{family}`.*--tp 1\."):
        part(tmp_path, 0, 2)
    assert part(tmp_path, 0, 1).sums == 0


REFUSALS = [
    ("llama", {}, None, 3, "n_kv_heads is 2", "1, 2 or 4"),
    ("llama", {"num_attention_heads": 6, "head_dim": 8}, None, 4, "n_heads is 6", "1, 2 or 6"),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, None, 2, "n_kv_heads is 3", "1, 3 or 6"),
    ("llama", {"intermediate_size": 100}, None, 8, "output of size 100 across 8", "1, 2 or 4"),
    ("llama", {"intermediate_size": 90}, None, 4, "output of size 90 across 4", "1 or 2"),
    ("phi3", {}, None, 4, "n_kv_heads is 2", "1 or 2"),
    ("gemma2", {}, None, 8, "n_heads is 4", "1, 2 or 4"),
    ("llama", {}, {"bits": 4}, 2, "quantisation group", "1"),
    ("qwen3_moe", {"moe_intermediate_size": 32}, {"bits": 4}, 2, "split", "1"),
]


@pytest.mark.parametrize(("family", "config", "quantize", "size", "why", "ways"), REFUSALS, ids=str)
def test_a_degree_that_does_not_divide_the_model_lists_those_that_do(
    family: str, config: dict[str, Any], quantize: dict[str, Any] | None, size: int, why: str, ways: str, tmp_path: Path
) -> None:
    make_model(family, tmp_path, quantize=quantize, **config)
    before = active_memory()
    with pytest.raises(ModelUnsupported, match=rf"cannot be split over {size} ranks: .*{why}.*--tp {ways}\.$"):
        part(tmp_path, 0, size)
    assert mx.get_active_memory() - before < 1 << 20


def test_degrees_are_those_that_work(tmp_path: Path) -> None:
    make_model("llama", tmp_path, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96)
    model, _ = load_model(tmp_path, lazy=True)
    assert shard.degrees(model, "m") == [1, 2, 4, 8]


def test_missing_and_surplus_weights_are_errors_on_every_rank(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(list(weights.values()))
    norm = weights.pop("model.norm.weight")
    mx.save_safetensors(str(file), weights)
    with pytest.raises(WeightsError, match=r"lacks tensors: model\.norm\.weight"):
        part(tmp_path, 1, 2)
    mx.save_safetensors(str(file), {**weights, "model.norm.weight": norm, "model.norm.other": norm})
    with pytest.raises(WeightsError, match=r"model\.norm\.other"):
        part(tmp_path, 1, 2)


def test_one_scale_per_expert_is_not_split(tmp_path: Path) -> None:
    """mlx-lm's recipes would cut that vector in two."""
    make_model("qwen3_moe", tmp_path, **WIDE)
    model, _ = load_model(tmp_path, lazy=True)
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.mlp.switch_mlp[name].global_scale = mx.ones((4,))
    with pytest.raises(ModelUnsupported, match="one scale per expert"):
        shard.split(model, "m", StubGroup(0, 2))


def test_activations_that_are_quantised_are_not_split(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantize_activations": True}))
    with pytest.raises(ModelUnsupported, match="activations"):
        part(tmp_path, 0, 2)


# -- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(UNCHECKED))
def test_sums_that_stay_mlx_lms_own_are_counted_by_class(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    prepared = part(tmp_path, 0, 2)
    assert set(prepared.unchecked) == UNCHECKED[family]
    assert prepared.sums > 0


def test_sums_are_named_by_their_place_with_their_width(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    reducer: Any = HandReducer(Board(), 0, 2)
    prepare(tmp_path, dtype="auto", trust_remote_code=False, reducer=reducer)
    expected = {(f"model.layers.{i}.{place}", 64) for i in range(3) for place in ("self_attn.o_proj", "mlp")}
    assert set(reducer.sites) == expected


def test_classes_of_a_split_model_keep_their_model_file(tmp_path: Path) -> None:
    """`registry.inspect` goes by it."""
    make_model("gemma2", tmp_path)
    model = part(tmp_path, 0, 2).model
    assert {type(m).__module__ for m in model.modules() if type(m).__name__ == "Attention"} == {"mlx_lm.models.gemma2"}
    make_model("qwen3_moe", tmp_path)
    assert type(part(tmp_path, 0, 2).model.layers[1].mlp).__module__ == "mlx_lm.models.qwen3_moe"


# -- tracing ---------------------------------------------------------------------------------------------------------


def runs_of(left: mx.array, given: tuple[int, ...], axis: int) -> tuple[tuple[int, int], ...] | None:
    rows = shard._rows(left, given, axis)
    return None if rows is None else shard._runs(rows, given[axis])


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (lambda rows: rows[4:8], ((4, 8),)),
        (lambda rows: mx.concatenate([rows[1:3], rows[6:8]]), ((1, 3), (6, 8))),
        (lambda rows: mx.repeat(rows[2:4], 2, axis=0), ((2, 3), (2, 4), (3, 4))),
        (lambda rows: rows[::-1], tuple((i, i + 1) for i in reversed(range(8)))),
        (lambda rows: rows, ((0, 8),)),
        (lambda rows: rows / 2, None),
        (lambda rows: rows * 2, None),
        (lambda rows: rows + 8, None),
        (lambda rows: -rows, None),
        (lambda rows: rows + 0.5, None),
        (lambda rows: rows.astype(mx.int32), None),
        (lambda rows: rows.T, None),
        (lambda rows: mx.concatenate([rows, rows], axis=1), None),
    ],
)
def test_only_a_choice_of_rows_is_taken_for_one(change: Any, runs: Any) -> None:
    rows = mx.arange(shard.FIRST_ROW, shard.FIRST_ROW + 8, dtype=mx.float32).reshape(8, 1)
    assert runs_of(change(rows), (8, 1), 0) == runs


def test_a_result_that_differs_between_columns_is_not_a_choice_of_rows() -> None:
    rows = mx.arange(shard.FIRST_ROW, shard.FIRST_ROW + 8, dtype=mx.float32).reshape(8, 1)
    assert runs_of(mx.concatenate([rows[:4], rows[4:]], axis=1), (8, 2), 0) is None


def test_a_copy_shares_weights_but_not_changes(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    model, _ = load_model(tmp_path)
    spare = copy_structure(model)
    expected = {name: np.array(array) for name, array in parameters(copy.deepcopy(model)).items()}
    shard._apply(shard._recipe(spare, "m"), spare, StubGroup(0, 2))
    for array in parameters(spare).values():
        array /= 2
    assert all(np.array_equal(np.array(array), expected[name]) for name, array in parameters(model).items())


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - UNBUILDABLE.keys()))
def test_config_json_alone_refuses_no_split_that_the_model_has(family: str) -> None:
    config = make_config(family)
    model = build(config, WEIGHTS.get(family, Weights()))
    try:
        degrees = shard.degrees(model, family)
    except ModelUnsupported:
        degrees = [1]
    for ranks in degrees:
        check_limits(EngineConfig(model="m", tensor_parallel_size=(ranks,)), config)
    check_limits(EngineConfig(model="m", pipeline_parallel_size=len(getattr(model, "layers", [0]))), config)
