"""The short names of models, all in one table."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

DEMO = "demo"
"""The bundled model."""
PACKAGED = "smollm2"
"""The model that comes from a package index, also where there is no hub (`packaged.py`)."""
HOSTS = ("huggingface.co/", "hf.co/")
"""Of the hub: Ollama's users write one of them before the name of a repository."""

SHORT_NAMES: Mapping[str, str] = {
    "qwen3:0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3:1.7b": "mlx-community/Qwen3-1.7B-4bit",
    "qwen3:4b": "mlx-community/Qwen3-4B-4bit",
    "qwen3:8b": "mlx-community/Qwen3-8B-4bit",
    "qwen3:14b": "mlx-community/Qwen3-14B-4bit",
    "qwen3:30b": "mlx-community/Qwen3-30B-A3B-4bit",
    "qwen3:32b": "mlx-community/Qwen3-32B-4bit",
    "llama3.2:1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2:3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.1:8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.3:70b": "mlx-community/Llama-3.3-70B-Instruct-4bit",
    "mistral:7b": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    "gemma3:1b": "mlx-community/gemma-3-1b-it-4bit",
    "gpt-oss:20b": "mlx-community/gpt-oss-20b-MXFP4-Q8",
}
"""Ollama's name of a model -> the hub's repository of the same model for MLX. A name here goes before a directory of
that name."""


def repository_of(name: str) -> str:
    """The repository that a name means: that of a short name, else the name itself without the hub's host."""
    return SHORT_NAMES.get(name, without_host(name))


def without_host(name: str) -> str:
    """A name without the hub's host before it."""
    return next((name.removeprefix(host) for host in HOSTS if name.startswith(host)), name)


def shortest(repository: str) -> str:
    """The short name of a repository, else its own."""
    return next((name for name, known in SHORT_NAMES.items() if known == repository), repository)


def similar(name: str) -> list[str]:
    """The names that may be meant by one that means no model: those of other sizes, else those spelled much alike."""
    known, wanted = [DEMO, PACKAGED, *SHORT_NAMES], name.lower()
    stem = wanted.partition(":")[0]
    sizes = [one for one in known if len(stem) > 1 and one.partition(":")[0].startswith(stem)]
    return sizes or get_close_matches(wanted, known)


def did_you_mean(name: str) -> str:
    """A question with the names of `similar`, and a blank after it; "" if there is none, or this is a name itself."""
    found = similar(name)
    if not found or name in found:
        return ""
    *others, last = (f"`{one}`" for one in found)
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}? "
