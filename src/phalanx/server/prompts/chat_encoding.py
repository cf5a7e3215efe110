"""Encodes a chat request: its prompt, its grammar, and the parser of its answers.

Remembers the answers that call tools, and reuses their tokens in later prompts.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from phalanx.server.answers.answer_parts import Written
from phalanx.server.answers.call_memory import CallMemory, Turn
from phalanx.server.answers.generation import ParserConfig
from phalanx.server.fields.refusals import unsupported
from phalanx.server.fields.schema_numbers import check_numbers
from phalanx.server.outputs.lark import GrammarUnsupported
from phalanx.server.outputs.output_formats import OutputFormats, make_parser
from phalanx.server.outputs.output_grammars import tool_grammar, with_reasoning
from phalanx.server.outputs.pieces import OutputParser
from phalanx.server.prompts.grammar_checks import WrapGrammar, answer_alone
from phalanx.server.prompts.prompt_encoder import Prompts
from phalanx.server.prompts.rendering import Rendered
from phalanx.server.requests.parsed import AnswerGrammar, ChatRequest, ToolUse


class Encoded(Struct, frozen=True, kw_only=True):
    """A request in the engine's terms."""

    prompts: list[list[int]]
    is_recalled: bool = False  # see `Rendered`
    checkpoint: int = 0  # the same
    answer: AnswerGrammar | None = None  # takes the place of the options' own
    wrap: WrapGrammar = answer_alone  # the answer's grammar -> the grammar of the model's whole output
    parser_config: ParserConfig | None = None


def union_grammar(one: str, other: str) -> str:
    """A grammar that matches what either of two grammars matches; all three are serialised."""
    entries: list[dict[str, Any]] = [{"lark_grammar": "start: @either_0 | @either_1"}]
    for i, grammar in enumerate((one, other)):
        first, *rest = msgspec.json.decode(grammar)["grammars"]
        for entry in rest:  # whose names are global
            own = f"{entry['name']}_{i}"
            first = {**first, "lark_grammar": first["lark_grammar"].replace(f"@{entry['name']}", f"@{own}")}
            entries.append({**entry, "name": own})
        entries.append({**first, "name": f"either_{i}"})
    return msgspec.json.encode({"grammars": entries}).decode()


class ChatEncoder:
    """Encodes chat requests for one model.

    Args:
        formats: the formats of calls and reasoning that the model writes.
        memory: of the answers that called tools.
    """

    def __init__(self, prompts: Prompts, formats: OutputFormats, memory: CallMemory) -> None:
        self._prompts = prompts
        self._formats = formats
        self._marks = _ids(formats)
        self._marks_without_tools = _ids(formats.without_tools())
        self._memory = None if formats.tools is None else memory

    async def encode(
        self,
        request: ChatRequest,
        owner: str,
        limit: int,
        begun: list[int] | None = None,
        *,
        with_checkpoint: bool = False,
    ) -> Encoded:
        """The request's prompt, and the grammar and parser of its answer.

        Args:
            owner: of its API key.
            limit: tokens of the context.
            begun, with_checkpoint: see `Prompts.encode_chat`.

        Raises:
            InvalidRequest: as `Prompts.encode_chat`.
        """
        rendered = await self._prompts.encode_chat(
            request.conversation,
            limit=limit,
            memory=self._memory,
            owner=owner,
            begun=begun,
            with_checkpoint=with_checkpoint,
        )
        reasoning = self._formats.reasoning
        in_reasoning = reasoning is not None and reasoning.is_open(rendered.tail)
        encoded = Encoded(
            prompts=[rendered.tokens],
            is_recalled=rendered.is_recalled,
            checkpoint=rendered.checkpoint,
            wrap=self._wrap(in_reasoning),
            parser_config=self._parser_config(request, rendered, in_reasoning, owner),
        )
        return await self._with_calls(encoded, request, in_reasoning)

    async def _with_calls(self, encoded: Encoded, request: ChatRequest, in_reasoning: bool) -> Encoded:
        """With a grammar if the answer must be a call, or may be one instead of the request's own format."""
        tools = request.tools
        if tools is None or not (tools.required or request.options.answer):
            return encoded

        def grammar() -> dict[str, Any]:
            for tool in tools.tools:
                check_numbers(tool.parameters, tool.field)
            return tool_grammar(self._formats, tools.tools, parallel=tools.parallel)

        try:
            calls = await self._prompts.run(tools.n_chars, grammar)
        except GrammarUnsupported as error:
            raise unsupported("tools", f"where calls have a grammar: {error}") from error
        wrap = self._wrap(in_reasoning, is_calls=True)
        if tools.required or request.options.answer is None:
            answer = AnswerGrammar(param="tools", place="tools", grammar=calls, parts=_schemas(tools))
            return replace(encoded, answer=answer, wrap=wrap)
        answer = replace(request.options.answer, parts=_schemas(tools))
        return replace(encoded, answer=answer, wrap=lambda other: union_grammar(wrap(calls), encoded.wrap(other)))

    def _wrap(self, in_reasoning: bool, *, is_calls: bool = False) -> WrapGrammar:
        """A function that puts the model's reasoning before a grammar."""
        if self._formats.reasoning is None:
            return answer_alone
        return partial(with_reasoning, formats=self._formats, in_reasoning=in_reasoning, is_calls=is_calls)

    def _parser_config(self, request: ChatRequest, rendered: Rendered, in_reasoning: bool, owner: str) -> ParserConfig:
        tools = request.tools

        def parser() -> OutputParser | None:
            offered = () if tools is None else tools.tools
            return make_parser(
                self._formats,
                tools=offered,
                in_reasoning=in_reasoning,
                parse_tools=tools is not None,
                is_bound=request.options.answer is not None,
            )

        def remember(written: Written, tokens: list[int]) -> None:
            if self._memory is not None:
                turn = Turn(before=rendered.digest, written=written, tokens=array("i", rendered.tokens + tokens))
                self._memory.remember(owner, turn)

        return ParserConfig(
            parser=parser,
            marks=self._marks_without_tools if tools is None else self._marks,
            one_call=tools is not None and not tools.parallel,
            reasons=self._formats.reasoning is not None,
            remember=remember,
        )


def _schemas(tools: ToolUse) -> tuple[AnswerGrammar, ...]:
    return tuple(
        AnswerGrammar(param="tools", place=tool.field, grammar={"json_schema": tool.parameters}) for tool in tools.tools
    )


def _ids(formats: OutputFormats) -> frozenset[int]:
    """The marks of these formats that are tokens."""
    return frozenset(formats.added_tokens[mark] for mark in formats.marks)
