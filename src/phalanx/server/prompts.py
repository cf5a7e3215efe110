"""Text and messages to token ids, off the event loop (DESIGN section 11). Does not know HTTP or the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from phalanx.model.tokenizer import Tokenizer
from phalanx.server.parsed import Conversation

THREADS = 2  # a long prompt must not hold up a short one; more would take cores from the model

T = TypeVar("T")


class Prompts:
    """A tokenizer behind a small pool of threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """The chat template's tokens.

        Raises:
            InvalidRequest: the template refuses these messages, or there is none.
        """
        return await self._run(
            lambda: self.tokenizer.encode_chat(
                conversation.messages,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                template_kwargs=conversation.template_kwargs,
            )
        )

    async def encode(self, prompt: str | list[int], *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens; token ids are themselves."""
        if not isinstance(prompt, str):
            return prompt
        return await self._run(lambda: self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    async def decode(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return await self._run(lambda: self.tokenizer.decode(tokens))

    def close(self) -> None:
        """Drop what is queued; a running one is left to end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
