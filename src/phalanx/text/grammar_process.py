"""Tries grammars of clients in a process of their own, with limited time and memory.

llguidance bounds most of a grammar's cost, but not all: an integer that is a multiple of 10,000,019, or thirty patterns
that must hold together, take minutes, and nothing inside this process can end them. So a grammar is first compiled in
another process, with the 256 bytes as vocabulary; if it passes, it is compiled for the model's own tokenizer.
`grammar_child.py` is the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.errors import GrammarRefused
from phalanx.text.limited_process import LimitedProcesses, ProcessLimit

CHILD = "phalanx.text.grammar_child"
SECONDS = 0.5  # of processor time; schemas of real APIs take 0.001
MEMORY = 1 << 30  # bytes
TOO_COMPLEX = "it is too complex"


class GrammarLimits(Struct, frozen=True):
    """Limits of one job: seconds of processor time, and bytes."""

    seconds: float = SECONDS
    memory: int = MEMORY


class GrammarJob(Struct, frozen=True):
    """One of: a grammar to try, a JSON schema to try, a GBNF grammar to translate."""

    special: Sequence[str]  # texts of the model's special tokens, which grammars may name
    grammar: str = ""
    schema: dict[str, Any] | None = None
    gbnf: str = ""


class LimitedJob(Struct, frozen=True):
    """A job and its limits, which hold before the job is read."""

    limits: GrammarLimits
    job: msgspec.Raw


class GrammarReply(Struct, frozen=True, omit_defaults=True):
    """Why and where a grammar is refused, empty if it is not; or a translated grammar."""

    refused: str = ""
    place: str = ""
    lark: str = ""


class GrammarTrial:
    """Tries grammars. Threads may call all methods concurrently; calls block.

    Args:
        special: texts of the model's special tokens.
    """

    def __init__(self, special: Sequence[str], limits: GrammarLimits | None = None) -> None:
        self._special = special
        self._limits = limits or GrammarLimits()
        self._processes = LimitedProcesses(CHILD)

    def start(self) -> None:
        """Start a process ahead of its first use. Returns at once."""
        self._processes.start()

    def check(self, grammar: str) -> None:
        """Compile a serialised grammar and compute its first masks.

        Raises:
            GrammarRefused: it cannot be compiled, allows no first token, or takes too much time or memory; says why.
        """
        self._ask(GrammarJob(self._special, grammar=grammar))

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        """As `check`, for a JSON schema. The error's `param` has the keys that lead to the refused part."""
        self._ask(GrammarJob(self._special, schema=dict(schema)))

    def lark(self, gbnf: str) -> str:
        """The Lark grammar of one in GBNF.

        Raises:
            GrammarRefused: it is not GBNF; says why.
        """
        return self._ask(GrammarJob(self._special, gbnf=gbnf)).lark

    def _ask(self, job: GrammarJob) -> GrammarReply:
        line = msgspec.json.encode(LimitedJob(self._limits, msgspec.Raw(msgspec.json.encode(job))))
        try:
            answered = self._processes.ask(line, seconds=self._limits.seconds, memory=self._limits.memory)
        except ProcessLimit as error:
            self._processes.start()  # in place of the one that ended
            raise GrammarRefused(f"{TOO_COMPLEX}: {error}") from None
        answer = msgspec.json.decode(answered, type=GrammarReply)
        if answer.refused:
            raise GrammarRefused(answer.refused, param=answer.place or None)
        return answer
