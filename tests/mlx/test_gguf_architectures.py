"""Every architecture that is taken from GGUF files: weights and logits are those of the original in mlx-lm."""

from __future__ import annotations

import array
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.gguf_originals import ORIGINALS, write_original

from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.model.gguf.gguf_architectures import ARCHITECTURES, VARIANTS
from phalanx.model.gguf.gguf_config import config_of as config_of_header
from phalanx.model.gguf.gguf_config import name_tensors
from phalanx.model.gguf.gguf_header import parse_header
from phalanx.model.gguf.gguf_import import convert
from phalanx.model.gguf.gguf_metadata import Metadata
from phalanx.model.loading.load import load

Array = npt.NDArray[Any]
KINDS = ["F16", "Q8_0", "Q4_0", "Q4_K", "mixed"]
TOLERANCE = 2e-5  # of the largest logit: sums of 256 to 512 products of float32 in another order, through the layers
PROMPT = [[5, 100, 42, 7, 200, 33, 260, 1, 90, 12, *range(20, 40)]]


def weights_of(directory: Path) -> dict[str, Array]:
    """The weights of a directory in float32, by MLX."""
    quantization = json.loads((directory / "config.json").read_text()).get("quantization", {})
    stored = mx.load(str(directory / "model.safetensors"))
    found = {}
    for name, value in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.scales" in stored:
            settings = {"mode": "affine", **quantization, **quantization.get(module, {})}
            bits, group, mode = (settings[field] for field in ("bits", "group_size", "mode"))
            parts = [stored[f"{module}.{one}"] for one in ("scales", "biases") if f"{module}.{one}" in stored]
            wide = [one if one.dtype == mx.uint8 else one.astype(mx.float32) for one in parts]
            value = mx.dequantize(value, *wide, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
        if part not in ("scales", "biases"):
            found[name] = np.array(value.astype(mx.float32))
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in ORIGINALS for kind in KINDS), ("gpt-oss", "MXFP4")]
)
def test_weights_and_logits_are_those_of_the_original(name: str, kind: str, tmp_path: Path):
    original = write_original(tmp_path / "x.gguf", name, kind)
    assert convert(tmp_path / "x.gguf", tmp_path / "made") == {}, "a type that is not exact"
    made = weights_of(tmp_path / "made")
    assert made.keys() == original.weights.keys()
    assert [ours for ours, wanted in original.weights.items() if not np.array_equal(made[ours], wanted)] == []
    loaded = load(tmp_path / "made", dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    wanted = original.model(mx.array(PROMPT))
    off = mx.abs(loaded.model(mx.array(PROMPT)) - wanted).max() / mx.abs(wanted).max()
    assert off.item() < TOLERANCE, off.item()
    assert mx.abs(wanted[:, 1:] - wanted[:, :-1]).max().item() > 0.1, "the logits say nothing"


@pytest.mark.parametrize("name", [name for name in ORIGINALS if name != "deepseek2 lite"])  # there: 26 or 27 layers
def test_logits_are_llama_cpps(name: str, tmp_path: Path):
    """Runs where `llama_cpp` can be imported. That the order of rows, norms and scalings are as they are there."""
    library = pytest.importorskip("llama_cpp")
    write_original(tmp_path / "x.gguf", name, "F32")
    convert(tmp_path / "x.gguf", tmp_path / "made")
    loaded = load(tmp_path / "made", dtype="float32", guard=0, trust_remote_code=False, on_progress=lambda *_: None)
    ours = np.array(loaded.model(mx.array(PROMPT)))[0]
    theirs = library.Llama(str(tmp_path / "x.gguf"), n_ctx=512, logits_all=True, type_k=0, type_v=0, verbose=False)
    theirs.eval(PROMPT[0])
    wanted = np.array(theirs.scores[: len(PROMPT[0])])
    theirs.close()
    off = np.abs(ours - wanted).max() / np.abs(wanted).max()
    assert off < (1e-3 if name.startswith("gemma") else 1e-4), off  # its GELU comes from a table of float16


def test_every_architecture_is_tried():
    names = {gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[one.arch]] for one in ORIGINALS.values()}
    assert names == ARCHITECTURES.keys()
    tried = {(one.arch, one.config["model_type"]) for one in ORIGINALS.values()}
    assert len(tried) == len(ARCHITECTURES) + len(VARIANTS)


