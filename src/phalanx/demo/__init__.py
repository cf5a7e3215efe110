"""The bundled demo model: a 7.3 M-parameter Qwen3 in mlx-lm's file format, trained by this project on its own text.

With it, phalanx can be shown and tested on real text without a download. `model/MODEL_CARD.md` describes its abilities
and limits; `tools/demo_model/` builds it. This module knows only the directory of the files.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Folder with config.json, model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json."""

__all__ = ["MODEL_DIR"]
