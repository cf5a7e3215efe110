"""The rule (design: Proof) for 16 bits: where greedy tokens may differ from those of float32, and how often.

Of two likely tokens, rounding may select either. A process without phalanx's code therefore feeds the generated text to
mlx-lm's own model, in float32 and again in 16 bits. The largest difference of any logit is the rounding of this model.
A token that is not float32's likeliest is a flip. A flip is allowed if its logit is behind by at most FACTOR times the
rounding. The token after a flip is judged in the context of the generated text.

Flips must also be rare: at most FLIPS of all tokens, or twice as many as mlx-lm itself flips in the same 16 bits on the
same text. In bfloat16, with 8 bits of mantissa, mlx-lm flips 2 to 17 % on random models and 5 % on the demo model.

As a script: `python tests/support/near_ties.py JOBS.json OUT.json`, where JOBS is a list of `{"model": directory,
"dtype": name, "device": "cpu" or "gpu", "prompt": [ids], "tokens": [ids]}` and OUT becomes a list of objects with the
fields of `Forced`. The device is that of the 16 bits; float32 is computed on the processor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTOR = 4.0
FLIPS = 0.01
"""Largest share of tokens that may be flips."""


@dataclass(frozen=True, slots=True)
class Forced:
    """mlx-lm's logits for one generated answer.

    Args:
        behind: per token, the largest float32 logit less that of the generated token; 0 for the likeliest token.
        rounding: the largest difference between float32 and 16 bits of any logit of the text.
        flips: number of positions at which mlx-lm's likeliest tokens of 16 bits and of float32 differ.
    """

    behind: Sequence[float]
    rounding: float
    flips: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The numbers of judged tokens, of flips, and of mlx-lm's own flips (`theirs`); and the flips that exceed their
    limit: (position, gap, limit)."""

    tokens: int
    flips: int
    theirs: int
    unexplained: list[tuple[int, float, float]]

    @property
    def right(self) -> bool:
        return not self.unexplained and self.flips <= max(FLIPS * self.tokens, 2 * self.theirs)


def judge(answers: Sequence[Forced]) -> Verdict:
    """Apply the rule to all tokens of some answers. Positions count through the answers."""
    pairs = [(gap, FACTOR * answer.rounding) for answer in answers for gap in answer.behind]
    flips = [(i, gap, limit) for i, (gap, limit) in enumerate(pairs) if gap != 0]
    unexplained = [flip for flip in flips if not flip[1] <= flip[2]]
    return Verdict(len(pairs), len(flips), sum(answer.flips for answer in answers), unexplained)


def force(
    path: Path, dtype: str, said: Sequence[tuple[Sequence[int], Sequence[int]]], *, device: str = "cpu"
) -> list[Forced]:
    """mlx-lm's logits for (prompt, generated tokens) pairs, computed in a subprocess; those of `dtype` on `device`."""
    model = {"model": str(path), "dtype": dtype, "device": device}
    jobs = [{**model, "prompt": list(p), "tokens": list(t)} for p, t in said]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "jobs.json", Path(folder) / "out.json"
        source.write_text(json.dumps(jobs))
        command = [sys.executable, str(Path(__file__).resolve()), str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return [Forced(**answer) for answer in json.loads(target.read_text())]


def main() -> None:
    """Run the jobs of a file in this process."""
    # Imported here, because only the reference process needs mlx-lm.
    import mlx.core as mx  # noqa: PLC0415
    import mlx.nn as nn  # noqa: PLC0415
    from mlx.utils import tree_unflatten  # noqa: PLC0415
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415
    from mlx_lm.utils import load_model  # noqa: PLC0415

    mx.set_default_device(mx.cpu)
    entries = json.loads(Path(sys.argv[1]).read_text())
    if all(entry["device"] == "cpu" for entry in entries):
        mx.disable_compile()  # else with the C++ compiler that is found, whose roundings are its own
    models: dict[tuple[str, str], Any] = {}

    def decoded(model: Any) -> Any:
        """With quantised matrices as what they stand for: a product with them takes MLX's CPU ten times as long in 16
        bits, and adds up in those. Experts stay, of whose products in 16 bits it has no other (so mlx-lm's
        `dequantize_model` will not do), and so does a head that is the embedding."""
        layers = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.QuantizedLinear):
                continue
            parts = (module.weight, module.scales, module.biases, module.group_size, module.bits, module.mode)
            weight = mx.dequantize(*parts)
            layer = nn.Linear(*weight.shape[::-1], bias="bias" in module)
            layer.weight = weight
            if "bias" in module:
                layer.bias = module.bias
            layers.append((name, layer))
        model.update_modules(tree_unflatten(layers))
        return model

    def logits(entry: dict[str, Any], dtype: str, device: str) -> mx.array:
        if (key := (entry["model"], dtype)) not in models:
            models[key], _ = load_model(Path(entry["model"]))
            models[key].set_dtype(getattr(mx, dtype))
            models[key] = decoded(models[key])
        ids = mx.array([entry["prompt"] + entry["tokens"][:-1]])
        with mx.stream(mx.Device(getattr(mx, device))):
            answer: mx.array = models[key](ids, cache=make_prompt_cache(models[key]))[0].astype(mx.float32)
            mx.eval(answer)
        return answer

    answers = []
    for entry in entries:
        exact, rounded = logits(entry, "float32", "cpu"), logits(entry, entry["dtype"], entry["device"])
        said, theirs = exact[len(entry["prompt"]) - 1 :], rounded[len(entry["prompt"]) - 1 :]
        chosen = mx.take_along_axis(said, mx.array(entry["tokens"])[:, None], axis=-1)[:, 0]
        flips = mx.sum(mx.argmax(said, axis=-1) != mx.argmax(theirs, axis=-1))
        answers.append({
            "behind": (mx.max(said, axis=-1) - chosen).tolist(),
            "rounding": mx.max(mx.abs(rounded - exact)).item(),
            "flips": flips.item(),
        })  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
