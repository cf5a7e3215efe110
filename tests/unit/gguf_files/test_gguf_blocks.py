"""Blocks of weights: exactly those of the `gguf` package, which are ggml's, or near them where that is said."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.gguf_files import E2M1, HALVES, OWN, TYPES, dequantised, random_blocks

from phalanx.errors import WeightsError
from phalanx.model.gguf import gguf_blocks
from phalanx.model.gguf.gguf_blocks import BITS, Groups, pack, scales_dtypes, to_groups

AGAIN = ("Q2_K", "Q6_K", "IQ2_XS", "IQ2_S")
EXACT = [kind for kind in BITS if kind not in AGAIN]
GOLDEN = {
    "IQ4_NL": "60608f4d94264dc9",
    "IQ4_XS": "74a9edaae95aa1e6",
    "IQ3_S": "79326059d13be28b",
    "IQ3_XXS": "0b782ccca3a44e91",
    "IQ2_S": "e27f6072b86c8e51",
    "IQ2_XS": "c6a59bc8f8eed597",
    "IQ2_XXS": "882897a739dc635f",
    "IQ1_M": "c8d40f2048b951bf",
    "IQ1_S": "fe2eb80603364c0f",
    "TQ1_0": "13a3fa09d6cb4705",
    "TQ2_0": "33880cc5d2144cfd",
}
"""Type -> SHA-256 of what ggml's own `dequantize_row_TYPE` (llama-cpp-python 0.3.36) makes of `fixed_blocks`."""


def computed(found: Groups) -> np.ndarray:
    """What MLX computes, in float32."""
    if found.biases is None:
        values = E2M1[found.codes & 7] * np.where(found.codes & 8, -1, 1)
        return np.ldexp(values, found.scales[:, None].astype(int) - 127)
    scales, biases = (part.astype(np.float32)[:, None] for part in (found.scales, found.biases))
    return found.codes * scales + biases


def theirs(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The `gguf` package's weights, by groups."""
    return gguf.quants.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[kind]).reshape(-1, 32)


def some_blocks(kind: str, seed: int, rows: int = 64) -> np.ndarray:
    return random_blocks(kind, rows, 256, np.random.default_rng(seed), 0.1).reshape(-1, TYPES[kind][2])


def fixed_blocks(kind: str) -> np.ndarray:
    """Blocks of hashed codes whose scales are of a usual size; the same for ever."""
    nbytes = TYPES[kind][2]
    blocks = np.frombuffer(hashlib.shake_128(kind.encode()).digest(64 * nbytes), np.uint8).reshape(64, nbytes).copy()
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = (0x66, 0x2E)
    if kind == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 15 | 0x20
    return blocks


@pytest.mark.parametrize("kind", EXACT)
def test_exact_types_keep_every_bit(kind: str):
    blocks = some_blocks(kind, 1)
    found, wanted = to_groups("t", kind, blocks), theirs(kind, blocks)
    assert np.array_equal(computed(found), wanted) and np.abs(wanted).max() > 0.1
    assert found.error == 0 and found.codes.max() < 2 ** BITS[kind]
    assert len(np.unique(wanted)) > 2


@pytest.mark.parametrize("kind", AGAIN)
def test_the_others_are_quantised_again_and_their_error_is_measured(kind: str):
    blocks = some_blocks(kind, 2)
    found, wanted = to_groups("t", kind, blocks), theirs(kind, blocks)
    off = np.abs(computed(found) - wanted)
    assert found.error == off.max() > 0
    half_a_step = (wanted.max(axis=1) - wanted.min(axis=1)) / 255 / 2
    float16 = np.spacing(np.abs(wanted).max(axis=1).astype(np.float16)).astype(np.float32)
    assert (off.max(axis=1) <= half_a_step * 1.01 + float16).all()
    assert np.median(off.max(axis=1) / half_a_step) < 1.01


