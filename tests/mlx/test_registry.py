"""Which models are served, and how: found by running them; what cannot be served is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from support.families import Weights
from support.models import build, make_config
from support.tf32 import tf32_products
from test_mutants import MUTANTS, WINDOW_MUTANTS

from phalanx.errors import ModelUnsupported
from phalanx.model import check, registry
from phalanx.model.cache.buffers import ArenaBuffers
from phalanx.model.cache.layer_layout import GroupLayout, Heads, KvLayout, StateLayout
from phalanx.model.cache.row_view import RowView
from phalanx.model.check import EXACT, ROUNDED, tolerance_of
from phalanx.model.runner import Runner


def inspect(family: str, **overrides: object) -> registry.CacheFacts:
    config = make_config(family, **overrides)
    return registry.inspect(build(config, Weights()), config)


def test_plain_keys_and_values() -> None:
    """3 layers of 2 heads of 16 in fp32."""
    facts = inspect("llama")
    heads = Heads(2, 16, mx.float32)
    assert facts.layouts == (KvLayout(heads, heads, None),) * 3
    assert (facts.supports_rollback, facts.recurrent) == (True, False)
    assert (facts.bytes_per_token, facts.bytes_per_row) == (3 * 2 * 2 * 16 * 4, 0)
    assert (facts.one_row, facts.mask_dims, facts.max_len) == ("", 4, 1024)
    assert facts.description == "3 KVCache -> ragged rows"


def test_windows_latents_and_groups() -> None:
    """Windows come from the cache, MLA has one head of two widths, some layers have several caches."""
    windows = [layout.window for layout in inspect("gpt_oss").layouts if isinstance(layout, KvLayout)]
    assert windows == [8, 8, None, 8]
    latent = inspect("deepseek_v3").layouts[0]
    assert latent == KvLayout(Heads(1, 16, mx.float32), Heads(1, 8, mx.float32), None)
    group = inspect("falcon_h1").layouts[0]
    assert isinstance(group, GroupLayout)
    assert [type(part) for part in group.parts] == [StateLayout, KvLayout]
    assert inspect("gemma2").mask_dims == 5


def test_recurrent_state_cannot_roll_back() -> None:
    """One recurrent layer is enough; its bytes are per row."""
    for family in ("mamba", "jamba", "qwen3_next"):
        facts = inspect(family)
        assert (facts.supports_rollback, facts.recurrent) == (False, True)
        assert facts.bytes_per_row > 0
        assert "no rollback" in facts.description
    assert inspect("mamba").bytes_per_token == 0


def test_models_with_one_position_for_all_rows() -> None:
    """They say so, and `dynamic` RoPE is served only as far as it is constant."""
    for family in ("llama:dynamic", "gpt_bigcode", "llama4", "afm7"):
        facts = inspect(family)
        assert facts.one_row
        assert facts.one_row in facts.description
    assert inspect("llama:dynamic", max_position_embeddings=48).max_len == 48


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek_v41", "layer 0 keeps its state in mlx_lm.models.deepseek_v41.LayerCache"),
        ("longcat_flash_ngram", "n-gram context has another length"),
        ("phi3small", "boolean masks"),
    ],
)
def test_refusals_name_the_cause(family: str, words: str) -> None:
    """A person reads which model, which part, why."""
    with pytest.raises(ModelUnsupported, match=words):
        inspect(family)


def test_a_model_mlx_lm_cannot_run_is_refused() -> None:
    """Whatever its own forward raises becomes one clear error."""
    config = make_config("llama")
    model = build(config, Weights())
    model.model.layers[1].self_attn.q_proj.weight = mx.zeros((64, 63))
    with pytest.raises(ModelUnsupported, match="mlx-lm itself cannot run model type `llama`"):
        registry.inspect(model, config)


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    """Its ids would be read from behind the embeddings."""
    config = make_config("llama")
    model = build(config, Weights())
    n_logits = config["vocab_size"]
    for wrong in ({**config, "vocab_size": n_logits + 1}, {"model_type": "x", "text_config": {"vocab_size": 10**6}}):
        with pytest.raises(ModelUnsupported, match=rf"vocab_size is \d+, but .* has {n_logits} logits"):
            registry.inspect(model, wrong)


def probed(family: str, runner_class: type[Runner], dtype: mx.Dtype = mx.float32) -> Runner:
    config = make_config(family)
    model = build(config, Weights(), dtype)
    runner = runner_class(model, registry.inspect(model, config), dtype)
    registry.check_model(runner, model)
    return runner


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4", "minimax_m3_vl"]
)
def test_the_check_passes_and_leaves_nothing(family: str) -> None:
    """Nothing is held afterwards, and nothing had to be computed row by row that the tables did not name."""
    before = inspect(family).one_row
    runner = probed(family, Runner)
    assert runner.facts.one_row == before
    assert (runner.kv_bytes, runner.prefix_bytes, runner.written_caches()) == (0, 0, [])


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused_as_damaged(value: str) -> None:
    """Not as a model that phalanx computes otherwise than mlx-lm."""
    config = make_config("llama")
    model = build(config, Weights())
    model.model.norm.weight = mx.full((64,), float(value))
    runner = Runner(model, registry.inspect(model, config), mx.float32)
    with pytest.raises(ModelUnsupported, match="logits are NaN or infinite") as refused:
        registry.check_model(runner, model)
    assert "download the model again" in refused.value.remedy


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_the_check_passes_in_16_bits(dtype: mx.Dtype) -> None:
    """Rounding is not disagreement."""
    for family in ("llama", "mamba2"):
        assert probed(family, Runner, dtype).facts.one_row == ""


def test_a_dtype_that_mlx_cannot_compute_is_refused_before_the_first_request() -> None:
    """MLX's CPU backend has no 16-bit product over unquantised experts."""
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("a GPU computes this")
    with pytest.raises(ModelUnsupported, match=r"cannot run the model here in bfloat16.*--dtype float32"):
        probed("mixtral", Runner, mx.bfloat16)


