"""Writes GGUF files, and dequantises their blocks one position after another, as ggml's C code does; those of rare
types with the `gguf` package.

Shares nothing with `phalanx.model.gguf`.
"""

from __future__ import annotations

import array
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2), "MXFP4": (39, 32, 17),
    "Q8_K": (15, 256, 292), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
}  # fmt: skip
"""Name -> number, weights and bytes of a block."""
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ3_XXS": (0,),
    "IQ1_S": (0,), "IQ4_NL": (0,), "IQ3_S": (0,), "IQ2_S": (0,), "IQ4_XS": (0,), "IQ1_M": (), "TQ1_0": (52,),
    "TQ2_0": (64,),
}  # fmt: skip
"""Where a block has numbers of 16 bits."""
OWN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types that this file dequantises itself."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ARRAY_TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11, "d": 12}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(one: Any) -> bytes:
    """A value of metadata with its type before it."""
    match one:
        case bool():
            return struct.pack("<IB", 7, one)
        case int():
            return struct.pack("<II", 4, one)
        case float():
            return struct.pack("<If", 6, one)
        case str():
            return struct.pack("<I", 8) + text(one)
        case array.array():
            return struct.pack("<IIQ", 9, ARRAY_TYPES[one.typecode], len(one)) + one.tobytes()
    return struct.pack("<IIQ", 9, 8, len(one)) + b"".join(map(text, one))


