"""Tokenises texts and messages on threads of its own, off the event loop (design: The server never blocks).

Does not know HTTP or the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from phalanx.errors import InvalidRequest
from phalanx.server.parsed import Conversation
from phalanx.text.tokenizer import Tokenizer

THREADS = 2  # so that a long prompt does not delay a short one; more threads would take cores from the model
PROBE_CHARS = 12  # characters per token of the context; texts of all languages have 1 to 6 characters per token

T = TypeVar("T")


class Prompts:
    """A tokenizer with a small pool of threads."""

    def __init__(self, tokenizer: Tokenizer, *, threads: int = THREADS) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def encode_chat(self, conversation: Conversation, *, limit: int | None = None) -> list[int]:
        """Render messages with the chat template and tokenise them. `limit`: see `_refuse_if_too_long`; None: no limit.

        Raises:
            InvalidRequest: there is no template, it refuses these messages, or they are much too long.
        """

        def work() -> list[int]:
            text = "".join(message["content"] for message in conversation.messages)
            self._refuse_if_too_long(text, limit, "messages")
            return self.tokenizer.encode_chat(
                conversation.messages,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                template_kwargs=conversation.template_kwargs,
            )

        return await self._run(work)

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Tokenise a text; token ids are returned as they are. `limit` as for `encode_chat`.

        Raises:
            InvalidRequest: the text is much too long.
        """
        if not isinstance(prompt, str):
            return prompt

        def work() -> list[int]:
            self._refuse_if_too_long(prompt, limit, "prompt")
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return await self._run(work)

    async def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return await self._run(lambda: self.tokenizer.decode(tokens))

    def close(self) -> None:
        """Cancel queued work and return at once; running work continues to its end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _refuse_if_too_long(self, text: str, limit: int | None, field: str) -> None:
        """Refuse a text whose first `PROBE_CHARS * limit` characters alone have more than twice `limit` tokens.

        Tokenising a whole text of 8 MB takes many seconds, this a fraction of one.
        """
        if limit is None or len(text) <= PROBE_CHARS * limit:
            return
        n_tokens = len(self.tokenizer.encode(text[: PROBE_CHARS * limit], add_special_tokens=False))
        if n_tokens > 2 * limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, your prompt has more than {n_tokens} "
                "tokens. Please reduce the length of the prompt.",
                param=field,
                code="context_length_exceeded",
            )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
