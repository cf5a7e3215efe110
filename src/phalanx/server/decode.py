"""From the tokens of one choice to text: incremental decoding, stop strings, log-probabilities.

Text exists only in the server, so the server finds stop strings (A9). It tells the engine after which token the choice
stops (`stopped_at`) and clips the tokens that the engine computed meanwhile. Does not know HTTP or OpenAI's objects.
"""

from __future__ import annotations

from phalanx.server.answers import Delta, Ending, ScoredToken, TokenText
from phalanx.server.output_queue import StreamEnd
from phalanx.server.parsed import Options
from phalanx.text.tokenizer import StopStrings, Tokenizer
from phalanx.types import PromptScored, SequenceRequest, TokenLogprobs, Tokens


class ChoiceDecoder:
    """Takes the events of one choice in order and returns the deltas for the client."""

    def __init__(
        self, tokenizer: Tokenizer, options: Options, request: SequenceRequest, index: int, echo: str | None
    ) -> None:
        self.stopped_at: int | None = None  # number of output tokens that completed a stop string
        self._tokenizer = tokenizer
        self._options = options
        self._request = request
        self._index = index
        self._echo = echo
        self._text = tokenizer.stream(skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stop_strings, include=options.include_stop) if options.stop_strings else None
        self._n_tokens = 0
        self._n_chars = 0 if echo is None else len(echo)  # of the choice's text, including text that is held back
        self._limit = options.max_tokens  # 0 (echo only): no generated token is part of the answer

    def opening(self) -> Delta | None:
        """The echoed prompt; None if there is no echo or if `scored_prompt` will send it with its log-probabilities."""
        if self._echo is None or self._request.prompt_logprobs is not None:
            return None
        return Delta(index=self._index, text=self._echo)

    def scored_prompt(self, event: PromptScored) -> Delta:
        """The echoed prompt with its log-probabilities."""
        stream = self._tokenizer.stream(skip_special_tokens=self._options.skip_special_tokens)
        offset = 0
        scored = []
        for token, logprobs in zip(self._request.prompt, event.logprobs, strict=True):
            scored.append(self._scored(token, logprobs, offset))
            offset += len(stream.add(token))
        return Delta(index=self._index, text=self._echo or "", scored=tuple(scored))

    def tokens(self, event: Tokens) -> Delta | None:
        """The delta of new tokens; None while their text is held back, and for tokens after a stop."""
        text = ""
        scored = []
        for i, token in enumerate(event.tokens):
            if self.stopped_at is not None or self._limit == 0:
                break
            if event.logprobs is not None:
                scored.append(self._scored(token, event.logprobs[i], self._n_chars))
            text += self._add(token)
        if not text and not scored:
            return None
        return Delta(index=self._index, text=text, scored=tuple(scored))

    def end(self, event: StreamEnd) -> Delta:
        """The last delta: text that was held back, and the ending."""
        text = ""
        if self.stopped_at is None and self._limit != 0:
            text = self._show(self._text.finish())
            if self._stops is not None and self.stopped_at is None:
                text += self._stops.finish()
        return Delta(index=self._index, text=text, ending=self.ending(event))

    def ending(self, event: StreamEnd) -> Ending:
        """The choice's ending, with counts clipped to the stop string."""
        finished, timings = event.finished, event.timings
        n = finished.n_tokens if self.stopped_at is None else min(self.stopped_at, finished.n_tokens)
        detail = finished.detail
        if finished.reason == "timeout":
            detail = detail or f"The request's timeout of {self._options.timeout_s:g} s passed."
        stopped = self.stopped_at is not None or finished.reason == "stop"
        tpot = None
        if timings.first_token is not None and timings.last_token is not None and finished.n_tokens > 1:
            # This process may receive tokens in a burst if it was busy; the engine's clock restarts with the engine.
            # Each of the two can only be too short.
            decode_s = max(timings.last_token - timings.first_token, finished.timing.decode_s)
            tpot = decode_s / (finished.n_tokens - 1)
        return Ending(
            reason="stop" if stopped and self._limit != 0 else "length",
            detail=detail,
            n_tokens=0 if self._limit == 0 else n,
            cached_tokens=finished.cached_tokens,
            drafted_tokens=finished.drafted_tokens,
            accepted_tokens=finished.accepted_tokens,
            timing=finished.timing,
            ttft_s=None if timings.first_token is None else timings.first_token - timings.arrived,
            tpot_s=tpot,
        )

    def _add(self, token: int) -> str:
        self._n_tokens += 1
        is_stop = token in self._request.stop.stop_ids and self._n_tokens > self._request.stop.min_tokens
        if is_stop and not self._options.include_stop:
            return ""  # the text of a stop token is not part of the answer
        text = self._text.add(token)
        self._n_chars += len(text)
        return self._show(text)

    def _show(self, text: str) -> str:
        """The part of the text so far that can be sent now. Stop strings count only after `min_tokens` tokens."""
        if self._stops is None or self._n_tokens <= self._options.min_tokens:
            return text
        shown = self._stops.add(text, self._n_tokens)
        if self._stops.matched is not None:
            self.stopped_at = self._stops.matched.n_tokens
        return shown

    def _scored(self, token: int, logprobs: TokenLogprobs | None, offset: int) -> ScoredToken:
        if logprobs is None:
            return ScoredToken(self._piece(token, 0.0), None, (), offset)
        top = tuple(self._piece(other, logprob) for other, logprob in logprobs.top)
        return ScoredToken(self._piece(token, logprobs.logprob), logprobs.logprob, top, offset)

    def _piece(self, token: int, logprob: float) -> TokenText:
        return TokenText(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)
