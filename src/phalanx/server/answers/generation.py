"""Generates one request's answer: reads its output queue, decodes every choice, counts its tokens.

Yields deltas (text, scored tokens, endings) that `endpoints/generating.py` streams or collects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter

from msgspec import Struct

from phalanx.server.answers.answer_parts import AnswerParts, Written, call_id
from phalanx.server.answers.choice_decoder import ChoiceDecoder
from phalanx.server.answers.deltas import ChoiceEnding, Delta, Usage, join_calls
from phalanx.server.outputs.pieces import OutputParser
from phalanx.server.requests.parsed import Options
from phalanx.server.sequences.journal import RequestSlots
from phalanx.server.sequences.output_queue import Event, StreamEnd, Timings
from phalanx.text.tokenizer import StopAutomaton, Tokenizer
from phalanx.types import PromptScored, SequenceRequest, Tokens

KINDS = (attrgetter("reasoning"), attrgetter("text"), attrgetter("calls"))
"""The fields of a delta, in the order in which formats write them."""
WRITTEN_AT_ONCE = 1 << 18  # prompt tokens of choices that are written to the engine in one call, in 5 ms

Watch = Callable[[int, Event | None, int], None]
"""Called with each event that a choice's decoder took in (None: its echoed prompt), and its output tokens so far."""


class ParserConfig(Struct, frozen=True, kw_only=True):
    """How the text of a request's choices is parsed."""

    parser: Callable[[], OutputParser | None]  # makes one; None: all text is content
    marks: frozenset[int]  # ids of special tokens whose text it needs
    one_call: bool  # a choice ends with its first call
    reasons: bool  # the model may write reasoning, whose tokens are then reported
    remember: Callable[[Written, list[int]], None] | None = None  # called with each choice with calls, and its tokens


