"""Blocks of weights, by a second implementation that computes one position after another."""

from __future__ import annotations

import numpy as np
import pytest
from support.gguf_files import E2M1, HALVES, dequantised, random_blocks

from phalanx.errors import WeightsError
from phalanx.model.gguf.gguf_blocks import BITS, DEQUANTIZE, EXACT, pack, scales_dtypes, to_groups


def computed(kind: str, blocks: np.ndarray) -> np.ndarray:
    """What MLX computes, in float32."""
    found = to_groups("t", kind, blocks)
    if found.biases is None:
        values = E2M1[found.codes & 7] * np.where(found.codes & 8, -1, 1)
        return np.ldexp(values, found.scales[:, None].astype(int) - 127)
    scales, biases = (part.astype(np.float32)[:, None] for part in (found.scales, found.biases))
    return found.codes * scales + biases


@pytest.mark.parametrize("kind", EXACT)
def test_exact_types_keep_every_bit(kind: str):
    blocks = random_blocks(kind, 64, 256, np.random.default_rng(1), 0.1).reshape(-1, random_blocks_bytes(kind))
    wanted = dequantised(kind, blocks).reshape(-1, 32)
    assert np.array_equal(computed(kind, blocks), wanted) and np.abs(wanted).max() > 0.5
    assert to_groups("t", kind, blocks).codes.max() == 2 ** BITS[kind] - 1


def random_blocks_bytes(kind: str) -> int:
    return int(random_blocks(kind, 1, 256, np.random.default_rng(0)).shape[-1])


@pytest.mark.parametrize("kind", DEQUANTIZE)
def test_the_others_are_quantised_again_and_their_error_is_measured(kind: str):
    blocks = random_blocks(kind, 64, 256, np.random.default_rng(2), 0.1).reshape(-1, random_blocks_bytes(kind))
    wanted = dequantised(kind, blocks)
    assert np.array_equal(DEQUANTIZE[kind](blocks).reshape(wanted.shape), wanted)
    groups = wanted.reshape(-1, 32)
    off = np.abs(computed(kind, blocks) - groups)
    assert to_groups("t", kind, blocks).error == off.max() > 0
    half_a_step = (groups.max(axis=1) - groups.min(axis=1)) / 255 / 2
    assert (off.max(axis=1) <= half_a_step * 1.001).all()


def test_equal_weights_of_a_group_are_exact():
    blocks = random_blocks("Q6_K", 2, 256, np.random.default_rng(3))[:, 0]
    blocks[:, 208:] = 0
    assert to_groups("t", "Q6_K", blocks).error == 0 and not computed("Q6_K", blocks).any()


@pytest.mark.parametrize("kind", [*EXACT, *DEQUANTIZE])
def test_a_scale_that_is_not_finite_is_damage(kind: str):
    blocks = random_blocks(kind, 2, 256, np.random.default_rng(4))[:, 0]
    if kind == "MXFP4":
        blocks[1, 0] = 253
    else:
        at = HALVES[kind][0]
        blocks[1, at : at + 2] = (0x00, 0x7C)  # infinity
    with pytest.raises(WeightsError, match="t has a scale that is not finite"):
        to_groups("t", kind, blocks)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_codes_are_packed_from_the_lowest_bit_on(bits: int):
    codes = np.random.default_rng(5).integers(0, 2**bits, (3, 32), dtype=np.uint8)
    number = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    assert pack(codes, bits).tobytes() == b"".join(one.to_bytes(4 * bits, "little") for one in number)


def test_super_blocks_have_scales_of_32_bits():
    for kind in BITS:
        found = to_groups("t", kind, random_blocks(kind, 1, 256, np.random.default_rng(6))[:, 0])
        parts = {"scales": found.scales, "biases": found.biases}
        names = {np.uint8: "U8", np.float16: "F16", np.float32: "F32"}
        said = {name: names[part.dtype.type] for name, part in parts.items() if part is not None}
        assert scales_dtypes(kind) == said
        assert said["scales"] == ("U8" if kind == "MXFP4" else "F32" if kind[-1] == "K" else "F16")


@pytest.mark.parametrize("kind", BITS)
def test_the_reference_is_that_of_the_gguf_package(kind: str):
    library = pytest.importorskip("gguf")
    blocks = random_blocks(kind, 8, 256, np.random.default_rng(7), 0.1).reshape(-1, random_blocks_bytes(kind))
    theirs = library.quants.dequantize(blocks, library.GGMLQuantizationType[kind])
    assert np.array_equal(theirs, dequantised(kind, blocks))