# -- what is refused -----------------------------------------------------------------------------------------------


def refusal(tmp_path: Path, name: str, match: str, kind: type[ModelError] = ModelUnsupported, **own: Any) -> None:
    write_original(tmp_path / "x.gguf", name, "F32", **own)
    with pytest.raises(kind, match=match) as raised:
        convert(tmp_path / "x.gguf", tmp_path / "made")
    assert raised.value.remedy and "\n" not in str(raised.value) and "x.gguf" in str(raised.value)


TENSORS = {
    "qwen3moe": ("ffn_gate_inp.weight", "ffn_down_exps.weight"),
    "gemma3": ("post_ffw_norm.weight", "attn_q_norm.weight"),
    "gpt-oss": ("attn_sinks.weight", "ffn_up_exps.bias"),
    "mixtral": ("ffn_gate_exps.weight", "attn_k.weight"),
    "qwen2moe": ("ffn_gate_inp_shexp.weight", "attn_v.bias"),
    "phi3": ("attn_qkv.weight", "ffn_up.weight"),
    "olmo2": ("attn_k_norm.weight", "post_attention_norm.weight"),
    "glm4": ("attn_q.bias", "post_ffw_norm.weight"),
    "deepseek2": ("attn_k_b.weight", "attn_v_b.weight", "ffn_gate_shexp.weight"),
    "deepseek2 with sigmoid": ("exp_probs_b.bias", "attn_q_a_norm.weight"),
}


@pytest.mark.parametrize(("name", "tensor"), [(name, one) for name, both in TENSORS.items() for one in both])
def test_a_tensor_that_is_missing_or_has_another_size_is_named(name: str, tensor: str, tmp_path: Path):
    last = f"blk.1.{tensor}"

    def lacking(theirs: str, stored: Array) -> Array | None:
        return None if theirs == last else stored

    def shorter(theirs: str, stored: Array) -> Array | None:
        return np.ascontiguousarray(stored[..., :-1]) if theirs == last else stored

    refusal(tmp_path, name, f"damaged: it lacks tensor {last}", WeightsError, change=lacking)
    refusal(
        tmp_path, name, rf"tensor {last} has the shape \(.*\), by its metadata it has \(", WeightsError, change=shorter
    )


KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "scaling of experts": ("qwen3moe", {"expert_weights_scale": 2.5}, "it has 'qwen3moe.expert_weights_scale'"),
    "sigmoid": ("qwen3moe", {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}, "qwen3moe.expert_gating_func'"),
    "no scaling": ("qwen3moe", {"rope_scaling_factor": 4.0}, "type 'linear', which mlx-lm's qwen3_moe has not"),
    "softcap": ("gemma3", {"final_logit_softcapping": 30.0}, "it has 'gemma3.final_logit_softcapping'"),
    "pattern": ("gemma3", {"sliding_window_pattern": [True] * 4 + [False, False, True]}, "is not in every so many"),
    "one kind": ("gpt-oss", {"sliding_window_pattern": [True, True]}, "its layers have one kind of attention"),
    "mscale": ("gpt-oss", {"rope_scaling_yarn_log_mul": 0.1}, "it has 'gpt-oss.rope.scaling.yarn_log_multiplier'"),
    "growth": ("phi3 with a long context", {"rope_scaling_attn_factors": 1.5}, "attn_factor is not 1.1339"),
    "widths": ("olmo2", {"feed_forward_length": [512, 256]}, "olmo2.feed_forward_length is another in each layer"),
    "heads": ("qwen2", {"key_length": 128, "value_length": 128}, "mlx-lm's qwen2 has no width of heads of its own"),
    "no yarn": ("mistral3", {"rope_scaling_type": gguf.RopeScalingType.LINEAR}, "without rope.scaling.type 'yarn'"),
}


