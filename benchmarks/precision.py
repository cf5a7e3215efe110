"""The accuracy of `--cpu-precision` and `--dtype bfloat16`: held-out loss and greedy agreement of the demo model.

The model is quantised to 4 bits, as most served models are. (With the bundled 8 bits, `fast` is not faster on every
processor.) Each variant runs in a subprocess over the same held-out text (`tools/demo_model`): MLX's own kernels,
exact, bfloat16 (scales included), fast. Agreement is the share of positions with the same most likely token as MLX. The
last line is JSON.
"""

from __future__ import annotations

import phalanx.kernels.preload  # noqa: F401  (before anything loads MLX)

# isort: split
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_map  # noqa: E402
from mlx_lm.utils import dequantize_model, load_model, quantize_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from phalanx.demo import MODEL_DIR  # noqa: E402
from phalanx.kernels.install import install  # noqa: E402
from tools.demo_model import corpus, rows  # noqa: E402

WAYS = ("MLX", "exact", "bfloat16", "fast")
DOCUMENTS = 150
LENGTH, BATCH = 256, 8


def text() -> np.ndarray:
    """Held-out rows of token ids, [n, LENGTH]."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    packed = rows.pack(rows.encode(tokenizer, corpus.HELD_OUT_SEED, DOCUMENTS))[LENGTH]
    return np.asarray(packed[: len(packed) // BATCH * BATCH], np.int32)


def model(bits: int) -> Any:
    """The demo model with `bits` bits per weight and float32 activations."""
    loaded, config = load_model(MODEL_DIR)
    plain = dequantize_model(loaded)
    plain.update(tree_map(lambda p: p.astype(mx.float32), plain.parameters()))
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    quantised: nn.Module = quantize_model(plain, config, group_size=64, bits=bits)[0]
    return quantised


def compute(way: str, bits: int, out: Path) -> None:
    """Write the loss in nats per token, and the most likely token after every position."""
    network = model(bits)
    if way == "bfloat16":
        network.set_dtype(mx.bfloat16)
    mx.eval(network.parameters())
    if way != "MLX" and install("fast" if way == "fast" else "exact", 2) is None:
        raise SystemExit("the native kernels are not installed")
    loss, count, best = 0.0, 0, []
    ids = text()
    for start in range(0, len(ids), BATCH):
        batch = mx.array(ids[start : start + BATCH])
        scores = network(batch[:, :-1]).astype(mx.float32)
        chosen = mx.take_along_axis(scores, batch[:, 1:, None], axis=-1)[..., 0]
        loss += float(np.array(mx.sum(mx.logsumexp(scores, axis=-1) - chosen)))
        best.append(np.array(mx.argmax(scores, axis=-1)))
        count += chosen.size
    np.savez(out, loss=loss / count, best=np.concatenate(best))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        compute(options.way, options.bits, options.out)
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            out = Path(folder) / f"{way}.npz"
            environment = {**os.environ, "PHALANX_CPU_KERNELS": "0"} if way == "MLX" else None
            command = [sys.executable, __file__, "--bits", str(options.bits), "--way", way, "--out", str(out)]
            subprocess.run(command, check=True, env=environment)
            with np.load(out) as saved:
                found[way] = {"loss": float(saved["loss"]), "best": saved["best"]}
    results = {}
    for way, values in found.items():
        agreement = float((values["best"] == found["MLX"]["best"]).mean())
        perplexity = float(np.exp(values["loss"]))
        results[way] = {"loss": values["loss"], "perplexity": perplexity, "agreement": agreement}
        print(f"{way:8} loss {values['loss']:.5f}  perplexity {perplexity:.4f}  agreement {100 * agreement:.3f} %")
    positions = int(found["MLX"]["best"].size)
    print(json.dumps({"benchmark": "precision", "bits": options.bits, "positions": positions, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
