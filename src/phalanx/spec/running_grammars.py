"""The grammars of running sequences, on the leader: masks of the tokens that may follow, and drafts that they cut or
force (design: Constrained decoding).

A matcher is a function of a grammar and the output so far, so it survives whatever moves or recomputes a row. Matchers
are made on a thread, since compiling takes up to a second; a sequence gets no row before (`held`). llguidance reports
errors as a state, which every mask looks at: such a row ends, and no other does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from phalanx.errors import GrammarRefused, PhalanxError
from phalanx.model.sampling.metadata import SamplingMetadata
from phalanx.spec.drafters import BUCKETS, CERTAIN, Draft
from phalanx.text.grammar import COMPILE_STACK, GrammarCompiler, reason
from phalanx.types import FinishReason, SequenceRequest

T = TypeVar("T")

FREE = 16
"""Tokens without a forced one among them, after which a row's next forward is dispatched ahead again: inside a string,
say. A forward that is dispatched ahead has no drafts, and a forced draft saves a whole one for each of its tokens."""

NOTHING_LEFT = "The grammar allows no token that the model's vocabulary and the request's sampling parameters leave."

Masks = Mapping[int, npt.NDArray[np.uint32]]
"""Sequence number -> [k + 1, words]: the tokens allowed after its last known one and after each of k drafts. Token t is
bit t % 32 of word t // 32."""


@dataclass(slots=True)
class _Row:
    """A sequence's grammar. The matcher is used by the leader's thread once it is there."""

    making: Future[LLMatcher]
    matcher: LLMatcher | None = None
    forced: bool = False  # the grammar allows one token only for the next place
    free: int = 0  # committed tokens since that was so