@pytest.mark.parametrize("case", KEYS)
def test_what_mlx_lm_does_not_compute_is_named(case: str, tmp_path: Path):
    name, values, match = KEYS[case]

    def of_wider_heads(theirs: str, stored: Array) -> Array:
        part = theirs.partition(".attn_")[2]
        wide = part.startswith(("q.", "k.", "v.", "output."))
        return np.repeat(stored, 2, axis=int(part.startswith("output."))) if wide else stored

    refusal(tmp_path, name, match, values=values, **({"change": of_wider_heads} if case == "heads" else {}))


DAMAGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "more experts than there are": ("qwen3moe", {"expert_used_count": 5}, "expert_used_count is above its"),
    "uneven groups": ("deepseek2", {"expert_group_count": 3}, "do not go with its expert_count"),
    "groups of one": ("deepseek2 with sigmoid", {"expert_group_count": 8}, "do not go with its expert_count"),
    "more groups than there are": ("deepseek2", {"expert_group_used_count": 2}, "do not go with its expert_count"),
    "half a pair": ("phi3", {"rope_dimension_count": 47}, "rope.dimension_count is 47, of heads 64 wide"),
    "wider than a head": ("glm4", {"rope_dimension_count": 66}, "rope.dimension_count is 66, of heads 64 wide"),
    "beyond 32 bits": (
        "mistral3",
        {"rope_scaling_orig_ctx_len": 1 << 31},
        "is 2147483648, not a number from 1 to 2147",
    ),
    "no base": ("qwen3", {"rope_freq_base": 0.0}, "its rope.freq_base is 0.0"),
}
"""What mlx-lm's model files take, and fail with when they compute."""


@pytest.mark.parametrize("case", DAMAGE)
def test_numbers_that_do_not_go_together_are_damage(case: str, tmp_path: Path):
    name, values, match = DAMAGE[case]
    refusal(tmp_path, name, match, WeightsError, values=values)


VALUES = (
    True, 0, 1, 3, 100, -1, 1 << 31, 1 << 62, (1 << 64) - 1, 0.0, 0.5, -1.0, 1e-45, 1e38, 1.7e308, math.nan, math.inf,
    "", "yarn", "llama3", "\x1b[31mx\n" * 9000, [], ["a", "b"], [["a"]], array.array("i"), array.array("B", [0, 1]),
    array.array("f", [math.nan] * 7), array.array("Q", [(1 << 64) - 1] * 2), None,
)  # fmt: skip


@pytest.mark.parametrize("name", ORIGINALS)
def test_any_value_of_a_key_is_taken_or_refused_in_one_line(name: str, tmp_path: Path):
    write_original(tmp_path / "x.gguf", name, "F16")
    data = (tmp_path / "x.gguf").read_bytes()
    header = parse_header("x.gguf", len(data), io.BytesIO(data).read)
    read: set[str] = set()

    class Recording(Metadata):
        def raw(self, key: str) -> Any:
            read.add(self._whole(key))
            return super().raw(key)

    def config(values: dict[str, Any]) -> dict[str, Any]:
        metadata = Recording("x.gguf", {key: value for key, value in values.items() if value is not None})
        return config_of_header(metadata, name_tensors(metadata, header), ORIGINALS[name].factors, [2])

    config(header.metadata)
    for key in sorted({*read, *header.metadata}):
        for value in VALUES:
            try:
                json.dumps(config({**header.metadata, key: value}), allow_nan=False)
            except ModelError as error:
                assert str(error).isprintable() and "x.gguf" in str(error) and len(str(error)) < 2000
    assert len(read) > 15


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path):
    values = {
        "rope_scaling_finetuned": True, "rope_scaling_attn_factors": 1.0, "logit_scale": 0.0, "causal_attention": True,
        "feed_forward_length": [512, 512], "head_count_kv": [2, 2], "expert_weights_scale": 1.0,
    }  # fmt: skip
    plain = write_original(tmp_path / "x.gguf", "llama", "F32")
    convert(tmp_path / "x.gguf", tmp_path / "plain")
    write_original(tmp_path / "x.gguf", "llama", "F32", values=values)
    convert(tmp_path / "x.gguf", tmp_path / "made")
    made, wanted = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("made", "plain"))
    assert made == wanted and made["intermediate_size"] == plain.config["intermediate_size"]


