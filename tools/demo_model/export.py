"""Writes the model folder: weights quantised with MLX's affine scheme, configuration, generation defaults.

Scales, biases and norms stay float32: MLX's CPU backend is 10 to 30 times slower in 16 bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx
import torch
from tokenizers import Tokenizer

from . import corpus
from .network import Shape

GROUP = 64


def quantised(weights: dict[str, mx.array], bits: int) -> dict[str, mx.array]:
    """Every matrix as packed weight, scales and biases; vectors unchanged."""
    result: dict[str, mx.array] = {}
    for name, array in weights.items():
        if array.ndim != 2:
            result[name] = array
            continue
        packed, scales, biases = mx.quantize(array, group_size=GROUP, bits=bits)
        stem = name.removesuffix(".weight")
        result |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
    return result


def write(checkpoint: Path, folder: Path, bits: int) -> int:
    """Write the folder's model files (bits = 32: unquantised); returns their size in bytes, tokenizer included."""
    state = torch.load(checkpoint, weights_only=True)["network"]
    weights = {name: mx.array(tensor.float().numpy()) for name, tensor in state.items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(corpus.END_OF_TURN), tokenizer.token_to_id(corpus.END_OF_TEXT)]
    config: dict[str, object] = {
        **Shape().config(),
        "bos_token_id": None,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "torch_dtype": "float32",
    }
    if bits < 32:
        weights = quantised(weights, bits)
        config["quantization"] = config["quantization_config"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="folder that already holds tokenizer.json")
    parser.add_argument("--bits", type=int, default=8, choices=(4, 6, 8, 32))
    options = parser.parse_args()
    size = write(options.checkpoint, options.folder, options.bits)
    print(f"{options.folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
