"""Tokens of one choice to text: incremental decoding, stop strings, log-probabilities.

Text exists only in the server, so stop strings are found here (A9): the engine is told where (`stopped_at`) and
everything counted after that is clipped. Does not know HTTP or OpenAI's objects.
"""

from __future__ import annotations

from phalanx.server.answers import Delta, Ending, Piece, Scored
from phalanx.server.output_queue import Ended
from phalanx.server.parsed import Options
from phalanx.text.tokenizer import StopStrings, Tokenizer
from phalanx.types import PromptScored, SequenceRequest, TokenLogprobs, Tokens


class ChoiceDecoder:
    """OutputQueue it a choice's events in order; it answers with what the client gains."""

    def __init__(
        self, tokenizer: Tokenizer, options: Options, request: SequenceRequest, index: int, echo: str | None
    ) -> None:
        self.stopped_at: int | None = None  # output tokens after which a stop string was complete
        self._tokenizer = tokenizer
        self._options = options
        self._request = request
        self._index = index
        self._echo = echo
        self._text = tokenizer.stream(skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStrings(options.stop_strings, include=options.include_stop) if options.stop_strings else None
        self._n_tokens = 0
        self._n_chars = 0 if echo is None else len(echo)  # of the choice's text, held-back text included
        self._limit = options.max_tokens  # 0: nothing of what is generated counts

    def opening(self) -> Delta | None:
        """The echoed prompt, unless its log-probabilities come first."""
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
        """New tokens. None: nothing to show yet (text held back, or beyond a stop)."""
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

    def end(self, event: Ended) -> Delta:
        """What was held back, and how it ended."""
        text = ""
        if self.stopped_at is None and self._limit != 0:
            text = self._show(self._text.finish())
            if self._stops is not None and self.stopped_at is None:
                text += self._stops.finish()
        return Delta(index=self._index, text=text, ending=self.ending(event))

    def ending(self, event: Ended) -> Ending:
        """How it ended, clipped to a stop string."""
        finished, timings = event.finished, event.timings
        n = finished.n_tokens if self.stopped_at is None else min(self.stopped_at, finished.n_tokens)
        detail = finished.detail
        if finished.reason == "timeout":
            detail = detail or f"The request's timeout of {self._options.timeout_s:g} s passed."
        stopped = self.stopped_at is not None or finished.reason == "stop"
        tpot = None
        if timings.first_token is not None and timings.last_token is not None and finished.n_tokens > 1:
            # Tokens may come in a burst where this process had to wait; the engine's clock begins anew on a restart.
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
            return ""  # the sequence ends here; a stop token's text is not part of the answer
        text = self._text.add(token)
        self._n_chars += len(text)
        return self._show(text)

    def _show(self, text: str) -> str:
        """What of new text can be shown now; before `min_tokens` nothing can stop the sequence."""
        if self._stops is None or self._n_tokens <= self._options.min_tokens:
            return text
        shown = self._stops.add(text, self._n_tokens)
        if self._stops.matched is not None:
            self.stopped_at = self._stops.matched.n_tokens
        return shown

    def _scored(self, token: int, logprobs: TokenLogprobs | None, offset: int) -> Scored:
        if logprobs is None:
            return Scored(self._piece(token, 0.0), None, (), offset)
        top = tuple(self._piece(other, logprob) for other, logprob in logprobs.top)
        return Scored(self._piece(token, logprobs.logprob), logprobs.logprob, top, offset)

    def _piece(self, token: int, logprob: float) -> Piece:
        return Piece(self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob)
