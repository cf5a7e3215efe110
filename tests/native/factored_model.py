"""Imports a GGUF file of Q4_K and loads it with its scales as factors and as floats; prints what differs, as JSON.

python tests/native/factored_model.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import phalanx.kernels.preload  # noqa: F401  (before MLX)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from support.gguf_files import write_tiny

from phalanx.kernels import install
from phalanx.model.loading.load import load
from phalanx.model.loading.resolve import resolve

TOKENS = mx.array([[7, 11, 30, 5, 80, 41, 9, 100, 23, 17]])


def loaded() -> tuple[dict[str, mx.array], list[Any]]:
    """Parameters, and logits of many rows and of one."""
    path = resolve("x.gguf")
    model = load(path, dtype="auto", guard=0, trust_remote_code=False, on_progress=lambda *_: None).model
    return dict(tree_flatten(model.parameters())), [np.array(model(tokens)) for tokens in (TOKENS, TOKENS[:, :1])]


def main() -> None:
    install.install("exact", 2)
    write_tiny(Path("x.gguf"), "llama", "Q4_K")
    parameters, logits = loaded()
    install.factor = lambda *_: False
    plain, wanted = loaded()
    print(
        json.dumps(
            {
                "same": all(map(np.array_equal, logits, wanted)),
                "factored": all(one.dtype == mx.uint8 for name, one in parameters.items() if "proj.scales" in name),
                "bytes": sum(one.nbytes for one in parameters.values()),
                "plain bytes": sum(one.nbytes for one in plain.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