def test_the_tolerance_is_that_of_the_devices_products() -> None:
    tolerances = [tolerance_of(dtype, on_cpu=on_cpu) for dtype in (mx.float32, mx.bfloat16) for on_cpu in (True, False)]
    assert tolerances == [EXACT, ROUNDED, ROUNDED, ROUNDED]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_rounded_products_are_no_disagreement(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """On a device that rounds products of several rows the check passes with room, and not with a CPU's tolerance."""
    distances: list[float] = []

    def noted(ours: mx.array, theirs: mx.array) -> float:
        distances.append(distance(ours, theirs))
        return distances[-1]

    distance = check._distance
    monkeypatch.setattr(check, "_distance", noted)
    with tf32_products():
        assert probed(family, Runner).facts.one_row == ""
    assert EXACT / 20 < max(distances) < ROUNDED / 10


@pytest.mark.parametrize("tolerance", [EXACT, ROUNDED])
@pytest.mark.parametrize("mutant", ["values zero", "offset + 1", "mask off", "no rollback"])
def test_the_check_refuses_broken_caches(monkeypatch: pytest.MonkeyPatch, mutant: str, tolerance: float) -> None:
    """What is wrong for single rows as well cannot be served, on a CPU and on a GPU."""
    monkeypatch.setattr(check, "tolerance_of", lambda dtype, on_cpu: tolerance)
    with pytest.raises(ModelUnsupported, match="relative difference"):
        probed("llama", MUTANTS[mutant])


class _OpenWhenRagged(RowView):
    def _ragged_mask(self, window: int | None) -> mx.array:
        return mx.ones_like(super()._ragged_mask(window))


class RaggedMaskOff(Runner):
    """Masks are wrong only for rows of different lengths."""

    def _view(self, arena: ArenaBuffers, start: int, kv_len: Sequence[int], length: int, sample: bool) -> RowView:
        return _OpenWhenRagged(start, kv_len, length, mask_dims=self.facts.mask_dims, prefill=not sample)


def test_the_check_turns_to_single_rows() -> None:
    """What is wrong only for rows together is right for one after the other."""
    runner = probed("llama", RaggedMaskOff)
    assert "together they disagree" in runner.facts.one_row
    assert "rows one by one" in runner.facts.description


def test_windows_are_too_long_for_the_probe() -> None:
    """A window off by one shows only after a whole window: that is the conformance run's to find, not the probe's."""
    assert probed("gpt_oss", WINDOW_MUTANTS["window + 1"]).facts.one_row == ""
