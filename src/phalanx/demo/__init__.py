"""The bundled demo model: a 7.3 M-parameter Qwen3 in mlx-lm's file format, trained by this project on its own text.

It exists so that everything can be shown and tested on real text without a download. `model/MODEL_CARD.md` says what
it can and cannot do; `tools/demo_model/` builds it. This module knows where the files lie, and nothing else.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Folder with config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json."""

__all__ = ["MODEL_DIR"]
