"""What `Tokenizer` needs of a tokenizer library: the seam between it and the two ways to load a tokenizer.

`fast_backend.py` uses the library `tokenizers` alone, `transformers_backend.py` everything that transformers can load.
Imports neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Backend(Protocol):
    """A model's tokenizer in one library. All methods may be called from several threads at once."""

    vocab_size: int
    """Number of ids, added tokens included."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Ids that the tokenizer itself says end a sequence."""
    special: frozenset[int]
    """Ids that show no text unless asked for."""
    byte_level: bool
    """Whether every token is a fixed string of bytes, written in GPT-2's alphabet."""
    has_chat_template: bool
    reserved: frozenset[str]
    """Names that are no template variables: parameters that steer the rendering, which is not the client's."""

    failures: tuple[type[Exception], ...]
    """What `render` raises where the template, a program from the model's repository, fails on these messages."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids below `vocab_size`, special tokens shown, spaces unaltered."""

    def name_of(self, token: int) -> str | None:
        """A token as the vocabulary spells it; None where there is none."""

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
