"""A trained model from its GGUF file, beside llama.cpp on the same file. Runs where `llama_cpp` can be imported
(`pip install llama-cpp-python`), which is a C++ build of minutes and so no dependency of the tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import dequantised, tensor, text
from support.real_model import CHATS, real_gguf
from support.serving import SETTINGS

from phalanx import LLM, SamplingParams
from phalanx.model.gguf.gguf_header import parse_header
from phalanx.model.loading.resolve import resolve
from phalanx.text.tokenizer import Tokenizer

TEXTS = [
    "Once upon a time, there was a",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first humans",
    "Water boils at",
    "La capitale de la France est",
    "1, 2, 3, 4, 5,",
]
MAX_TOKENS = 32
LIMITS = {"as it is": (0.8, 0.05), "in float32": (0.01, 0.01)}
"""How far behind, in logits, a token may be that llama.cpp takes where the answers part, and of which share of all
tokens. With quantised weights it rounds activations to 8 bits before each product: 13 of 20 answers part then, by up
to 0.55, most by less than 0.1. With the same weights in float32 it rounds as phalanx does."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_gguf(tmp_path_factory.mktemp("package"))


def in_float32(file: Path, out: Path) -> Path:
    """The same model with its weights in float32, for a program that computes with activations as they are then."""
    data = file.read_bytes()
    tensors = parse_header(str(file), len(data), io.BytesIO(data).read).tensors
    entries, weights = [], []
    offset = 0
    for one in tensors:
        blocks = np.frombuffer(data, np.uint8, one.nbytes, one.start)
        if one.type.name == "F32":
            weights.append(blocks.tobytes())
        else:
            weights.append(dequantised(one.type.name, blocks.reshape(-1, one.type.nbytes)).astype("<f4").tobytes())
        entries.append(tensor(one.name, 0, one.shape, offset))
        offset += len(weights[-1])
        assert offset % 32 == 0
    start = data[: min(data.index(text(one.name)) for one in tensors)] + b"".join(entries)
    out.write_bytes(b"".join([start, bytes(-len(start) % 32), *weights]))
    return out


def greedy(llama: Any, prompt: list[int]) -> list[int]:
    llama.reset()
    tokens: list[int] = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token == llama.token_eos() or len(tokens) == MAX_TOKENS:
            break
    return tokens


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", LIMITS)
def test_greedy_tokens_are_llama_cpps_up_to_near_ties(weights: str, file: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs_file = file if weights == "as it is" else in_float32(file, tmp_path / "float32.gguf")
    llama = llama_cpp.Llama(str(theirs_file), n_ctx=512, n_threads=1, verbose=False)
    near, share = LIMITS[weights]
    model = resolve(str(file))
    tokenizer = Tokenizer.load(model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": words}], template_kwargs={}) for words in CHATS]
    prompts += [tokenizer.encode(words) for words in TEXTS]
    for words, ids in zip(TEXTS, prompts[len(CHATS) :], strict=True):
        assert llama.tokenize(words.encode(), add_bos=False, special=True) == ids
    theirs = [greedy(llama, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=5)
    with LLM(str(file), **SETTINGS) as llm:
        answers = [one.outputs[0] for one in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    gaps, compared = [], 0
    for answer, other in zip(answers, theirs, strict=True):
        pairs = zip(answer.token_ids, other, strict=False)
        parted = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        compared += len(other) if parted is None else parted + 1
        if parted is not None:
            likely = answer.logprobs[parted]
            gaps.append(likely[answer.token_ids[parted]].logprob - likely[other[parted]].logprob)
        else:
            assert list(answer.token_ids) == other
    print(f"{len(prompts) - len(gaps)} of {len(prompts)} answers are the same; of {compared} tokens differ {gaps}")
    assert compared > 300 and len(gaps) <= share * compared and all(gap <= near for gap in gaps)
