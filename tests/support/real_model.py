"""The real trained model among the tests, and what mlx-lm answers on it.

As a script: `cd tests && python -m support.real_model` records mlx-lm's answers anew, in float32, one at a time.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.reference import job, reference
from tokenizers import Tokenizer

from phalanx.catalog.local_models import packaged_directory
from phalanx.catalog.packaged import MODULE, fetch_gguf
from phalanx.errors import ModelError
from phalanx.model.loading.smollm2 import fetch

ANSWERS = Path(__file__).with_name("real_model_answers.json")
MAX_TOKENS = 64
CHATS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "What is 7 plus 5?",
    "Write a haiku about autumn leaves.",
    "List the days of the week.",
    "Explain what a prime number is.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "Say 'naïve café – 東京 🙂' again.",
]


def real_model() -> Path:
    """The model's directory, fetched at the first call. Skips the test where there is no network, except in CI.

    `FETCH=0` fetches nothing, since `make test` leaves nothing outside the repository.
    """
    directory = packaged_directory()
    if os.environ.get("FETCH") == "0" and not directory.exists():
        pytest.skip("the real model is not at hand; make test-rest fetches it")
    try:
        fetch(directory)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model cannot be fetched: {error}")
    return directory


def real_gguf(folder: Path) -> Path:
    """The GGUF file that the model is made from, fetched into a folder. Skips as `real_model` does."""
    if os.environ.get("FETCH") == "0" and importlib.util.find_spec(MODULE) is None:
        pytest.skip("the real model's file is not at hand; make test-rest fetches it")
    try:
        return fetch_gguf(folder)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model's file cannot be fetched: {error}")


def recorded() -> list[dict[str, Any]]:
    """Per chat its `user` message, the `prompt` and mlx-lm's greedy `tokens`, as ids."""
    answers: list[dict[str, Any]] = json.loads(ANSWERS.read_text())
    return answers


def record() -> None:
    """Ask mlx-lm."""

    path = real_model()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    texts = [
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{chat}<|im_end|>\n<|im_start|>assistant\n"
        for chat in CHATS
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    stop = json.loads((path / "config.json").read_text())["eos_token_id"]
    found = reference(path, [job(prompt, MAX_TOKENS, [stop]) for prompt in prompts])
    entries = [
        json.dumps({"user": chat, "prompt": prompt, "tokens": answer["tokens"], "min_gap": min(answer["gaps"])})
        for chat, prompt, answer in zip(CHATS, prompts, found, strict=True)
    ]
    ANSWERS.write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    record()
