"""A trained model from its GGUF file, beside llama.cpp on the same file. Runs where `llama_cpp` can be imported
(`pip install llama-cpp-python`), which is a C++ build of minutes and so no dependency of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.near_ties import force
from support.real_model import CHATS, real_gguf
from support.serving import SETTINGS

from phalanx import LLM, SamplingParams
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
NEAR = 0.5
"""How far behind a token's logit may be that llama.cpp takes: it rounds activations to 8 bits before each product, and
logits of this model are off by up to 0.4 then (measured over these texts)."""
FLIPS = 0.02  # of all tokens


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_gguf(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def llama(file: Path) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(file), n_ctx=512, n_threads=1, verbose=False)


def greedy(llama: Any, prompt: list[int]) -> list[int]:
    llama.reset()
    tokens: list[int] = []
    for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
        tokens.append(token)
        if token == llama.token_eos() or len(tokens) == MAX_TOKENS:
            break
    return tokens


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_greedy_tokens_are_llama_cpps_up_to_near_ties(file: Path, llama: Any) -> None:
    model = resolve(str(file))
    tokenizer = Tokenizer.load(model)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}], template_kwargs={}) for text in CHATS]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    for text, ids in zip(TEXTS, prompts[len(CHATS) :], strict=True):
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    theirs = [greedy(llama, prompt) for prompt in prompts]
    with LLM(str(file), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        ours = [one.outputs[0].token_ids for one in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    forced = force(model, "float32", list(zip(prompts, theirs, strict=True)))
    for mine, other, answer in zip(ours, theirs, forced, strict=True):
        parted = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), None)
        assert parted is None or answer.behind[parted] > 0, "ours is the likeliest where they part"
    behind = [gap for answer in forced for gap in answer.behind]
    flips = sorted(gap for gap in behind if gap > 0)
    same = sum(list(mine) == other for mine, other in zip(ours, theirs, strict=True))
    print(f"{same} of {len(prompts)} answers are the same; {len(flips)} of {len(behind)} tokens differ, by {flips}")
    assert len(behind) > 500 and len(flips) <= FLIPS * len(behind) and max(behind) <= NEAR
