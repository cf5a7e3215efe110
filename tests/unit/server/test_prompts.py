"""Tokenising beside the event loop: what cannot fit is refused early, and short texts do not wait for long ones."""

from __future__ import annotations

import asyncio
import threading
from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.demo import MODEL_DIR
from phalanx.errors import InvalidRequest
from phalanx.server.prompts.prompt_encoder import PIECE, SHORT, SURE_BYTES, Prompts, _pieces
from phalanx.server.requests.parsed import Conversation
from phalanx.text.tokenizer import Tokenizer


class Watched:
    """A tokenizer that notes what it is given and waits at long texts."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.lengths: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text, **options):
        self.lengths.append(len(text))
        if len(text) > SHORT:
            assert self.go_on.wait(60)
        return self.inner.encode(text, **options)


def refused(tokenizer, text, limit):
    async def main():
        prompts = Prompts(tokenizer)
        try:
            await prompts.encode(text, limit=limit)
        except InvalidRequest as error:
            assert error.code == "context_length_exceeded" and str(limit) in error.message
            return True
        finally:
            prompts.close()
        return False

    return asyncio.run(main())


def test_short_texts_do_not_wait_for_long_ones(tokenizer):
    async def main():
        watched = Watched(tokenizer)
        watched.go_on.clear()
        prompts = Prompts(watched)
        long = [asyncio.create_task(prompts.encode("a" * (SHORT + 1), limit=1 << 20)) for _ in range(20)]
        chat = Conversation(
            messages=[{"role": "user", "content": "hello"}], template_kwargs={}, add_generation_prompt=True,
            continue_final_message=False,
        )  # fmt: skip
        async with asyncio.timeout(60):
            assert await prompts.encode("hello", limit=100) == tokenizer.encode("hello")
            assert len((await prompts.encode_chat(chat, limit=100)).tokens) > 3
            assert await prompts.decode(tokenizer.encode("hello")) == "hello"
            assert not any(task.done() for task in long)
            watched.go_on.set()
            assert len(set(map(len, await asyncio.gather(*long)))) == 1
        prompts.close()

    asyncio.run(main())


def test_the_checkpoint_of_a_question_is_where_its_answer_starts(tokenizer):
    def checkpoint(role: str, *, generates: bool = True, asked: bool = True) -> int:
        async def main():
            prompts = Prompts(tokenizer)
            messages = [{"role": "user", "content": "hello"}, {"role": role, "content": "fox", "tool_call_id": "a"}]
            chat = Conversation(
                messages=messages, template_kwargs={}, add_generation_prompt=generates, continue_final_message=False
            )
            rendered = await prompts.encode_chat(chat, limit=1000, with_checkpoint=asked)
            question = tokenizer.encode_chat(messages, add_generation_prompt=False, template_kwargs={})
            assert rendered.checkpoint in (0, len(question)) and rendered.tokens[: len(question)] == question
            prompts.close()
            return rendered.checkpoint

        return asyncio.run(main())

    assert checkpoint("user") > 0
    assert not checkpoint("assistant") and not checkpoint("tool")
    assert not checkpoint("user", generates=False) and not checkpoint("user", asked=False)


@pytest.mark.parametrize("text", ["é" * 1_000_000, "a 1" * 1_000_000, " \n" * 1_000_000, "hello world " * 200_000])
def test_a_text_that_cannot_fit_is_not_tokenised_as_a_whole(tokenizer, text):
    watched = Watched(tokenizer)
    for limit in (100, 100_000):
        assert refused(watched, text, limit)
        assert max(watched.lengths, default=0) <= PIECE
        assert sum(watched.lengths) < len(text)


@pytest.mark.parametrize("text", ["hello world ", "the quick\nbrown fox, ", "helloworld", "       ", "é1 "])
def test_a_text_that_fits_is_never_refused(tokenizer, text):
    for real in (tokenizer, demo()):
        long = text * (2 * PIECE // len(text))
        n_tokens = len(real.encode(long))
        assert real.fewest_tokens(long) <= n_tokens
        assert not refused(real, long, n_tokens)
        assert not refused(real, long, max(n_tokens, len(long) // (SURE_BYTES - 1)))


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(text):
    real = demo()
    n_tokens = len(real.encode(text, add_special_tokens=False))
    assert real.fewest_tokens(text) <= n_tokens <= len(text.encode())


@given(st.text(alphabet="a \n", max_size=50), st.integers(0, 3))
def test_pieces_add_up(text, n):
    text = text + ("x" * PIECE + text) * n
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= PIECE for piece in pieces)


@lru_cache
def demo() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)
