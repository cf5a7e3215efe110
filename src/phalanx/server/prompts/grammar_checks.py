"""Compiles the grammars of requests' answers on threads beside the event loop, before the engine gets the requests.

A grammar is tried with limited time and memory, and then compiled for the model's tokenizer, so that the engine gets
none that fails. Results are cached by content. An API key's grammars are compiled one after the other, so that many
slow ones delay other keys by one of them at most. `structured.py` parses the fields.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from phalanx.errors import GrammarRefused, InvalidRequest
from phalanx.server.fields.refusals import show_place
from phalanx.server.requests.parsed import AnswerGrammar
from phalanx.text.grammar import COMPILE_STACK, GrammarCompiler
from phalanx.text.grammar_process import TOO_COMPLEX, GrammarTrial
from phalanx.text.tokenizer import Tokenizer

THREADS = 2  # so that a key's grammar does not wait for one of another key
KEPT = 64  # results; a grammar has 128 KiB at most

Key = tuple[str, bool, str]
"""Of a result: the place of the answer's grammar in the request, whether it is GBNF, the whole output's grammar."""
WrapGrammar = Callable[[Mapping[str, Any]], str]
"""The grammar of an answer -> the grammar of the model's whole output, serialised."""


def answer_alone(grammar: Mapping[str, Any]) -> str:
    """The serialised grammar of an output that is the answer alone."""
    return msgspec.json.encode({"grammars": [grammar]}).decode()


class GrammarChecks:
    """The grammars of one server. Used on its event loop.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, trial: GrammarTrial | None = None) -> None:
        special = [tokenizer.token_bytes(id).decode(errors="replace") for id in sorted(tokenizer.special_ids)]
        self._trial = trial or GrammarTrial(special)
        self._compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids) if tokenizer.eos_ids else None
        self._threads = _threads_with_deep_stacks()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by owner
        self._kept: OrderedDict[Key, str | InvalidRequest] = OrderedDict()  # latest used last

    def prepare(self) -> None:
        """Start the process and read the vocabulary that the first grammar needs. Returns at once.

        The first grammar reports errors of this.
        """
        if self._compiler is not None:
            self._threads.submit(self._trial.start)
            self._threads.submit(self._compiler.prepare)

    async def output_grammar(self, answer: AnswerGrammar | None, owner: str, wrap: WrapGrammar = answer_alone) -> str:
        """The grammar of a model's whole output, which the engine can compile; empty if the output may be any text.

        Args:
            owner: of the request's API key.
            wrap: adds the model's output before its answer.

        Raises:
            InvalidRequest: it cannot be compiled; names field, place and reason.
        """
        if answer is None:
            return ""
        key = (answer.place, answer.is_gbnf, wrap(answer.grammar))
        if key not in self._kept:
            turn = self._turns.setdefault(owner, asyncio.Lock())
            await turn.acquire()
            if key in self._kept:  # another request had the same
                turn.release()
            else:
                work = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, answer, wrap)
                work.add_done_callback(partial(self._on_compiled, key, turn))
                await asyncio.shield(work)
        found = self._kept[key]
        self._kept.move_to_end(key)
        if isinstance(found, str):
            return found
        raise InvalidRequest(found.message, param=found.param)

    def _on_compiled(self, key: Key, turn: asyncio.Lock, work: asyncio.Future[str | InvalidRequest]) -> None:
        """Cache the result and end the key's turn, even if the client has left."""
        turn.release()
        if not work.cancelled() and work.exception() is None:
            self._kept[key] = work.result()
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """Cancel queued work and return at once; running work continues to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, answer: AnswerGrammar, wrap: WrapGrammar) -> str | InvalidRequest:
        """The serialised grammar, or why there is none."""
        if self._compiler is None:
            return _refusal(answer, "this model names no token that ends an answer")
        try:
            grammar = answer.grammar
            if answer.is_gbnf:
                grammar = {"lark_grammar": self._trial.lark(grammar["lark_grammar"])}
            if (schema := grammar.get("json_schema")) is not None:
                self._trial.check_schema(schema)
            text = wrap(grammar)
            self._trial.check(text)
            self._compiler.check(text)
        except GrammarRefused as error:
            return self._refused_part(answer, error) or _refusal(answer, error.message, error.param)
        return text

    def _refused_part(self, answer: AnswerGrammar, whole: GrammarRefused) -> InvalidRequest | None:
        """The refusal of the part that makes the whole refused, found in the time that the whole took."""
        if len(answer.parts) > 1 and whole.message.startswith(TOO_COMPLEX):
            return None
        for part in answer.parts:
            try:
                self._trial.check_schema(part.grammar["json_schema"])
            except GrammarRefused as error:
                return _refusal(part, error.message, error.param)
        return None


def _threads_with_deep_stacks() -> ThreadPoolExecutor:
    """Threads with larger stacks than the trial's, so that no grammar that passed the trial overflows them."""
    ready = threading.Barrier(THREADS + 1)
    before = threading.stack_size(COMPILE_STACK)
    try:
        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        for _ in range(THREADS):
            threads.submit(ready.wait)  # occupies its thread, so that the next one starts another
    finally:
        threading.stack_size(before)
    ready.wait()
    return threads


def _refusal(answer: AnswerGrammar, reason: str, place: str | None = None) -> InvalidRequest:
    where = show_place(f"{answer.place}.{place}" if place else answer.place)
    return InvalidRequest(f"{where} cannot be compiled: {reason.rstrip('.')}.", param=answer.param)
