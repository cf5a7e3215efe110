"""The interface between `Tokenizer` and a tokenizer library.

`fast_backend.py` implements it with the library `tokenizers` alone, `transformers_backend.py` with transformers.
Imports neither library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from phalanx.text.template_process import TemplateRenderer


class Backend(Protocol):
    """A model's tokenizer, loaded by one library. Threads may call all methods concurrently."""

    vocab_size: int
    """Number of ids, added tokens included."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Ids that end a sequence according to the tokenizer's own files."""
    special: frozenset[int]
    """Ids of special tokens, whose text is shown on request only."""
    added: Mapping[str, int]
    """Text -> id of the added tokens, which are found in a text before it is split."""
    byte_level: bool
    """Whether every token is a fixed byte string, spelled in GPT-2's alphabet."""
    named: Mapping[str, str]
    """Special tokens by their names in tokenizer_config.json: "bos_token" -> "<s>"."""
    has_chat_template: bool
    chat_template: str | None
    """Source of the template that is used by default; None if there is none, or if it is not one text."""
    reserved: frozenset[str]
    """Parameters of the rendering, which a client must not set as template variables."""
    renderer: TemplateRenderer
    """Renders the chat template, within limits."""

    failures: tuple[type[Exception], ...]
    """Exceptions that `render` raises if the template, a program of the model's author, fails on the messages."""

    @property
    def longest_token(self) -> int | None:
        """Most UTF-8 bytes of a text in one token; None if unlimited or unknown."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Long work does not hold the interpreter's lock."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids below `vocab_size`, special tokens shown, spaces unaltered. Long work does not hold
        the interpreter's lock.
        """

    def name_of(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None for an id without a token."""

    def template_source(self, chat_template: str | None) -> str:
        """The source of the template for a conversation with tools; empty without one."""

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
            TemplateLimit: the template takes too much time or memory, or its text is too long.
        """
