"""Judges a model folder: held-out loss, probe questions, 600-token runs, decode speed. Ends with one JSON line.

Everything is greedy and goes through mlx-lm and the chat template, exactly as a user would meet the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import load, stream_generate
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer

from . import corpus, rows, train
from .network import Network, Shape
from .probes import CHAT, LONG_PROMPTS, PHALANX, RAW_PROMPTS, SKILLS, Probe, seen_sums, sums


def mlx_loss(model: Any, folder: Path, documents: int = 150) -> float:
    """Held-out loss in nats per token, over the same rows as `train.held_out_loss`."""
    packed = rows.pack(
        rows.encode(Tokenizer.from_file(str(folder / "tokenizer.json")), corpus.HELD_OUT_SEED, documents)
    )
    total = count = 0.0
    for length, size in ((256, 16), (1024, 4)):
        for i in range(0, len(packed[length]) - size + 1, size):
            batch = mx.array(packed[length][i : i + size].astype(np.int32))
            scores = model(batch[:, :-1])
            chosen = mx.take_along_axis(scores, batch[:, 1:, None], axis=-1)[..., 0]
            total += float(mx.mean(mx.logsumexp(scores, axis=-1) - chosen)) * batch.size
            count += batch.size
    return total / count


def torch_loss(checkpoint: Path, folder: Path) -> float:
    """Held-out loss of the unquantised network."""
    network = Network(Shape())
    network.load_state_dict(torch.load(checkpoint, weights_only=True)["network"])
    return train.held_out_loss(network, Tokenizer.from_file(str(folder / "tokenizer.json")))


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], max_tokens: int = 120) -> str:
    """The model's next turn."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return "".join(part.text for part in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))


def judge(model: Any, tokenizer: Any, probe: Probe) -> tuple[bool, str]:
    """Whether the probe passed, and the last answer."""
    messages = [{"role": "system", "content": probe.system}] if probe.system else []
    text = ""
    for turn in probe.turns:
        messages.append({"role": "user", "content": turn})
        text = answer(model, tokenizer, messages)
        messages.append({"role": "assistant", "content": text})
    return probe.passed(text), text


def collapse(tokens: list[int]) -> dict[str, float]:
    """Distinct share of 4-grams, and the share taken by the most frequent one."""
    grams = Counter(zip(*(tokens[i:] for i in range(4)), strict=False))
    count = max(1, sum(grams.values()))
    return {"distinct_4": round(len(grams) / count, 3), "top_4": round(max(grams.values(), default=0) / count, 3)}


def long_run(model: Any, tokenizer: Any, prompt: str, count: int, ignore_end: bool) -> list[int]:
    """Up to `count` greedy tokens; with `ignore_end` always that many."""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=count):
        if int(token) in tokenizer.eos_token_ids and not ignore_end:
            break
        tokens.append(int(token))
    return tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="also report the loss before quantisation")
    parser.add_argument("--quick", action="store_true", help="fewer sums, shorter runs")
    parser.add_argument("--verbose", action="store_true", help="print every answer, not only the wrong ones")
    options = parser.parse_args()
    loaded: Any = load(str(options.folder))
    model, tokenizer = loaded[:2]
    report: dict[str, Any] = {"size_mb": round(sum(p.stat().st_size for p in options.folder.iterdir()) / 1e6, 2)}

    sums_asked = 20 if options.quick else 80
    passed: dict[str, list[bool]] = {}
    for probe in [*CHAT, *PHALANX, *SKILLS, *sums(sums_asked), *seen_sums(sums_asked)]:
        good, text = judge(model, tokenizer, probe)
        passed.setdefault(probe.group, []).append(good)
        if options.verbose or not good:
            print(f"{'ok  ' if good else 'FAIL'} {probe.group}: {' / '.join(probe.turns)!r} -> {text!r}")
    report["probes"] = {group: f"{sum(found)}/{len(found)}" for group, found in passed.items()}

    report["runs"] = {}
    for prompt in LONG_PROMPTS:
        tokens = long_run(model, tokenizer, prompt, 600, ignore_end=False)
        forced = (
            tokens if options.quick or len(tokens) == 600 else long_run(model, tokenizer, prompt, 600, ignore_end=True)
        )
        report["runs"][prompt] = {
            "tokens": len(tokens),
            **collapse(tokens),
            "forced_distinct_4": collapse(forced)["distinct_4"],
        }
        if options.verbose:
            print(f"--- {prompt}\n{tokenizer.decode(tokens)}")
    for prompt in RAW_PROMPTS:
        text = "".join(part.text for part in stream_generate(model, tokenizer, prompt, max_tokens=60))
        print(f"--- raw {prompt!r} -> {text!r}")

    start, count = time.perf_counter(), 200
    ids = tokenizer.apply_chat_template([{"role": "user", "content": LONG_PROMPTS[0]}], add_generation_prompt=True)
    for _ in generate_step(mx.array(ids), model, max_tokens=count):
        pass
    report["decode_tokens_per_second"] = round(count / (time.perf_counter() - start), 1)
    if not options.quick:
        report["held_out_loss"] = round(mlx_loss(model, options.folder), 4)
    if options.checkpoint:
        report["held_out_loss_float32"] = round(torch_loss(options.checkpoint, options.folder), 4)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