class Generation:
    """Deltas of all choices of one request, in the order they were committed.

    Args:
        id: of the answer.
        parser_config: of the choices' text; None: all of it is content.
        watch: called with the events that the deltas are made of.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Options,
        requests: Sequence[SequenceRequest],
        echoes: Sequence[str | None],
        *,
        id: str,
        parser_config: ParserConfig | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._options = options
        self._requests = requests
        self._parser_config = parser_config
        self._watch = watch
        stops = StopAutomaton(options.stop_strings) if options.stop_strings else None
        marks = frozenset[int]() if parser_config is None else parser_config.marks
        self._decoders = [
            ChoiceDecoder(
                tokenizer, options, request, index, echoes[index // options.n], stops, self._parts(id, index), marks
            )
            for index, request in enumerate(requests)
        ]
        self._endings: dict[int, ChoiceEnding] = {}
        self._slots: RequestSlots | None = None

    def take(self, events: Iterable[tuple[int, Event | None]]) -> list[Delta]:
        """The deltas of the next events of choices; None is a choice's echoed prompt, if it was not taken yet."""
        return merge([delta for index, event in events for delta in self._take(index, event)])

    async def begin(self, slots: RequestSlots) -> None:
        """Submit to the engine the choices that need further tokens.

        Raises:
            EngineUnavailable: the engine went down meanwhile.
            QueueFull: there is no room for the prompts.
        """
        slots.hold_prompts(sum(len(request.prompt) for request in self._requests))
        self._slots = slots
        n_tokens = 0
        for index, request in enumerate(self._requests):
            if index in self._endings or self._decoders[index].finished_from_known_tokens() is not None:
                continue
            slots.submit([request], index)
            n_tokens += len(request.prompt)
            if n_tokens > WRITTEN_AT_ONCE:
                await asyncio.sleep(0)
                n_tokens = 0

    def opening(self) -> Iterator[Delta]:
        """The deltas that exist already: echoed prompts, and endings of choices that have all their tokens."""
        for index, decoder in enumerate(self._decoders):
            yield from self._take(index, None)
            if index not in self._endings and (finished := decoder.finished_from_known_tokens()) is not None:
                yield from self._take(index, StreamEnd(finished, Timings(0.0)))

    async def deltas(self, keepalive_s: float | None) -> AsyncGenerator[list[Delta]]:
        """Yield new deltas, those of each choice in order.

        A list is empty if new tokens have no text yet, the engine is down or back, or `keepalive_s` seconds have
        passed.

        Raises:
            PhalanxError: the request failed.
        """
        assert self._slots is not None, "begin comes first"
        slots = self._slots
        while not self.is_complete():
            try:
                async with asyncio.timeout(keepalive_s):
                    events = await slots.output.read()
            except TimeoutError:
                events = []
            yield merge([delta for index, event in events for delta in await self._decode(slots, index, event)])

    async def choices(self, slots: RequestSlots) -> list[Delta]:
        """Submit the choices and wait for all of them. Returns one complete delta per choice.

        Raises:
            PhalanxError: the request failed.
        """
        by_choice: list[list[Delta]] = [[] for _ in self._requests]
        await self.begin(slots)
        for delta in self.opening():
            by_choice[delta.index].append(delta)
        async for deltas in self.deltas(None):
            for delta in deltas:
                by_choice[delta.index].append(delta)
        return [join(deltas) for deltas in by_choice]

    def usage(self) -> Usage:
        """Token counts of the choices that ended. A prompt counts once, however many choices it has."""
        first_choices = range(0, len(self._requests), self._options.n)
        accepted = sum(ending.accepted_tokens for ending in self._endings.values())
        drafted = sum(ending.drafted_tokens for ending in self._endings.values())
        return Usage(
            prompt=sum(len(self._requests[i].prompt) for i in first_choices),
            completion=sum(ending.n_tokens for ending in self._endings.values()),
            cached=sum(self._endings[i].cached_tokens for i in first_choices if i in self._endings),
            from_disk=sum(self._endings[i].disk_tokens for i in first_choices if i in self._endings),
            predicted=(accepted, drafted - accepted) if self._options.speculation else None,
            reasoning=self._reasoning_tokens(),
        )

    def usage_so_far(self) -> Usage:
        """Token counts of what was decoded until now."""
        prompts = self._requests[:: self._options.n]
        return Usage(
            prompt=sum(len(request.prompt) for request in prompts),
            completion=sum(decoder.n_tokens for decoder in self._decoders),
            reasoning=self._reasoning_tokens(),
        )

    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._endings) == len(self._requests)

    @property
    def first_ending(self) -> ChoiceEnding:
        """The ending of choice 0. Valid once `deltas` is exhausted."""
        return self._endings[0]

    async def _decode(self, slots: RequestSlots, index: int, event: Event) -> list[Delta]:
        if isinstance(event, PromptScored):
            return await asyncio.to_thread(self._take, index, event)  # one entry per prompt token
        deltas = self._take(index, event)
        if isinstance(event, Tokens) and (stopped_at := self._decoders[index].stopped_at) is not None:
            slots.finish(index, stopped_at)
        return deltas

    def _take(self, index: int, event: Event | None) -> list[Delta]:
        decoder = self._decoders[index]
        match event:
            case Tokens():
                deltas = decoder.tokens(event)
            case PromptScored():
                deltas = [decoder.scored_prompt(event)]
            case StreamEnd():
                deltas = [self._end(index, event)]
            case None:
                if (echo := decoder.opening()) is None:
                    return []
                deltas = [echo]
        if self._watch is not None:
            self._watch(index, event, decoder.n_tokens)
        return deltas

    def _end(self, index: int, event: StreamEnd) -> Delta:
        """The last delta of a choice."""
        decoder = self._decoders[index]
        delta = decoder.end(event)
        assert delta.ending is not None
        self._endings[index] = delta.ending
        self._remember(decoder)
        return delta

    def _parts(self, id: str, index: int) -> AnswerParts | None:
        if self._parser_config is None or (parser := self._parser_config.parser()) is None:
            return None
        return AnswerParts(parser, one_call=self._parser_config.one_call, id_of=partial(call_id, id, index))

    def _reasoning_tokens(self) -> int | None:
        if self._parser_config is None or not self._parser_config.reasons:
            return None
        return sum(decoder.reasoning_tokens for decoder in self._decoders)

    def _remember(self, decoder: ChoiceDecoder) -> None:
        if self._parser_config is not None and self._parser_config.remember is not None:
            if (written := decoder.written()) is not None:
                self._parser_config.remember(*written)


def merge(deltas: Sequence[Delta]) -> list[Delta]:
    """Join the consecutive deltas of each choice, so that a client that reads slowly gets fewer and longer chunks.

    The joined output is the same, however deltas are grouped: otherwise a server that continues another's stream could
    not know what the client has.
    """
    by_index: dict[int, list[list[Delta]]] = {}
    for delta in deltas:
        groups = by_index.setdefault(delta.index, [])
        if groups and _joins(groups[-1][-1], delta):
            groups[-1].append(delta)
        else:
            groups.append([delta])
    return [join(group) for groups in by_index.values() for group in groups]


def _joins(before: Delta, after: Delta) -> bool:
    """Whether one delta of both is written alike: the order is reasoning, text, calls.

    Log-probabilities belong to the text beside them. A call that was shown cannot become invalid from the start.
    """
    if any(call.broken for call in after.calls):
        return False
    mine, others = _kinds(before), _kinds(after)
    return mine == others if after.scored else max(mine, default=0) <= min(others, default=len(KINDS))


def _kinds(delta: Delta) -> list[int]:
    return [i for i, kind in enumerate(KINDS) if kind(delta)]


def join(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one choice into one. `deltas` is not empty."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=join_calls([call for delta in deltas for call in delta.calls]),
        scored=tuple(entry for delta in deltas for entry in delta.scored),
        ending=deltas[-1].ending,
    )