def tensor(name: str, kind: int, shape: Sequence[int], offset: int) -> bytes:
    """An entry of a tensor; `shape` has the outermost axis first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def header(metadata: Sequence[bytes], tensors: Sequence[bytes], *, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata)) + b"".join([*metadata, *tensors])


def gguf(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Array]], alignment: int = 32) -> bytes:
    """A file.

    Args:
        tensors: by name the type, and the weights: for blocks uint8 [rows, blocks in a row, bytes].
    """
    entries, data = [], b""
    for name, (kind, weights) in tensors.items():
        number, values, _ = TYPES[kind]
        shape = weights.shape if values == 1 else (weights.shape[0], weights.shape[1] * values)
        entries.append(tensor(name, number, shape, len(data)))
        data += weights.tobytes()
        data += bytes(-len(data) % alignment)
    start = header([text(key) + value(one) for key, one in metadata.items()], entries)
    return start + bytes(-len(start) % alignment) + data


def random_blocks(kind: str, rows: int, width: int, rng: np.random.Generator, scale: float = 0.01) -> Array:
    """Blocks of random codes: uint8 [rows, blocks in a row, bytes]."""
    _, values, nbytes = TYPES[kind]
    blocks = rng.integers(0, 256, (rows, width // values, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        d = (rng.standard_normal(blocks.shape[:2]) * scale).astype("<f2")
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 127 + round(math.log2(scale)) + rng.integers(0, 2, blocks.shape[:2])
    if kind == "IQ1_M":
        d = (rng.standard_normal(blocks.shape[:2]) * scale).astype("<f2").view(np.uint16)
        for i in range(4):
            blocks[..., 49 + 2 * i] = (blocks[..., 49 + 2 * i] & 15) | (d >> 4 * i << 4 & 0xF0).astype(np.uint8)
    return blocks


def dequantised(kind: str, blocks: Array) -> Array:
    """The weights of blocks, in float32: [blocks, weights of a block]."""
    if kind not in OWN:
        rows: Array = library.quants.dequantize(blocks.reshape(1, -1), library.GGMLQuantizationType[kind])
        return rows.reshape(-1, TYPES[kind][1])
    columns = blocks.reshape(-1, TYPES[kind][2]).T
    return np.stack([_weight(kind, columns, i) for i in range(TYPES[kind][1])], axis=1)


def _f16(b: Array, at: int) -> Array:
    found: Array = (b[at].astype(np.uint16) | (b[at + 1].astype(np.uint16) << 8)).view(np.float16).astype(np.float32)
    return found


def _signed(b: Array) -> Array:
    return b.view(np.int8).astype(np.float32)


def _weight(kind: str, b: Array, i: int) -> Any:
    """Weight i of each block."""
    half, j = divmod(i, 16)
    match kind:
        case "Q4_0":
            return _f16(b, 0) * (((b[2 + j] >> 4 * half) & 15).astype(np.float32) - 8)
        case "Q4_1":
            return _f16(b, 0) * ((b[4 + j] >> 4 * half) & 15) + _f16(b, 2)
        case "Q5_0":
            code = ((b[6 + j] >> 4 * half) & 15) | (((b[2 + i // 8] >> i % 8) & 1) << 4)
            return _f16(b, 0) * (code.astype(np.float32) - 16)
        case "Q5_1":
            code = ((b[8 + j] >> 4 * half) & 15) | (((b[4 + i // 8] >> i % 8) & 1) << 4)
            return _f16(b, 0) * code + _f16(b, 2)
        case "Q8_0":
            return _f16(b, 0) * _signed(b[2 + i])
        case "MXFP4":
            code = (b[1 + j] >> 4 * half) & 15
            return np.ldexp(E2M1[code & 7] * np.where(code & 8, -1, 1), b[0].astype(np.int32) - 127).astype(np.float32)
    return _weight_of_super_block(kind, b, i)


def _weight_of_super_block(kind: str, b: Array, i: int) -> Any:
    group, part, l = i // 32, i // 128, i % 32  # noqa: E741  # ggml's own name
    shift = 2 * (i % 128 // 32)
    match kind:
        case "Q2_K":
            packed = b[i // 16]
            code = (b[16 + 32 * part + l] >> shift) & 3
            return _f16(b, 80) * (packed & 15) * code - _f16(b, 82) * (packed >> 4)
        case "Q3_K":
            s = i // 16
            low = (b[96 + s] & 15) if s < 8 else (b[96 + s - 8] >> 4)
            scale = (low | (((b[104 + s % 4] >> 2 * (s // 4)) & 3) << 4)).astype(np.float32) - 32
            missing = np.where(b[l] & (1 << group), 0, 4)
            return _f16(b, 108) * scale * (((b[32 + 32 * part + l] >> shift) & 3).astype(np.float32) - missing)
        case "Q4_K" | "Q5_K":
            q, g = b[4:16], group
            scale = q[g] & 63 if g < 4 else (q[g + 4] & 15) | ((q[g - 4] >> 6) << 4)
            least = q[g + 4] & 63 if g < 4 else (q[g + 4] >> 4) | ((q[g] >> 6) << 4)
            base = 16 if kind == "Q4_K" else 48
            code = (b[base + 32 * (group // 2) + l] >> 4 * (group % 2)) & 15
            if kind == "Q5_K":
                code = code + (((b[16 + l] >> group) & 1) << 4)
            return _f16(b, 0) * scale * code - _f16(b, 2) * least
        case "Q6_K":
            at, quarter = l + 32 * (i % 64 // 32), i % 128 // 32
            low = (b[64 * part + at] >> 4 * (quarter // 2)) & 15
            code = (low | (((b[128 + 32 * part + l] >> shift) & 3) << 4)).astype(np.float32) - 32
            return _f16(b, 208) * _signed(b[192 + i // 16]) * code
    raise KeyError(kind)


# -- tiny models ---------------------------------------------------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, LAYERS, CONTEXT = 256, 4, 2, 2, 512
CONTROLS = ["<pad>", "<s>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ t"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_letters() -> list[str]:
    """The 256 letters in which byte-level BPE writes bytes, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def tiny_metadata(architecture: str, **own: Any) -> dict[str, Any]:
    """Metadata of a model; `own` replaces values, by keys with __ for dots; None takes a key out."""
    tokens = [*CONTROLS, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    a = architecture
    found: dict[str, Any] = {
        "general.architecture": a, f"{a}.embedding_length": HIDDEN, f"{a}.block_count": LAYERS,
        f"{a}.feed_forward_length": HIDDEN, f"{a}.attention.head_count": HEADS, f"{a}.context_length": CONTEXT,
        f"{a}.attention.head_count_kv": KV_HEADS, f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": array.array("i", [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS))),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip
    found.update({key.replace("__", "."): one for key, one in own.items()})
    return {key: one for key, one in found.items() if one is not None}


def tiny_tensors(
    architecture: str, kind: str, rng: np.random.Generator, *, tied: bool = True
) -> dict[str, tuple[str, Array]]:
    """Random weights, matrices of a type and vectors in F32."""
    head = HIDDEN // HEADS
    rows = {"attn_q": HIDDEN, "attn_k": KV_HEADS * head, "attn_v": KV_HEADS * head}
    found: dict[str, tuple[str, Array]] = {}

    def matrix(name: str, n: int) -> None:
        if kind in HALVES:
            scale = {"Q4_0": 0.02, "MXFP4": 0.02, "TQ2_0": 0.05, "Q8_0": 0.001}.get(kind, 0.0004)
            found[f"{name}.weight"] = (kind, random_blocks(kind, n, HIDDEN, rng, scale))
        else:
            weights = (rng.standard_normal((n, HIDDEN)) * 0.08).astype(np.float32)
            found[f"{name}.weight"] = (kind, weights.astype("<f2") if kind == "F16" else weights)

    def vector(name: str, n: int, least: float = 1.0) -> None:
        found[name] = ("F32", (least + 0.1 * rng.standard_normal(n)).astype(np.float32))

    matrix("token_embd", len(CONTROLS) + 256 + len(MERGES))
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            matrix(f"blk.{layer}.{name}", rows.get(name, HIDDEN))
            if architecture == "qwen2" and name in rows:
                vector(f"blk.{layer}.{name}.bias", rows[name], 0.0)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{layer}.{name}.weight", HIDDEN)
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                vector(f"blk.{layer}.{name}.weight", head)
    vector("output_norm.weight", HIDDEN)
    if not tied:
        matrix("output", len(CONTROLS) + 256 + len(MERGES))
    return found


def write_tiny(
    file: Path,
    architecture: str = "llama",
    kind: str = "Q8_0",
    *,
    tied: bool = True,
    seed: int = 0,
    tensors: dict[str, tuple[str, Array]] | None = None,
    **own: Any,
) -> dict[str, tuple[str, Array]]:
    """Write a tiny model, of random weights unless they are given. Returns its tensors as the file has them."""
    tensors = tensors or tiny_tensors(architecture, kind, np.random.default_rng(seed), tied=tied)
    file.write_bytes(gguf(tiny_metadata(architecture, **own), tensors))
    return tensors


def write_parts(
    folder: Path,
    stem: str,
    count: int,
    *,
    seed: int = 0,
    kind: str = "Q8_0",
    wrong: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Write a tiny llama in several files, as `llama-gguf-split` names them.

    Args:
        wrong: by a file's number from 0 on, metadata in the place of what it should have; None takes a key out.
    """
    tensors = list(tiny_tensors("llama", kind, np.random.default_rng(seed)).items())
    files = []
    for part in range(count):
        own = {"split.no": part, "split.count": count, "split.tensors.count": len(tensors)}
        metadata = {**(tiny_metadata("llama") if part == 0 else {}), **own, **(wrong or {}).get(part, {})}
        metadata = {key: one for key, one in metadata.items() if one is not None}
        share = dict(tensors[part * len(tensors) // count : (part + 1) * len(tensors) // count])
        files.append(folder / f"{stem}-{part + 1:05}-of-{count:05}.gguf")
        files[-1].write_bytes(gguf(metadata, share))
    return files


def weights_of(kind: str, stored: Array) -> Array:
    """Weights in float32 by the reference: a matrix or a vector."""
    if kind in HALVES:
        return dequantised(kind, stored).reshape(len(stored), -1)
    return stored.astype(np.float32)


def unpaired(weights: Array, heads: int) -> Array:
    """Rows of q or k of a llama in the order of transformers: row 2i+j of a head becomes row i + j * (half a head)."""
    size = len(weights) // heads
    order = [h * size + 2 * (r % (size // 2)) + r // (size // 2) for h in range(heads) for r in range(size)]
    return weights[order]


def entries_of(folder: Path) -> list[str]:
    """What imports have left in the folder of imported models."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".locks") if folder.exists() else []
