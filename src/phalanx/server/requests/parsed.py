"""Parsed requests: frozen, with every default filled in. The server schedules only these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from phalanx.catalog.short_names import without_host
from phalanx.server.outputs.output_formats import OutputFormats
from phalanx.server.outputs.pieces import ToolDefinition
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.types import Sampling


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters for fields that a request leaves out: generation_config.json's, else OpenAI's (as vLLM)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def served_names(config: ServerConfig) -> tuple[str, ...]:
    """The model's names as clients see them; the first one is the default."""
    return config.served_model_name or (shown_name(config.engine.model),)


def shown_name(model: str) -> str:
    """A model argument without directories: a directory's last part, other names without the hub's host."""
    model = without_host(model)
    path = Path(model).expanduser()
    if not (model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.is_dir()):
        return model
    return path.name if path.name not in ("", "..") else path.resolve().name


class ApiModel(Struct, frozen=True, kw_only=True):
    """The served model as the API shows it, and the API's limits."""

    names: tuple[str, ...]  # the first one is the default
    hidden_name: str | None = None  # understood as the first one, but never shown: the model argument, maybe a path
    max_n: int  # choices per prompt
    max_prompts: int
    default_max_tokens: int | None = None  # of a text completion that names none; None: as many as there is room for
    clamp_max_tokens: bool = False  # lower a max_tokens that the context has no room for; else refuse it
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, object]
    formats: OutputFormats = OutputFormats()  # in which the model writes calls and reasoning
    shows_tools: bool = True  # the model's chat template shows it the tools of a request
    drop_tools: Callable[[], None] | None = None  # is told that a request's tools are left out; None: they are refused
    auto_tools: bool = True  # tools may be called where a request does not say so

    @property
    def tool_parser(self) -> str | None:
        """The format of the model's calls; None if it cannot call tools.

        It can if its template shows it the tools, and if the format in which it writes calls is known.
        """
        return self.formats.tools.name if self.formats.tools is not None and self.shows_tools else None


class AnswerGrammar(Struct, frozen=True, kw_only=True):
    """What a request says its answer looks like, as llguidance takes it. Not compiled yet."""

    param: str  # the field, for errors
    place: str  # the part of it that was translated, for errors, e.g. "response_format.json_schema.schema"
    grammar: dict[str, Any]  # an entry of llguidance's `{"grammars": [...]}`
    is_gbnf: bool = False  # its text is in llama.cpp's notation, and has to be translated first
    parts: tuple[AnswerGrammar, ...] = ()  # JSON schemas of other fields that it contains, to blame for a refusal


class Options(Struct, frozen=True, kw_only=True):
    """The options of a request, the same for chat and text completions."""

    model: str
    n: int
    stream: bool
    include_usage: bool  # one more chunk with it at the end of a stream
    continuous_usage: bool  # the usage so far in every chunk of a stream
    timing: bool
    speculation: bool  # report accepted and rejected draft tokens in `usage`
    max_drafts: int | None  # drafted tokens per step, at most; None: the engine decides
    sampling: Sampling  # of choice 0, with the client's seed
    seeded: bool  # False: the server draws a seed
    max_tokens: int | None  # None: as many as the context has room for
    max_tokens_field: str = "max_tokens"  # what the client calls it, for errors
    clamp_max_tokens: bool  # if it has no room for max_tokens: lower them; else refuse them
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    timeout_s: float | None
    cache_salt: str  # see SequenceRequest
    answer: AnswerGrammar | None = None  # what the answer looks like; None: any text


class ToolUse(Struct, frozen=True, kw_only=True):
    """The tools that the model may call in its answer."""

    tools: tuple[ToolDefinition, ...]  # at least one; of a named one, only that
    required: bool  # the answer is a call, or several
    parallel: bool  # it may be several

    @property
    def n_chars(self) -> int:
        """Characters of the tools, roughly."""
        return sum(len(tool.description) + len(str(tool.parameters)) for tool in self.tools)


class Conversation(Struct, frozen=True, kw_only=True):
    """Messages and how to render them."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, object]
    add_generation_prompt: bool
    continue_final_message: bool
    field: str = "messages"  # that holds them in the body, for errors
    is_as_sent: bool = True  # messages[i] here is messages[i] of the body

    @property
    def n_chars(self) -> int:
        """Characters of the messages' texts and of the arguments in their calls, roughly."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        texts = sum(len(message["content"]) for message in self.messages)
        return texts + sum(len(str(call["function"]["arguments"])) for call in calls)


class ChatRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`"""

    options: Options
    conversation: Conversation
    tools: ToolUse | None = None  # None: the model may not call any


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/completions`"""

    options: Options
    prompts: tuple[str | list[int], ...]
    echo: bool


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """`POST /tokenize`"""

    source: str | Conversation
    add_special_tokens: bool
    with_texts: bool