@pytest.mark.parametrize("kind", BITS)
@examples(30, soak=2000)
@given(data=st.data())
def test_any_bytes_are_exact_or_refused(kind: str, data: st.DataObject):
    """Scales of any size, 0, subnormal, infinite and NaN among them."""
    size = 3 * TYPES[kind][2] * (256 // TYPES[kind][1])
    seed = data.draw(st.binary(min_size=1, max_size=64))
    blocks = np.frombuffer((seed * size)[:size], np.uint8).reshape(-1, TYPES[kind][2]).copy()
    for at in HALVES[kind]:
        number = data.draw(st.sampled_from([0, 1, 0x8001, 0x03FF, 0x2E66, 0xAE66, 0x5BFF, 0x7BFF, 0x7C00, 0xFE00]))
        blocks[:, at : at + 2] = (number & 255, number >> 8)
    with np.errstate(all="ignore"):
        wanted = theirs(kind, blocks)
    try:
        found = to_groups("t", kind, blocks)
    except WeightsError:
        assert not np.abs(wanted).max() < 400  # NaN, infinite, or so large that a bias of 16 bits may be
        return
    off = np.abs(computed(found) - wanted).max()
    assert off == found.error and (kind in AGAIN or off == 0)


@pytest.mark.parametrize("kind", GOLDEN)
def test_weights_of_rare_types_are_those_of_ggmls_c(kind: str):
    weights = theirs(kind, fixed_blocks(kind)) + 0  # without -0
    assert hashlib.sha256(weights.tobytes()).hexdigest()[:16] == GOLDEN[kind]


@pytest.mark.parametrize("kind", OWN)
def test_weights_of_frequent_types_are_those_of_a_second_implementation(kind: str):
    blocks = some_blocks(kind, 7, 8)
    assert np.array_equal(theirs(kind, blocks), dequantised(kind, blocks).reshape(-1, 32))


def test_every_type_has_one_of_both_proofs():
    assert {*GOLDEN, *OWN} == {*BITS}


@pytest.mark.parametrize("kind", ["Q6_K", "IQ3_S"])
def test_pieces_make_no_difference(kind: str, monkeypatch: pytest.MonkeyPatch):
    blocks = some_blocks(kind, 5)
    whole = to_groups("t", kind, blocks)
    monkeypatch.setattr(gguf_blocks, "PIECE", 1000)
    for a, b in zip(whole, to_groups("t", kind, blocks), strict=True):
        assert np.array_equal(a, b)


def test_equal_weights_of_a_group_are_exact():
    blocks = some_blocks("Q6_K", 3)
    blocks[:, 208:] = 0
    found = to_groups("t", "Q6_K", blocks)
    assert found.error == 0 and not computed(found).any()


@pytest.mark.parametrize("kind", BITS)
def test_a_scale_that_is_not_finite_is_damage(kind: str):
    blocks = some_blocks(kind, 4)
    if kind == "MXFP4":
        blocks[1, 0] = 253
    elif kind == "IQ1_M":
        blocks[1, 49:56:2] &= 15
        blocks[1, 53] |= 0xC0
        blocks[1, 55] |= 0x70
    else:
        at = HALVES[kind][0]
        blocks[1, at : at + 2] = (0x00, 0x7C)  # infinity
    with pytest.raises(WeightsError, match="t has a scale that is not finite"):
        to_groups("t", kind, blocks)


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_codes_are_packed_from_the_lowest_bit_on(bits: int):
    codes = np.random.default_rng(5).integers(0, 2**bits, (3, 32), dtype=np.uint8)
    number = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    assert pack(codes, bits).tobytes() == b"".join(one.to_bytes(4 * bits, "little") for one in number)


@pytest.mark.parametrize("kind", BITS)
def test_scales_have_the_dtype_that_is_said(kind: str):
    found = to_groups("t", kind, some_blocks(kind, 6, 1))
    parts = {"scales": found.scales, "biases": found.biases}
    names = {np.uint8: "U8", np.float16: "F16", np.float32: "F32"}
    said = {name: names[part.dtype.type] for name, part in parts.items() if part is not None}
    assert scales_dtypes(kind) == said