def config_of(tmp_path: Path, name: str, **values: Any) -> dict[str, Any]:
    write_original(tmp_path / "x.gguf", name, "F32", values=values)
    shutil.rmtree(tmp_path / "made", ignore_errors=True)
    convert(tmp_path / "x.gguf", tmp_path / "made")
    found: dict[str, Any] = json.loads((tmp_path / "made" / "config.json").read_text())
    return found


def test_a_vector_may_stand_for_a_matrix_of_one_row(tmp_path: Path):
    def flat(theirs: str, stored: Array) -> Array:
        return stored[0] if theirs.endswith("ffn_gate_inp_shexp.weight") else stored

    original = write_original(tmp_path / "x.gguf", "qwen2moe", "F32", change=flat)
    convert(tmp_path / "x.gguf", tmp_path / "made")
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    assert np.array_equal(weights_of(tmp_path / "made")[name], original.weights[name])


def test_keys_that_are_not_finite_are_damage(tmp_path: Path):
    """Those that are joined do not pass the check of blocks."""

    def damaged(theirs: str, stored: Array) -> Array:
        return stored if theirs != "blk.2.attn_k_b.weight" else np.full_like(stored, np.inf)

    refusal(tmp_path, "deepseek2", "blk.2.attn_k_b.weight has a weight that is not", WeightsError, change=damaged)


@pytest.mark.grows
@pytest.mark.parametrize("name", ORIGINALS)
def test_mutations_of_a_header_are_taken_or_refused_in_one_line(name: str, tmp_path: Path):
    """Where metadata of the architecture and shapes of tensors lie."""
    write_original(tmp_path / "x.gguf", name, "F16")
    data = (tmp_path / "x.gguf").read_bytes()
    header = parse_header("x.gguf", len(data), io.BytesIO(data).read)
    start, prefix = header.tensors[0].start, f"{header.metadata['general.architecture']}.".encode()
    keys = [at for at in range(start) if data.startswith(prefix, at)]
    places = [at + i for at in keys for i in range(60)] + list(range(data.find(b"blk.0.") - 100, start - 1))
    numbers = st.sampled_from([0, 1, 2, 3, 4, 8, 128, 255]) | st.integers(0, 255)

    @examples(40, soak=2000)
    @given(st.lists(st.tuples(st.sampled_from(places), numbers), min_size=1, max_size=3))
    def check(changes: list[tuple[int, int]]) -> None:
        mutated = bytearray(data[:start])
        for at, byte in changes:
            mutated[at] = byte
        try:
            found = parse_header("x.gguf", len(data), io.BytesIO(mutated + data[start : start + 64]).read)
            metadata = Metadata("x.gguf", found.metadata)
            assert config_of_header(metadata, name_tensors(metadata, found), ORIGINALS[name].factors, [2])["model_type"]
        except ModelError as error:
            assert str(error).isprintable() and "x.gguf" in str(error)

    check()


def test_windows(tmp_path: Path):
    """Gemma 2's are not computed by mlx-lm, so the context ends where they would begin to matter."""
    assert config_of(tmp_path, "gemma2")["max_position_embeddings"] == 256
    assert config_of(tmp_path, "gemma3", sliding_window=0)["sliding_window_pattern"] == 1
    assert config_of(tmp_path, "gemma3", sliding_window_pattern=3)["sliding_window_pattern"] == 3
    pattern = [False, True]
    assert config_of(tmp_path, "gpt-oss", sliding_window_pattern=pattern)["layer_types"][0] == "full_attention"