class Grammars:
    """Matchers by sequence number. All methods are for the leader's thread.

    Args:
        load: makes the compiler, with the model's tokenizer; called once, by `prepare` or for the first grammar.
        on_made: called by another thread when `take_made` has something to take.
    """

    def __init__(self, load: Callable[[], GrammarCompiler], on_made: Callable[[], None]) -> None:
        self._load = load
        self._on_made = on_made
        self._compiler: GrammarCompiler | None = None
        self._rows: dict[int, _Row] = {}
        self._held: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._executor: LLExecutor | None = None

    # -- the life of a matcher -------------------------------------------------------------------------------------

    @property
    def held(self) -> Collection[int]:
        """Sequences whose matchers are being made."""
        return self._held

    def prepare(self) -> None:
        """Begin to load the compiler, for which the first grammar would wait. Returns at once.

        An error is not lost: the first grammar meets it again.
        """
        self._submit(lambda: self._loaded().prepare())

    def begin(self, number: int, request: SequenceRequest) -> None:
        """Start to make the matcher of a new sequence, if it has a grammar."""
        if not request.grammar:
            return
        making = self._submit(lambda: self._make(request.grammar, request.committed))
        self._rows[number] = _Row(making)
        self._held.add(number)
        making.add_done_callback(lambda _: self._on_made())

    def take_made(self) -> dict[int, str]:
        """Release the sequences whose matchers were made. Returns those that have none, with the reasons."""
        failed: dict[int, str] = {}
        for number in [number for number in self._held if self._rows[number].making.done()]:
            self._held.remove(number)
            row = self._rows[number]
            try:
                row.matcher = row.making.result()
            except PhalanxError as error:
                failed[number] = str(error)
                del self._rows[number]
        return failed

    def keep(self, alive: Collection[int]) -> None:
        """Forget all other sequences. A matcher that is not begun is not made."""
        for number in [number for number in self._rows if number not in alive]:
            self._held.discard(number)  # before `cancel`, which calls `on_made`
            self._rows.pop(number).making.cancel()

    def advance(self, number: int, tokens: Seq[int]) -> None:
        """These tokens of a sequence were committed."""
        if (row := self._rows.get(number)) is not None and row.matcher is not None:
            row.matcher.consume_tokens(list(tokens))
            row.free = 0 if row.forced else row.free + len(tokens)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        before = threading.stack_size(COMPILE_STACK)  # of the thread, which the first call starts
        try:
            return self._thread.submit(work)
        finally:
            threading.stack_size(before)

    def _loaded(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler

    def _make(self, grammar: str, committed: Seq[int]) -> LLMatcher:
        matcher = self._loaded().matcher(grammar)
        if committed and not matcher.consume_tokens(list(committed)):
            raise GrammarRefused(f"The grammar does not allow the tokens so far: {reason(matcher)}")
        return matcher

    # -- masks -----------------------------------------------------------------------------------------------------

    def constrains(self, numbers: Collection[int]) -> bool:
        """Whether any of these sequences has a grammar."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(numbers)

    def masks(self, drafts: Mapping[int, Seq[int]]) -> Masks:
        """The tokens that grammars allow at each position. A mask behind an end of sequence, or behind a draft that the
        grammar forbids, means nothing; a row whose matcher failed may have no token at all.

        Args:
            drafts: sequence number -> the drafts that are verified, k >= 0 of them.
        """
        places: dict[int, slice] = {}
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        copies: dict[int, LLMatcher] = {}
        end = 0
        for number, tokens in drafts.items():
            if (matcher := self._matcher(number)) is None:
                continue
            # On a copy, which takes 3 us: llguidance cannot take back a token that a grammar names by its id.
            if tokens:
                copies[number] = matcher.deep_copy()
                drafted.append((copies[number], end, list(tokens)))
            else:
                plain.append((matcher, end))
            places[number] = slice(end, end := end + len(tokens) + 1)
        if not places:
            return {}
        assert self._compiler is not None
        words = np.full((end, self._compiler.mask_words), -1, dtype=np.int32)
        self._fill(plain, drafted, words)
        for number, copy in copies.items():
            if copy.is_error():
                self._rows[number].matcher = copy
        allowed = words.view(np.uint32)
        self._compiler.clear_placeholder(allowed)
        masks = {number: allowed[place] for number, place in places.items()}
        for number, mask in masks.items():
            if self._error(number):
                mask[:] = 0
            self._rows[number].forced = np.bitwise_count(mask[0]).sum() == 1
        return masks

    def _fill(
        self,
        plain: list[tuple[LLMatcher, int]],
        drafted: list[tuple[LLMatcher, int, list[int]]],
        words: npt.NDArray[np.int32],
    ) -> None:
        """Compute masks without the interpreter's lock, rows in parallel."""
        if self._executor is None:
            self._executor = LLExecutor()
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, words)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, words)

    def ending(self, number: int) -> tuple[FinishReason, str]:
        """How a sequence ends that has no token left, and why."""
        if error := self._error(number):
            return "length", f"The grammar cannot go on: {error}"
        matcher = self._matcher(number)
        if matcher is not None and matcher.is_accepting():
            return "stop", ""  # it matches, and the vocabulary has no token that ends it
        return "length", NOTHING_LEFT

    def _matcher(self, number: int) -> LLMatcher | None:
        row = self._rows.get(number)
        return None if row is None else row.matcher

    def _error(self, number: int) -> str:
        matcher = self._matcher(number)
        return reason(matcher) if matcher is not None and matcher.is_error() else ""

    # -- drafts ----------------------------------------------------------------------------------------------------

    def may_run_ahead(self, number: int) -> bool:
        """Whether forced drafts are so rare now that the row's next forward may be dispatched without any."""
        return (row := self._rows.get(number)) is None or (row.free >= FREE and not row.forced)

    def forces(self, numbers: Collection[int]) -> bool:
        """Whether any of these sequences has only one way to go on."""
        rows = [row.matcher for number, row in self._rows.items() if number in numbers and row.matcher is not None]
        return any(matcher.compute_ff_tokens() for matcher in rows)

    def constrain(self, drafts: Mapping[int, Draft], room: Mapping[int, int], *, force: bool) -> dict[int, Draft]:
        """Drafts up to the first token that a grammar forbids, and those that it forces.

        Args:
            drafts: sequence number -> a drafter's draft, for any of the sequences in `room`.
            room: sequence number -> how many drafts are of use to it.
            force: whether to draft what a grammar forces; else drafts are cut only.
        """
        found = dict(drafts)
        for number in self._rows.keys() & room.keys():
            if (row := self._rows[number]).matcher is None:
                continue
            draft = self._constrained(row, found.pop(number, None), min(room[number], BUCKETS) if force else 0)
            if draft is not None:
                found[number] = draft
        return found

    def _constrained(self, row: _Row, draft: Draft | None, most: int) -> Draft | None:
        matcher = row.matcher
        assert matcher is not None
        forced = matcher.compute_ff_tokens()[:most] if most > 0 else []
        buckets: Seq[int] = [CERTAIN] * len(forced)
        tokens = forced
        if draft is not None and draft.tokens[: len(forced)] == forced:
            tokens, buckets = draft.tokens, [*buckets, *draft.buckets[len(forced) :]]
        allowed = matcher.validate_tokens(tokens) if tokens else 0
        return Draft(tokens[:allowed], buckets[:allowed]) if allowed > 0 else None


def constrain_sampling(positions: Seq[SamplingMetadata], masks: npt.NDArray[np.uint32]) -> None:
    """Give the places of one sequence their masks. The ban of stop ids yields where nothing else is allowed.

    Args:
        positions: [k + 1]; changed.
        masks: [k + 1, words].
    """
    for position, mask in zip(positions, masks, strict=True):
        position.allowed = mask
        if position.banned and not _without(mask, position.banned).any():
            position.banned = frozenset()


def _without(mask: npt.NDArray[np.uint32], tokens: Collection[int]) -> npt.NDArray[np.uint32]:
    """A copy of a mask that does not allow these tokens."""
    left = mask.copy()
    for token in tokens:
        if token // 32 < len(left):
            left[token // 32] &= ~np.uint32(1 << token % 32)
    return left
