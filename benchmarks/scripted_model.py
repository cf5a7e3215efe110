"""Makes a model that generates given documents, and draft models that know them well or not at all.

The acceptance of drafts depends on the generated text, so speculation cannot be measured on random weights, and this
repository has no large trained model. GPT-2 adds a learned vector to every position. Here that vector points at the
next token of a document. The layers have random weights and zero output projections. A step therefore takes as long as
in any model of that size, and the model generates the document from the end of the prompt on. Several works share a
model, because their answers have different positions.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.gpt2 import Model, ModelArgs
from mlx_lm.utils import quantize_model
from servers import DEMO, NEVER_SAID
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
ANSWER = 256  # tokens
POSITIONS = 2048
LOUDNESS = 4.0  # factor on the next token's vector, against the current token's
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
NAMES = "Ada Bela Cleo Dora Emil Fritz Gaia Hugo Ines Jonas Kara Levi Mona Nils Olga Pavel".split()
TOWNS = "Lisbon Oslo Verona Cairo Quito Hanoi Perth Lima Tunis Riga".split()
THINGS = "lantern compass kettle ribbon saddle violin marble feather".split()


@dataclass(frozen=True)
class Size:
    """The size of a GPT-2."""

    width: int  # a multiple of 64
    layers: int


TARGETS = {"100m": Size(1024, 8), "1b": Size(2048, 16)}
"""Parameters, without vocabulary and positions -> size. Python and other processes dominate a step of the small model;
memory and arithmetic dominate a step of the large one."""
DRAFT = Size(256, 4)  # 3 M


@dataclass(frozen=True)
class Work:
    """A prompt and its answer."""

    name: str
    prompt: str
    answer: str


def works() -> list[Work]:
    """Typical tasks. Each prompt is longer than prompt and answer of the task before, so that no positions overlap."""
    prose = re.sub(r"[`*|]", "", (ROOT / "docs" / "design.md").read_text())
    code = (ROOT / "src" / "phalanx" / "sched" / "prefix.py").read_text()
    draw = random.Random(3)
    rows = [(draw.choice(NAMES), draw.choice(TOWNS), draw.randint(2, 99), draw.choice(THINGS)) for _ in range(80)]
    lines = [f"{name} of {town} has {n} {thing}s." for name, town, n, thing in rows]
    records = [json.dumps({"name": name, "town": town, "items": n, "kind": thing}) for name, town, n, thing in rows]
    extracted = [line for line, (_, _, n, _) in zip(lines, rows, strict=True) if n % 2 == 0]
    return [
        Work("free text", "Describe the system.", prose[prose.index("Ranks are replicas") :]),
        Work("json", "\n".join([*lines[:30], "Write that as JSON."]), "\n".join(records)),
        Work("code edit", code[:2000] + "\nRename entry to record.", code[:2000].replace("entry", "record")),
        Work("extraction", "\n".join([*lines, "Give me the lines with an even number."]), "\n".join(extracted)),
    ]


def reciter(directory: Path, size: Size, *, knows: float = 1.0) -> Path:
    """Write a model that answers the works' prompts, with a chat template without roles. Returns its path.

    Args:
        knows: share of the positions at which the model generates the right token; at others it generates a wrong one.
    """
    path = directory / f"reciter-{size.width}x{size.layers}-{knows:g}"
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(path)
    config = {
        "model_type": "gpt2", "n_ctx": POSITIONS, "n_positions": POSITIONS, "n_embd": size.width,
        "n_head": size.width // 64, "n_layer": size.layers, "layer_norm_epsilon": 1e-5,
        "vocab_size": vocabulary,
    }  # fmt: skip
    mx.random.seed(size.width)
    model = Model(ModelArgs.from_dict(config))
    model.apply(lambda array: mx.random.normal(array.shape, scale=0.02) if array.ndim == 2 else array)
    for block in model.layers:
        for silent in (block.attn.c_proj, block.mlp.c_proj):
            silent.weight, silent.bias = mx.zeros_like(silent.weight), mx.zeros_like(silent.bias)
    said = _said(Tokenizer.from_file(str(path / "tokenizer.json")), vocabulary, knows)
    model.model.wpe = nn.Embedding(POSITIONS, size.width)
    model.model.wpe.weight = LOUDNESS * model.model.wte.weight[mx.array(said)]
    model, config = quantize_model(model, config, group_size=64, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def _said(tokenizer: Tokenizer, vocabulary: int, knows: float) -> list[int]:
    """Position of the input token -> the token that the model generates next."""
    draw = random.Random(7)
    said = [draw.randrange(vocabulary) for _ in range(POSITIONS)]
    taken = 0
    for work in works():
        start = len(tokenizer.encode(work.prompt + "\n").ids)
        answer = tokenizer.encode(work.answer).ids[: ANSWER + 1]
        if start < taken or len(answer) <= ANSWER:
            raise ValueError(f"{work.name}: prompt of {start} tokens, {taken} wanted; answer of {len(answer)}")
        for at, token in enumerate(answer, start - 1):
            said[at] = token if draw.random() < knows else (token + 1 + draw.randrange(vocabulary - 1)) % vocabulary
        taken = start + ANSWER
    return said


def _write_tokenizer(path: Path) -> int:
    """Write the demo model's tokenizer with an EOS that is never generated. Returns the size of its vocabulary."""
    shutil.copy(DEMO / "tokenizer.json", path)
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    changes = {"eos_token": NEVER_SAID, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    return int(json.loads((DEMO / "config.json").read_text())["vocab_size"])
