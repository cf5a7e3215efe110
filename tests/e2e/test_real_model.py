"""A real trained model over HTTP: mlx-lm's own answers on real words, twelve chats at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.driver import PATIENT
from support.real_model import MAX_TOKENS, real_model, recorded
from support.serving import CONFIG, MODEL, Running, running_server

from phalanx.config import EngineConfig
from phalanx.model.loading.resolve import resolve
from phalanx.model.loading.weights import read_headers
from phalanx.speculation_config import NgramSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "with drafts": {"speculative_config": NgramSpeculation(num_speculative_tokens=4, control="always")},
    # nine heads: three is the only degree above one
    "three ranks": {"tensor_parallel_size": 3, "backend": "mpi", **PATIENT},
    "two stages": {"pipeline_parallel_size": 2, **PATIENT},
    "three stages": {"pipeline_parallel_size": 3, "pp_split": (9, 9, 12), **PATIENT},
}
KINDS_IN_TURN = [
    "one rank",
    *(pytest.param(kind, marks=pytest.mark.full) for kind in ("with drafts", "three ranks", "two stages")),
    pytest.param("three stages", marks=pytest.mark.soak),
]


TEXTS = (
    "In 1984 it cost $1,234.50, or 12 345 678,90 - x2y3 v10.11.12",
    "I'm sure they'll've said: we're THEY'RE  they'd  's 't  'VE",
    "  two\tblanks   and\n\n\n  lines \r\n ends \u00a0\u3000 odd ones  ",
    "Größe, élan, Ünïcödé; Привет, мир! γειά 日本語のテキスト 中文字符 한국어 العربية ١٢٣ ४५ ½² ①",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 0x1F 1e-9\n\n\nclass A:\n\tpass",
    "👍🏽 👩‍🚀 🇳🇴 e\u0301 \u200b zero",
)


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model()


def test_its_short_name_means_it(path: Path) -> None:
    assert resolve("smollm2") == path


def test_its_weights_are_those_that_mlx_read_and_its_tokens_those_of_its_own_tokenizer(path: Path) -> None:
    """The digests are of what MLX's own reader of GGUF made of the file (Q4_1 and Q8_0 stay bit for bit), and of the
    tokens of SmolLM2's own tokenizer for texts in which rules for numbers, blanks and languages differ."""
    digest = hashlib.sha256()
    tensors = read_headers(path)
    with (path / "model.safetensors").open("rb") as file:
        for name, info in sorted(tensors.items()):
            file.seek(info.start)
            digest.update(f"{name} {info.dtype} {info.shape}".encode() + file.read(info.nbytes))
    assert digest.hexdigest() == "e221b493dd22f542ff17ba3ada5d3ebf140c08964d51d1d0e24682a990c86cc1"
    tokens = [Tokenizer.load(path).encode(text) for text in TEXTS]
    assert (
        hashlib.sha256(repr(tokens).encode()).hexdigest()
        == "650d06e91a77e208825d61b43cd5d0e164311ab1ed0596304fadaf28d1daa7c7"
    )


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


@pytest.fixture(scope="module", params=KINDS_IN_TURN)
def server(request: pytest.FixtureRequest, path: Path, tokenizer: Tokenizer) -> Iterator[Running]:
    engine = EngineConfig(model=str(path), max_num_seqs=16, kv_cache_gb=0.5, prefix_cache_gb=0.05)
    engine = replace(engine, **KINDS[request.param])
    with running_server(tokenizer, EngineProcess(engine), replace(CONFIG, engine=engine)) as running:
        yield running


async def ask(client: httpx.AsyncClient, user: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": user}], "temperature": 0, "max_tokens": MAX_TOKENS}
    response = await client.post("/chat/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def all_at_once(server: Running, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def main() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:
            return list(await asyncio.gather(*(ask(client, **fields) for fields in asked)))

    return asyncio.run(main())


def test_prompts_are_cut_as_the_library_cuts_them(tokenizer: Tokenizer):
    for entry in recorded():
        messages = [{"role": "user", "content": entry["user"]}]
        assert tokenizer.encode_chat(messages, template_kwargs={}) == entry["prompt"]


@pytest.mark.full
def test_twelve_chats_at_once_equal_mlx_lm(server: Running, tokenizer: Tokenizer):
    entries = recorded()
    answers = all_at_once(server, [{"user": entry["user"]} for entry in entries])
    for entry, answer in zip(entries, answers, strict=True):
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(entry["tokens"]), entry["user"]
        assert answer["usage"]["completion_tokens"] == len(entry["tokens"])
        whole = entry["tokens"][-1] in tokenizer.eos_ids
        assert answer["choices"][0]["finish_reason"] == ("stop" if whole else "length")


def test_stop_strings_and_logprobs_on_real_words(server: Running, tokenizer: Tokenizer):
    """A stop string over two words and one inside a word; the bytes of tokens are the text; the best token is drawn."""
    france, sea, unicode = (recorded()[i] for i in (0, 1, 11))
    cut, within, scored = all_at_once(
        server,
        [
            {"user": france["user"], "stop": [" France is"]},
            {"user": sea["user"], "stop": ["steri"], "include_stop_str_in_output": True},
            {"user": unicode["user"], "logprobs": True, "top_logprobs": 3},
        ],
    )
    assert cut["choices"][0]["message"]["content"] == "The capital of"
    assert within["choices"][0]["message"]["content"] == "The sea is a vast and mysteri"
    assert cut["choices"][0]["finish_reason"] == within["choices"][0]["finish_reason"] == "stop"
    content = scored["choices"][0]["logprobs"]["content"]
    text = scored["choices"][0]["message"]["content"]
    shown = b"".join(bytes(token["bytes"]) for token in content if token["token"] != "<|im_end|>")
    assert shown.decode() == text == tokenizer.decode(unicode["tokens"])
    assert "é" in text
    assert all(token["token"] == token["top_logprobs"][0]["token"] for token in content)
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0 for token in content)
