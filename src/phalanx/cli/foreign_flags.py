"""Flags of vLLM, SGLang, llama.cpp and Ollama that `phalanx serve` does not have, each with what does the same here."""

from __future__ import annotations

from collections.abc import Mapping

SERVING_COMMANDS = frozenset({"serve", "up", "generate", "chat"})
"""Commands for whose model the hints hold."""

_MEMORY = (
    "Memory is counted in GiB: --kv-cache-gb says how much the KV cache takes, --memory-guard-gb how much stays free."
)
_CONTEXT = "Did you mean --max-model-len, the tokens of prompt and answer?"
_ROWS = "Did you mean --max-num-seqs, the requests that are computed together?"
_MODEL = "The model is an argument: `phalanx serve MODEL`."
_LAYERS = "Every layer runs on the device that MLX chooses; --tp and --pp divide a model among ranks."
_REPLICAS = "Several servers behind one address: `phalanx up --replicas N`, or `phalanx gateway`."
_NOT_HERE = "There is nothing to set: leave it out."

FOREIGN_FLAGS: Mapping[str, str] = {
    "--block-size": _NOT_HERE,
    "--chunked-prefill-size": "Did you mean --max-num-batched-tokens?",
    "--context-length": _CONTEXT,
    "--cpu-offload-gb": "Weights stay in memory: more ranks (--tp, --pp) hold a larger model.",
    "--ctx-size": _CONTEXT,
    "--data-parallel-size": _REPLICAS,
    "--download-dir": "HF_HOME is the variable for where models lie.",
    "--enable-chunked-prefill": "Prompts are always computed in chunks: leave it out.",
    "--enable-prefix-caching": "It is on: leave it out.",
    "--enforce-eager": _NOT_HERE,
    "--gpu-memory-utilization": _MEMORY,
    "--max-running-requests": _ROWS,
    "--mem-fraction-static": _MEMORY,
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--n-gpu-layers": _LAYERS,
    "--num-ctx": _CONTEXT,
    "--parallel": _ROWS,
    "--quantization": "The model's config.json says how its weights are quantised: leave it out.",
    "--swap-space": _NOT_HERE,
    "--tokenizer": "The tokenizer is the model's own: leave it out.",
    "--tp-size": "Did you mean --tp?",
    "--verbose": "Did you mean --log-level debug?",
    "-c": _CONTEXT,
    "-m": _MODEL,
    "-p": "Did you mean --port?",
}
