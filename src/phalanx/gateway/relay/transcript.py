"""What the client of one stream has, in tokens, as the records of its replicas have told (`http/stream_records.py`).

With it another replica continues the stream.
"""

from __future__ import annotations

from array import array

from msgspec import Struct, field
from msgspec.structs import replace

from phalanx.errors import MalformedAnswer
from phalanx.http.stream_records import ChoiceEnded, RecordedChoice, Resume, Start, StreamRecord
from phalanx.types import TokenLogprobs


def _no_tokens() -> array[int]:
    return array("I")  # 4 bytes each: a list of large numbers has 36


def _ids(tokens: list[int]) -> array[int]:
    """Token ids, small.

    Raises:
        MalformedAnswer: they cannot be a token's.
    """
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise MalformedAnswer("a record has numbers that are no token's") from error


class _Kept(Struct):
    """One choice so far."""

    tokens: array[int] = field(default_factory=_no_tokens)
    logprobs: list[TokenLogprobs] = []
    echoed: bool = False
    ended: ChoiceEnded | None = None


class Transcript:
    """See the module's docstring.

    Args:
        most: tokens and log-probabilities of all choices, and choices; a stream with more is kept no longer, so that it
            cannot go on elsewhere. A prompt that has no room beside them is not kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._choices: dict[int, _Kept] = {}
        self._prompt = _no_tokens()  # of `start`, which then has none
        self.start: Start | None = None
        """What the first record said, or the last one that said it again; without the prompt."""
        self._size = 0
        self.n_tokens = 0
        """Of the answer, as all records count them, also of what is kept no longer."""

    @property
    def is_kept(self) -> bool:
        """Whether another replica can continue the stream."""
        return self.start is not None and self._size <= self._most

    @property
    def determinism_key(self) -> str:
        """The `determinism_key` of the server that began the answer; empty before it has begun."""
        return self.start.determinism_key if self.start is not None else ""

    def note(self, record: StreamRecord) -> None:
        """Take in what a record says; all of it or, where it raises, nothing.

        Raises:
            MalformedAnswer: it contradicts those before.
        """
        if self._size > self._most:
            self.n_tokens += sum(len(choice.tokens) for choice in record.choices)
            return
        start = record.start or self.start
        if start is None:
            raise MalformedAnswer("its first record does not say how the answer begins")
        prompt = _ids(start.prompt)
        news = {choice.index: self._tokens(choice) for choice in record.choices}
        if len(news) < len(record.choices):
            raise MalformedAnswer("a record has a choice twice")
        if record.start is not None:
            self.start, self._prompt = replace(start, prompt=[]), prompt
        self.n_tokens += sum(map(len, news.values()))
        for choice in record.choices:
            self._add(choice, news[choice.index])
        if self._size + len(self._prompt) > self._most:
            self._prompt = _no_tokens()  # the stream can go on all the same, if not exactly
        if self._size > self._most:
            self._choices.clear()

    def resume(self, *, next_number: int, timeout_s: float, moves: int) -> Resume:
        """What the next replica gets; `is_kept` must hold. The arguments are those of `Resume`."""
        assert self.start is not None and self.is_kept
        choices = [
            RecordedChoice(
                index=index, tokens=kept.tokens.tolist(), logprobs=kept.logprobs, echoed=kept.echoed, ended=kept.ended
            )
            for index, kept in sorted(self._choices.items())
        ]
        start = replace(self.start, prompt=self._prompt.tolist())
        return Resume(start=start, choices=choices, next_number=next_number, timeout_s=timeout_s, moves=moves)

    def _tokens(self, choice: RecordedChoice) -> array[int]:
        """The tokens that a record has of a choice.

        Raises:
            MalformedAnswer: there can be none.
        """
        kept = self._choices.get(choice.index)
        if choice.index < 0 or (kept is not None and kept.ended is not None):
            raise MalformedAnswer(f"a record goes on with choice {choice.index}, which is over or none")
        return _ids(choice.tokens)

    def _add(self, choice: RecordedChoice, tokens: array[int]) -> None:
        kept = self._choices.get(choice.index)
        if kept is None:
            kept = self._choices[choice.index] = _Kept()
            self._size += 1
        kept.tokens += tokens
        self._size += len(tokens) + sum(1 + len(scored.top) for scored in choice.logprobs)
        kept.logprobs += choice.logprobs
        kept.echoed = kept.echoed or choice.echoed
        kept.ended = choice.ended
