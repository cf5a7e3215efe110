"""The generation of one request's answer: reads its output queue, decodes every choice, counts its tokens.

Yields deltas (text, scored tokens, endings) that `routes.py` streams or collects. Does not know HTTP, OpenAI's objects
or the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from phalanx.server.answers import Delta, Ending, ScoredToken, Usage
from phalanx.server.decode import ChoiceDecoder
from phalanx.server.journal import RequestSlots
from phalanx.server.output_queue import Event, StreamEnd
from phalanx.server.parsed import Options
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import PromptScored, SequenceRequest, Tokens


class Generation:
    """Deltas of all choices of one request, in the order they were committed."""

    def __init__(
        self, tokenizer: Tokenizer, options: Options, requests: Sequence[SequenceRequest], echoes: Sequence[str | None]
    ) -> None:
        self._options = options
        self._requests = requests
        self._decoders = [
            ChoiceDecoder(tokenizer, options, request, index, echoes[index // options.n])
            for index, request in enumerate(requests)
        ]
        self._endings: dict[int, Ending] = {}
        self._slots: RequestSlots | None = None

    def begin(self, slots: RequestSlots) -> list[Delta]:
        """Submit the choices to the engine. Returns the deltas that exist already: echoed prompts.

        Raises:
            EngineUnavailable: the engine went down meanwhile.
        """
        slots.submit(self._requests)
        self._slots = slots
        return [delta for decoder in self._decoders if (delta := decoder.opening()) is not None]

    async def deltas(self, keepalive_s: float | None) -> AsyncGenerator[list[Delta]]:
        """Yield new deltas, at most one per choice; an empty list after every `keepalive_s` seconds without any.

        Raises:
            PhalanxError: the request failed.
        """
        assert self._slots is not None, "begin comes first"
        slots = self._slots
        while len(self._endings) < len(self._requests):
            try:
                async with asyncio.timeout(keepalive_s):
                    events = await slots.output.read()
            except TimeoutError:
                yield []
                continue
            deltas = [delta for index, event in events for delta in self._decode(slots, index, event)]
            if deltas:
                yield merge(deltas)

    async def choices(self, slots: RequestSlots) -> list[Delta]:
        """Submit the choices and wait for all of them. Returns one complete delta per choice.

        Raises:
            PhalanxError: the request failed.
        """
        by_choice: list[list[Delta]] = [[] for _ in self._requests]
        for delta in self.begin(slots):
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
            predicted=(accepted, drafted - accepted) if self._options.speculation else None,
        )

    @property
    def first_ending(self) -> Ending:
        """The ending of choice 0. Valid once `deltas` is exhausted."""
        return self._endings[0]

    def _decode(self, slots: RequestSlots, index: int, event: Event) -> list[Delta]:
        decoder = self._decoders[index]
        delta: Delta | None
        match event:
            case Tokens():
                delta = decoder.tokens(event)
                if decoder.stopped_at is not None:
                    slots.finish(index, decoder.stopped_at)
            case PromptScored():
                delta = decoder.scored_prompt(event)
            case StreamEnd():
                delta = decoder.end(event)
        if delta is None:
            return []
        if delta.ending is not None:
            self._endings[index] = delta.ending
        return [delta]


def merge(deltas: Sequence[Delta]) -> list[Delta]:
    """Join the deltas of each choice, so that a client that reads slowly gets fewer and longer chunks."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [join(group) for group in by_index.values()]


def join(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of one choice into one. `deltas` is not empty."""
    if len(deltas) == 1:
        return deltas[0]
    scored: tuple[ScoredToken, ...] = tuple(entry for delta in deltas for entry in delta.scored)
    text = "".join(delta.text for delta in deltas)
    return Delta(index=deltas[0].index, text=text, scored=scored, ending=deltas[-1].ending)
