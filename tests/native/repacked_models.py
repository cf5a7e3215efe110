"""Loads models whose weights are repacked, and the same ones whose do not; prints in what they differ, as JSON.

python tests/native/repacked_models.py FAMILY[/MODE[BITS]][@DTYPE] ...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from support.models import make_model

from phalanx.kernels import install
from phalanx.model.cpu.repack import RepackedEmbedding
from phalanx.model.loading import load as loading

TOKENS = mx.array([[7, 11, 30, 5, 80, 41, 9, 100, 23, 17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]])
BATCH = 20
"""Rows that a product meets: others than repacked matrices are repacked from eight on."""


def load(path: Path, dtype: str) -> Any:
    return loading.load(path, dtype=dtype, guard=0, trust_remote_code=False, on_progress=lambda *_: None).model


def logits(model: Any, tokens: mx.array = TOKENS) -> Any:
    return np.array(model(tokens).astype(mx.float32))


def compare(name: str, folder: Path) -> dict[str, Any]:
    family, _, dtype = name.partition("@")
    family, _, format = family.partition("/")
    mode, bits = ("affine", int(format)) if format.isdigit() else (format, 4)
    group = 16 if mode == "nvfp4" else 32
    how = {"mode": mode, "bits": bits, "group_size": group} if format else None
    path = make_model(family, folder / family, quantize=how, dtype=mx.bfloat16)
    model = load(path, dtype or "auto")
    turns = install.repacks
    install.repacks = lambda *_: False
    plain = load(path, dtype or "auto")
    install.repacks = turns
    parameters = dict(tree_flatten(model.parameters()))
    found, wanted = logits(model), logits(plain)
    refused = True
    if (table := next((m for m in model.modules() if isinstance(m, RepackedEmbedding)), None)) is not None:
        how = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}
        try:
            mx.eval(mx.dequantize(table["weight"][:16], table["scales"][:16], _first(table.get("biases")), **how))
            refused = False
        except ValueError:
            pass
    alone = logits(model, TOKENS[:1, :3])  # fewer rows than are repacked where they do not lie so
    return {
        "repacked": sorted(key for key, array in parameters.items() if array.dtype == mx.int32),
        "not": sorted(key for key, array in parameters.items() if array.dtype == mx.uint32),
        "refused": refused,
        "same": bool(np.array_equal(found, wanted)),
        "same alone": bool(np.array_equal(alone, found[:1, :3])),
        "distance": _distance(found, STOCK[name]),
        "plain distance": _distance(wanted, STOCK[name]),
    }


def _first(array: mx.array | None) -> mx.array | None:
    return None if array is None else array[:16]


STOCK: dict[str, Any] = {}


def stock(name: str, folder: Path) -> None:
    """What MLX itself computes, in float32."""
    family = name.partition("@")[0]
    family, _, format = family.partition("/")
    mode, bits = ("affine", int(format)) if format.isdigit() else (format, 4)
    how = {"mode": mode, "bits": bits, "group_size": 16 if mode == "nvfp4" else 32} if format else None
    path = make_model(family, folder / family, quantize=how, dtype=mx.bfloat16)
    model = load_model(path)[0]
    model.apply(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a)
    STOCK[name] = logits(model)


def _distance(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> None:
    names = sys.argv[1:]
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for at, name in enumerate(names):
            stock(name, Path(directory) / f"{at}")
        install.install("exact", 2)
        for at, name in enumerate(names):
            found[name] = compare(name, Path(directory) / f"{at}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
