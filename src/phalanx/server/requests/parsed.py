"""Parsed requests: frozen, with all defaults. The server schedules only these."""

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
    hidden_name: str | None = None  # accepted like the first one, but never shown: the model argument, maybe a path
    max_n: int  # choices per prompt
    max_prompts: int
    default_max_tokens: int | None = None  # of a text completion without a limit; None: as many as there is room for
    clamp_max_tokens: bool = False  # lower a max_tokens that the context has no room for; else refuse it
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, object]
    formats: OutputFormats = OutputFormats()  # in which the model writes calls and reasoning
    shows_tools: bool = True  # the chat template shows a request's tools to the model
    drop_tools: Callable[[], None] | None = None  # called when a request's tools are left out; None: they are refused
    auto_tools: bool = True  # the model may call tools if a request has no tool_choice

    @property
    def tool_parser(self) -> str | None:
        """The format of the model's calls; None if it cannot call tools.

        It can if its template shows it the tools, and the format of its calls is known.
        """
        return self.formats.tools.name if self.formats.tools is not None and self.shows_tools else None


class AnswerGrammar(Struct, frozen=True, kw_only=True):
    """The grammar of an answer, from the request, in llguidance's format. Not compiled yet."""

    param: str  # the field, for errors
    place: str  # of the grammar in the body, for errors, e.g. "response_format.json_schema.schema"
    grammar: dict[str, Any]  # an entry of llguidance's `{"grammars": [...]}`
    is_gbnf: bool = False  # its text is in llama.cpp's notation, and must be translated first
    parts: tuple[AnswerGrammar, ...] = ()  # JSON schemas of other fields in it, to find the cause of a refusal


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
    max_tokens_field: str = "max_tokens"  # its name in the body, for errors
    clamp_max_tokens: bool  # lower a max_tokens that the context has no room for; else refuse it
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    timeout_s: float | None
    cache_salt: str  # see SequenceRequest
    answer: AnswerGrammar | None = None  # of the answer; None: any text


class ToolUse(Struct, frozen=True, kw_only=True):
    """The tools that the model may call in its answer."""

    tools: tuple[ToolDefinition, ...]  # at least one; only the named one if the request names one
    required: bool  # the answer must be a call
    parallel: bool  # the answer may have several calls

    @property
    def n_chars(self) -> int:
        """Approximate characters of the tools."""
        return sum(len(tool.description) + len(str(tool.parameters)) for tool in self.tools)


class Conversation(Struct, frozen=True, kw_only=True):
    """Messages and how to render them."""

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, object]
    add_generation_prompt: bool
    continue_final_message: bool
    field: str = "messages"  # of the body, for errors
    is_as_sent: bool = True  # messages[i] here is messages[i] of the body

    @property
    def n_chars(self) -> int:
        """Approximate characters of the messages' texts and of the arguments in their calls."""
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
