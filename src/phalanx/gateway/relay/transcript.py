"""The tokens that the client of one stream has, from its replicas' records (`http/stream_records.py`), by which another
replica can continue it.
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
    """Token ids, in 4 bytes each.

    Raises:
        MalformedAnswer: a number is out of range.
    """
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise MalformedAnswer("a record has numbers that are not token ids") from error


class _Kept(Struct):
    """One choice so far."""

    tokens: array[int] = field(default_factory=_no_tokens)
    logprobs: list[TokenLogprobs] = []
    echoed: bool = False
    ended: ChoiceEnded | None = None


class Transcript:
    """See the module's docstring.

    Args:
        max_items: limit for choices, tokens and log-probabilities. Beyond it the tokens are dropped, and the stream
            cannot move. A prompt that does not fit too is dropped.
    """

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._choices: dict[int, _Kept] = {}
        self._prompt = _no_tokens()  # of `start`, which then has none
        self.start: Start | None = None
        """From the latest record with one; its prompt is kept in 4 bytes a token."""
        self._size = 0
        self.n_tokens = 0
        """Of the answer in all records, the dropped ones too."""

    @property
    def is_kept(self) -> bool:
        """Whether another replica can continue the stream."""
        return self.start is not None and self._size <= self._max_items

    @property
    def determinism_key(self) -> str:
        """The `determinism_key` of the server that began the answer; empty before it has begun."""
        return self.start.determinism_key if self.start is not None else ""

    def note(self, record: StreamRecord) -> None:
        """Take in a record. Changes nothing if it raises.

        Raises:
            MalformedAnswer: it contradicts earlier records.
        """
        if self._size > self._max_items:
            self.n_tokens += sum(len(choice.tokens) for choice in record.choices)
            return
        start = record.start or self.start
        if start is None:
            raise MalformedAnswer("its first record has no start")
        prompt = _ids(start.prompt)
        new = {choice.index: self._tokens(choice) for choice in record.choices}
        if len(new) < len(record.choices):
            raise MalformedAnswer("a record has a choice twice")
        if record.start is not None:
            self.start, self._prompt = replace(start, prompt=[]), prompt
        self.n_tokens += sum(map(len, new.values()))
        for choice in record.choices:
            self._add(choice, new[choice.index])
        if self._size + len(self._prompt) > self._max_items:
            self._prompt = _no_tokens()  # the stream can still continue, though inexactly
        if self._size > self._max_items:
            self._choices.clear()

    def resume(self, *, next_number: int, timeout_s: float, moves: int) -> Resume:
        """The `Resume` for the next replica, with these fields; `is_kept` must hold."""
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
        """A choice's tokens in a record.

        Raises:
            MalformedAnswer: the choice cannot have any.
        """
        kept = self._choices.get(choice.index)
        if choice.index < 0 or (kept is not None and kept.ended is not None):
            raise MalformedAnswer(f"a record continues choice {choice.index}, which has ended or cannot exist")
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
