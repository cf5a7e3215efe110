"""The tokenizer of the server process: text to token ids and back, chat templates, the text of single tokens.

Adds to a tokenizer library exact streaming, errors that blame the client's request, and thread safety.
`tokenizer_files.py` reads the files.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text import template_forms, tokenizer_files
from phalanx.text.library_errors import library_errors
from phalanx.text.stop_strings import StopAutomaton, StopMatch, StopStrings
from phalanx.text.template_process import TemplateBroken, TemplateLimit
from phalanx.text.text_stream import ByteTextStream, TextStream, WindowStream
from phalanx.text.tokenizer_backend import Backend
from phalanx.text.vocabulary import from_byte_level

log = logging.getLogger("phalanx.text")

__all__ = ["StopAutomaton", "StopMatch", "StopStrings", "TextStream", "Tokenizer"]

RULES = "Speculation, 1234 times: a_b(c) == 'ünïcode' 東京\n\tend."
"""Text that tokenizers with the same vocabulary and different rules split differently."""


class Tokenizer:
    """A model's tokenizer. Threads may call all methods concurrently.

    Args:
        backend: the model's tokenizer, loaded by a library.
        eos_ids: ids that end a sequence.
        chat_template: source of a template that replaces the model's own.
    """

    def __init__(self, backend: Backend, eos_ids: frozenset[int], chat_template: str | None = None) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self._special = backend.special
        self._anchor = self._find_anchor()
        self.vocab_size = backend.vocab_size
        self.eos_ids = eos_ids
        self.bos_id = backend.bos_id
        self.special_ids = backend.special
        self.has_chat_template = chat_template is not None or backend.has_chat_template
        self.token_bytes = lru_cache(maxsize=1 << 16)(self._token_bytes)

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model's directory.

        Raises:
            ModelUnsupported: the directory has no tokenizer, or no library can load it; a file of settings is damaged;
                or text does not come back from encoding and decoding.
        """
        with library_errors(lambda reason: tokenizer_files.unloadable(path, reason)):
            backend = tokenizer_files.load(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
            eos_ids = tokenizer_files.eos_ids(path, backend)
            if not eos_ids:
                log.warning("%s names no end-of-sequence token: answers end at max_tokens only", path)
            return cls(backend, eos_ids, chat_template)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text -> id of the added tokens, special or not."""
        return self._backend.added

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The texts of the added tokens among those that end a sequence."""
        return tuple(text for text, token in self.added_tokens.items() if token in self.eos_ids)

    @property
    def template_source(self) -> str:
        """The chat template that conversations with tools are rendered with; empty if there is none, or several."""
        return self._backend.template_source(self._chat_template)

    def describe(self) -> dict[str, str | None]:
        """The special tokens by name and the source of the chat template, for clients that render or cut prompts."""
        tokens: dict[str, str | None] = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None}
        if self.eos_ids:
            tokens["eos_token"] = self._backend.name_of(min(self.eos_ids))
        return {**tokens, **self._backend.named, "chat_template": self._chat_template or self._backend.chat_template}

    def differs_from(self, other: Tokenizer) -> str:
        """The first difference between two tokenizers; empty if all ids mean the same."""
        if self.vocab_size != other.vocab_size:
            return f"it has {other.vocab_size} tokens instead of {self.vocab_size}"
        for token in range(self.vocab_size):
            mine, theirs = self._backend.name_of(token), other._backend.name_of(token)
            if mine != theirs:
                return f"token {token} is {theirs!r} instead of {mine!r}"
        return "" if self.encode(RULES) == other.encode(RULES) else f"it cuts {RULES!r} differently"

    def fingerprint(self) -> str:
        """A hash, equal for tokenizers that do not differ (`differs_from`) and have the same ends and template."""
        names = [self._backend.name_of(token) for token in range(self.vocab_size)]
        facts = repr((names, self.encode(RULES), sorted(self.eos_ids), self.describe()))
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, found without tokenising it."""
        longest = self._backend.longest_token
        return 0 if longest is None else -(-len(text.encode()) // longest)

    def start_rendering(self) -> None:
        """Start the process that renders the chat template, and find which forms the template takes and shows.

        Raises:
            ModelUnsupported: the template is not jinja.
        """
        if not self.has_chat_template:
            return
        try:
            _, shown = self._forms
            _ = self.shows_tools  # rendered and cached now, on this thread, since the server asks on its event loop
        except TemplateBroken as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise ModelUnsupported(
                f"The {self._template_name} is broken in line {error.line}: {why}.",
                remedy="Give a template with --chat-template.",
            ) from error
        if "user" not in shown:
            log.warning("the %s does not show users' messages; requests may be refused", self._template_name)

    @cached_property
    def _forms(self) -> tuple[frozenset[str], frozenset[str]]:
        """See `template_forms.roles_in_parts`; empty for a template that exceeded its limits."""
        try:
            return template_forms.roles_in_parts(lambda messages: self._try_to_render(messages, {}))
        except TemplateLimit:
            return frozenset(), frozenset()

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows a request's tools to the model."""
        return self.has_chat_template and self._shows_tools[0]

    @cached_property
    def _shows_tools(self) -> tuple[bool, bool]:
        """Whether the template shows a request's tools, and calls in the history."""
        try:
            return template_forms.shows_tools(self._try_to_render)
        except TemplateLimit:
            return False, False

    @property
    def _template_name(self) -> str:
        return "model's own chat template" if self._chat_template is None else "template of --chat-template"

    # -- text to tokens --------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds the tokenizer's BOS token, if it uses one.

        Raises:
            InvalidRequest: the tokenizer's library fails on this text.
        """
        with library_errors(_fails):
            return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; `options` are those of `render_chat`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """A conversation as text, rendered by the chat template, special tokens included.

        Args:
            messages: OpenAI's message objects, not empty.
            add_generation_prompt: whether the template opens the assistant's turn.
            continue_final_message: leave the last message open instead, so that the model continues it.
            template_kwargs: the template's variables (`tools`, `enable_thinking`, ...).

        Raises:
            InvalidRequest: the model has no template, the template refuses the messages or takes too much time or
                memory for them, or a variable is reserved.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template."
            )
        reserved = sorted(set(template_kwargs) & self._backend.reserved)
        if reserved:
            raise InvalidRequest(f"{reserved[0]!r} is not a template variable.", param="chat_template_kwargs")
        self._check_tools(messages, template_kwargs)
        steering = {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            parts, _ = self._forms
            text = self._render(template_forms.in_parts(messages, parts), template_kwargs, **steering)
            missing = template_forms.missing_message(
                messages,
                text,
                lambda others: self._try_to_render(template_forms.in_parts(others, parts), template_kwargs, **steering),
            )
        except self._backend.failures as error:
            raise InvalidRequest(
                f"The chat template refuses these messages: {error or type(error).__name__}", param="messages"
            ) from error
        except TemplateLimit as error:
            raise InvalidRequest(
                f"The {self._template_name} was ended on these messages: {error}.", param="messages"
            ) from error
        if missing is not None:
            raise InvalidRequest(
                f"The {self._template_name} leaves out the text of messages[{missing}], whose role is "
                f"{messages[missing]['role']}.",
                param=f"messages[{missing}].content",
            )
        return text

    def _check_tools(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
        """Refuse tools and calls that the template would leave out, so that the model would not see them.

        Raises:
            InvalidRequest: names the field.
        """
        remedy = "or take a model that has tools"
        if variables.get("tools") and not self._shows_tools[0]:
            raise InvalidRequest(
                f"This model cannot call tools: the {self._template_name} does not show tools to it. "
                f"Leave them out, {remedy}.",
                param="tools",
            )
        calling = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
        if calling is not None and not self._shows_tools[1]:
            raise InvalidRequest(
                f"This model cannot continue after calls of tools: the {self._template_name} leaves out those of "
                f"messages[{calling}]. Begin a conversation without them, {remedy}.",
                param=f"messages[{calling}].tool_calls",
            )

    def _render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        return self._backend.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            chat_template=self._chat_template,
        )

    def _try_to_render(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], **steering: bool
    ) -> str | None:
        """As `_render`; None if the template does not take these messages.

        Raises:
            TemplateBroken, TemplateLimit: as `Backend.render`.
        """
        try:
            return self._render(messages, variables, **steering)
        except TemplateBroken:
            raise
        except self._backend.failures:
            return None

    # -- tokens to text --------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens, without "clean-up" of spaces. Ids beyond the vocabulary have no text."""
        hidden = self._special if skip_special_tokens else frozenset[int]()
        return self._decode([token for token in ids if token not in hidden])

    def stream(self, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> TextStream:
        """A new incremental decoder; its pieces add up to `decode`. Special tokens in `shown` appear as text."""
        hidden = self._special - shown if skip_special_tokens else frozenset[int]()
        if self._backend.byte_level:
            return ByteTextStream(lambda token: b"" if token in hidden else self.token_bytes(token))
        return WindowStream(self._decode, hidden)

    def token_text(self, token: int) -> str:
        """The text of one token inside a text, leading space included; U+FFFD for a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token inside a text; `token_bytes` caches them."""
        if not 0 <= token < self.vocab_size:
            return b""
        name = self._backend.name_of(token)
        if name is None:
            return b""
        if self._backend.byte_level:
            return from_byte_level(name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        # Decode after another token, because decoders strip the space of the first one.
        return self._decode([self._anchor, token])[len(self._decode([self._anchor])) :].encode()

    def _decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self.vocab_size]
        with library_errors(_fails):
            return self._backend.decode(known)

    def _find_anchor(self) -> int:
        """A token that decodes to plain text: the last one of "a"."""
        ids = [t for t in self._backend.encode("a", add_special_tokens=False) if t not in self._special]
        return ids[-1] if ids else 0


def _fails(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The model's tokenizer fails on this text: {reason}")
