"""Tokenises texts and messages on threads of its own, off the event loop (design: The server never blocks).

Short texts have threads of their own, so that they never wait behind long ones. A text that cannot fit into the context
is refused before it is tokenised as a whole, which would take seconds and hundreds of bytes of memory per byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from msgspec.structs import replace

from phalanx.errors import InvalidRequest
from phalanx.memory import trim_heap
from phalanx.server.answers.call_memory import CallMemory
from phalanx.server.prompts.rendering import TAIL, Rendered, continued, end_of_question, in_order_of_calls, render
from phalanx.server.requests.parsed import Conversation
from phalanx.text.tokenizer import Tokenizer

THREADS = 2  # of each kind, so that a text does not wait for another one; more would take cores from the model
SHORT = 1 << 14  # characters or tokens; takes some 5 ms
MESSAGE_CHARS = 32  # rendering a message takes as long as tokenising so many characters
PIECE = 1 << 16  # characters tokenised at once until it is clear whether a text fits
SURE_BYTES = 4  # per token of the context, up to which a text is tokenised at once; English has 4 or 5

T = TypeVar("T")


class Prompts:
    """A tokenizer with two small pools of threads, for short and for long work."""

    def __init__(self, tokenizer: Tokenizer, *, threads: int = THREADS) -> None:
        self.tokenizer = tokenizer
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="tokenize long")

    async def encode_chat(
        self,
        conversation: Conversation,
        *,
        limit: int,
        memory: CallMemory | None = None,
        owner: str = "",
        begun: list[int] | None = None,
        with_checkpoint: bool = False,
    ) -> Rendered:
        """Render messages with the chat template and tokenise them. `limit`: see `_refuse_if_too_long`.

        Args:
            memory: of the answers that called tools, whose own tokens are used again; None: use the template for all.
            owner: of these answers.
            begun: the prompt of an answer that another server began; empty: the template's, of these messages alone.
                None: the answer begins here.
            with_checkpoint: find the start of the answer, if the last message is the user's.

        Raises:
            InvalidRequest: there is no template, it refuses these messages, or they are much too long.
        """

        asked = in_order_of_calls(conversation)

        def work() -> Rendered:
            recalled, known, tokens = None, asked, begun
            if memory is not None:
                recalled = memory.recall(owner, asked.messages, asked.template_kwargs)
                if begun is None:
                    known = replace(asked, messages=recalled.messages)
            text = render(self.tokenizer, known)
            self._refuse_if_too_long(text, limit, asked.field)
            if begun is None and recalled is not None and recalled.last is not None:
                tokens = continued(self.tokenizer, known, text, *recalled.last)
            is_recalled = bool(tokens)
            tokens = tokens or self.tokenizer.encode(text, add_special_tokens=False)
            return Rendered(
                tokens=tokens,
                tail=text[-TAIL:],
                digest=b"" if recalled is None else recalled.digest,
                is_recalled=is_recalled or known.messages != asked.messages,
                checkpoint=end_of_question(self.tokenizer, known, text, tokens) if with_checkpoint else 0,
            )

        size = asked.n_chars + MESSAGE_CHARS * len(asked.messages)
        return await self.run(size, work)

    async def encode(self, prompt: str | list[int], *, add_special_tokens: bool = True, limit: int) -> list[int]:
        """Tokenise a text; token ids are returned as they are. `limit` as for `encode_chat`.

        Raises:
            InvalidRequest: the text is much too long.
        """
        if not isinstance(prompt, str):
            return prompt

        def work() -> list[int]:
            self._refuse_if_too_long(prompt, limit, "prompt")
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return await self.run(len(prompt), work)

    async def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return await self.run(len(tokens), lambda: self.tokenizer.decode(tokens))

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which takes time in proportion to `size` characters or tokens."""
        pool, do = (self._short, work) if size <= SHORT else (self._long, lambda: _trimmed(work))
        return await asyncio.get_running_loop().run_in_executor(pool, do)

    def close(self) -> None:
        """Cancel queued work and return at once; running work continues to its end."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def _refuse_if_too_long(self, text: str, limit: int, field: str) -> None:
        """Refuse a text that certainly has more than `limit` tokens. One with slightly more may pass.

        A cut between two words changes no token, since tokenizers begin one at a space. Elsewhere a cut adds a few
        tokens, so a text is refused only if its pieces have twice as many as fit.
        """
        if len(text.encode()) <= SURE_BYTES * limit:
            return
        if self.tokenizer.fewest_tokens(text) <= limit and self._counts_at_most(2 * limit, text):
            return
        raise InvalidRequest(
            f"This model's maximum context length is {limit} tokens. However, your prompt has more. Please reduce the "
            "length of the prompt.",
            param=field,
            code="context_length_exceeded",
        )

    def _counts_at_most(self, most: int, text: str) -> bool:
        """Whether the pieces of a text have at most so many tokens; stops at the piece that exceeds it."""
        n_tokens = 0
        for piece in _pieces(text):
            n_tokens += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if n_tokens > most:
                return False
        return True


def _trimmed(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        trim_heap()


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most `PIECE` characters, each cut before a space if there is one in its second half."""
    start = 0
    while start < len(text):
        end = start + PIECE
        space = text.rfind(" ", start + PIECE // 2, end) if end < len(text) else -1
        end = space if space > 0 else end
        yield text[start:end]
        start = end
