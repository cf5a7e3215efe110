"""Turns the tokens of one choice into text: incremental decoding, stop strings, log-probabilities.

Text exists only in the server, so the server finds stop strings. It tells the engine after which token the choice
stops (`stopped_at`) and clips the tokens that the engine computed meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal

from phalanx.server.answers.answer_parts import AnswerPart, AnswerParts, Written
from phalanx.server.answers.deltas import ChoiceEnding, Delta, ScoredToken, TokenText, join_calls
from phalanx.server.requests.parsed import Options
from phalanx.server.sequences.output_queue import StreamEnd
from phalanx.text.tokenizer import StopAutomaton, StopStrings, Tokenizer
from phalanx.types import Finished, FinishReason, PromptScored, SequenceRequest, TokenLogprobs, Tokens


class ChoiceDecoder:
    """Takes the events of one choice in order and returns the deltas for the client.

    Stop strings are searched in the model's own text, before it is split into parts. Log-probabilities cover every
    output token, also of reasoning and calls.

    Args:
        parts: splits the text; None: all of it is content.
        marks: ids of special tokens whose text `parts` needs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Options,
        request: SequenceRequest,
        index: int,
        echo: str | None,
        stops: StopAutomaton | None,
        parts: AnswerParts | None = None,
        marks: Collection[int] = (),
    ) -> None:
        self.stopped_at: int | None = None  # number of output tokens that completed a stop string, or the only call
        self._tokenizer = tokenizer
        self._options = options
        self._request = request
        self._index = index
        self._echo = echo
        self._parts = parts
        self._marks = frozenset(marks) if parts is not None else frozenset()
        self._text = tokenizer.stream(skip_special_tokens=options.skip_special_tokens, shown=self._marks)
        self._stops = None if stops is None else StopStrings(stops, include=options.include_stop)
        self._n_tokens = 0
        self._n_chars = 0 if echo is None else len(echo)  # of the choice's text, including text that is held back
        self._n_shown = self._n_chars  # of them, sent
        self._unsent: deque[ScoredToken] = deque()  # log-probabilities of tokens whose text was not sent yet
        self._tokens: list[int] = []  # with `parts`
        self._limit = options.max_tokens  # 0 (echo only): no generated token is part of the answer

    def opening(self) -> Delta | None:
        """The echoed prompt, once; None without echo, or if `scored_prompt` sends it with its log-probabilities."""
        if self._echo is None or self._request.prompt_logprobs is not None:
            return None
        echo, self._echo = self._echo, None
        return Delta(index=self._index, text=echo)

    def scored_prompt(self, event: PromptScored) -> Delta:
        """The echoed prompt with its log-probabilities."""
        stream = self._tokenizer.stream(skip_special_tokens=self._options.skip_special_tokens)
        offset = 0
        scored = []
        for token, logprobs in zip(self._request.prompt, event.logprobs, strict=True):
            scored.append(self._scored(token, logprobs, offset))
            offset += len(stream.add(token))
        return Delta(index=self._index, text=self._echo or "", scored=tuple(scored))

    def tokens(self, event: Tokens) -> list[Delta]:
        """The deltas of new tokens, one for each token whose text is not held back; none after a stop."""
        new: list[Delta] = []
        for i, token in enumerate(event.tokens):
            if self.stopped_at is not None or self._limit == 0:
                break
            if event.logprobs is not None:
                self._unsent.append(self._scored(token, event.logprobs[i], self._n_chars))
            part = self._part(self._add(token), token)
            delta = self._delta([part], self._sendable())
            if delta.text or delta.reasoning or delta.calls or delta.scored:
                new.append(delta)
        return new

    def end(self, event: StreamEnd) -> Delta:
        """The last delta: text that was held back, and the ending."""
        text = ""
        if self.stopped_at is None and self._limit != 0:
            text = self._show(self._text.finish())
            if self._stops is not None and self.stopped_at is None:
                text += self._count(self._stops.finish())
        last = [self._part(text)]
        if self._parts is not None and not self._parts.ended:
            last.append(self._parts.finish())
        return self._delta(last, self._sendable(ended=True), self.ending(event))

    def finished_from_known_tokens(self) -> Finished | None:
        """How the choice has ended, if all its tokens were known from the start; None if it continues."""
        request, known = self._request, self._request.committed
        if self.stopped_at is not None:
            return Finished(request.id, "stop", self.stopped_at)
        if len(known) > may_stop(request) and known[-1] in request.stop.stop_ids:
            return Finished(request.id, "stop", len(known), stop_id=known[-1])
        return Finished(request.id, "length", len(known)) if len(known) >= request.stop.max_tokens else None

    def written(self) -> tuple[Written, list[int]] | None:
        """The choice's calls and its tokens, once it has ended; None without calls, or if a stop string cut it."""
        cut = self._stops is not None and self._stops.matched is not None
        written = None if self._parts is None or cut else self._parts.written()
        return None if written is None else (written, self._tokens)

    def ending(self, event: StreamEnd) -> ChoiceEnding:
        """The choice's ending, with counts clipped to the stop string."""
        finished, timings = event.finished, event.timings
        n = finished.n_tokens if self.stopped_at is None else min(self.stopped_at, finished.n_tokens)
        detail = self._detail(finished)
        tpot = None
        if timings.first_token is not None and timings.last_token is not None and finished.n_tokens > 1:
            # A busy process receives tokens in a burst, and the engine's clock restarts with the engine: so each of the
            # two can only be too short.
            decode_s = max(timings.last_token - timings.first_token, finished.timing.decode_s)
            tpot = decode_s / (finished.n_tokens - 1)
        return ChoiceEnding(
            reason=self._reason(finished.reason),
            detail=detail,
            stop_string=self._stop_string(),
            context_full=finished.reason == "length" and bool(self._clamped()),
            n_tokens=0 if self._limit == 0 else n,
            cached_tokens=finished.cached_tokens,
            disk_tokens=finished.disk_tokens,
            drafted_tokens=finished.drafted_tokens,
            accepted_tokens=finished.accepted_tokens,
            timing=finished.timing,
            ttft_s=None if timings.first_token is None else timings.first_token - timings.arrived,
            tpot_s=tpot,
        )

    def _stop_string(self) -> str | None:
        matched = None if self._stops is None else self._stops.matched
        return None if matched is None else matched.string

    @property
    def n_tokens(self) -> int:
        """Output tokens so far, up to the one that completed a stop string."""
        return self._n_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens so far that were reasoning."""
        return 0 if self._parts is None else self._parts.reasoning_tokens

    def _reason(self, finished: FinishReason) -> Literal["stop", "length", "tool_calls"]:
        if self._limit == 0 or (self.stopped_at is None and finished != "stop"):
            return "length"
        return "tool_calls" if self._parts is not None and self._parts.called else "stop"

    def _part(self, text: str, *tokens: int) -> AnswerPart:
        """The parts of the text of these tokens."""
        if self._parts is None:
            return AnswerPart(text=text)
        self._tokens += tokens
        if self._parts.ended:
            return AnswerPart()
        part = self._parts.add(text, len(tokens))
        if self._parts.ended and self.stopped_at is None:
            self.stopped_at = self._n_tokens
        return part

    def _delta(
        self, parts: Sequence[AnswerPart], scored: tuple[ScoredToken, ...], ending: ChoiceEnding | None = None
    ) -> Delta:
        return Delta(
            index=self._index,
            text="".join(part.text for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            calls=join_calls([call for part in parts for call in part.calls]),
            scored=scored,
            ending=ending,
        )

    def _detail(self, finished: Finished) -> str:
        """Details of the ending beyond its reason."""
        detail = finished.detail
        if finished.reason == "timeout":
            asked = self._options.timeout_s  # None: a gateway has set it
            detail = detail or f"The request's timeout{'' if asked is None else f' of {asked:g} s'} passed."
        elif finished.reason == "length":
            detail = detail or self._clamped()
        broken = "" if self._parts is None else self._parts.detail
        return f"{detail} {broken}".strip()

    def _clamped(self) -> str:
        """The note on a lowered max_tokens; empty if it was not lowered."""
        wanted, given = self._options.max_tokens, self._request.stop.max_tokens
        if wanted is None or wanted <= given:
            return ""
        return (
            f"{self._options.max_tokens_field} was {wanted}; the context had room for {given} tokens after the prompt."
        )

    def _add(self, token: int) -> str:
        self._n_tokens += 1
        is_stop = token in self._request.stop.stop_ids and self._n_tokens > self._request.stop.min_tokens
        if is_stop and not self._options.include_stop and token not in self._marks:
            return ""  # the text of a stop token is not part of the answer
        text = self._text.add(token)
        self._n_chars += len(text)
        return self._show(text)

    def _show(self, text: str) -> str:
        """The text that can be sent now. Stop strings count only after `min_tokens` tokens."""
        if self._stops is None or self._n_tokens <= self._options.min_tokens:
            return self._count(text)
        shown = self._stops.add(text, self._n_tokens)
        if self._stops.matched is not None:
            self.stopped_at = self._stops.matched.n_tokens
        return self._count(shown)

    def _count(self, shown: str) -> str:
        self._n_shown += len(shown)
        return shown

    def _sendable(self, *, ended: bool = False) -> tuple[ScoredToken, ...]:
        """Log-probabilities that can be sent now: those of the text that was sent.

        With stop strings, a token's are sent if it begins in text that was sent; those of the last tokens only once no
        stop string can cut them off. A token without text, or with a part of a character, belongs to the next text.
        """
        everything = self._stops is None or (ended and self.stopped_at is None)
        sendable = []
        while self._unsent and (everything or self._unsent[0].offset < self._n_shown):
            sendable.append(self._unsent.popleft())
        return tuple(sendable)

    def _scored(self, token: int, logprobs: TokenLogprobs | None, offset: int) -> ScoredToken:
        if logprobs is None:
            return ScoredToken(self._piece(token, 0.0), None, (), offset)
        top = tuple(self._piece(other, logprob) for other, logprob in logprobs.top)
        return ScoredToken(self._piece(token, logprobs.logprob), logprobs.logprob, top, offset)

    def _piece(self, token: int, logprob: float) -> TokenText:
        return TokenText(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)


def may_stop(request: SequenceRequest) -> int:
    """Number of tokens after which a stop id ends the sequence."""
    return 0 if request.grammar else request.stop.min_tokens
