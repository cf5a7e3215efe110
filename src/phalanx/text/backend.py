"""The interface between `Tokenizer` and a tokenizer library.

`fast_backend.py` implements it with the library `tokenizers` alone, `transformers_backend.py` with transformers.
Imports neither library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Backend(Protocol):
    """A model's tokenizer, loaded by one library. Threads may call all methods concurrently."""

    vocab_size: int
    """Number of ids, added tokens included."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Ids that end a sequence according to the tokenizer's own files."""
    special: frozenset[int]
    """Ids of special tokens, whose text is shown on request only."""
    byte_level: bool
    """Whether every token is a fixed byte string, spelled in GPT-2's alphabet."""
    has_chat_template: bool
    reserved: frozenset[str]
    """Parameters of the rendering, which a client must not set as template variables."""

    failures: tuple[type[Exception], ...]
    """Exceptions that `render` raises where the template, a program of the model's author, fails on the messages."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids below `vocab_size`, special tokens shown, spaces unaltered."""

    def name_of(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without a token."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        """A conversation as text; `chat_template` replaces the model's own.

        Raises:
            Exception: one of `failures`.
        """
