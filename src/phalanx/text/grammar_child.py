"""The program of the process that tries grammars: reads jobs from stdin, a line of JSON each, and answers.

Sets the limits of a job before it reads the rest of it. `grammar_process.py` starts it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from phalanx.errors import GrammarRefused
from phalanx.text.grammar import LIMITS, try_first_masks
from phalanx.text.grammar import reason as reason_of
from phalanx.text.grammar_process import GrammarJob, GrammarReply, LimitedJob
from phalanx.text.library_errors import library_errors
from phalanx.text.limited_process import answer_jobs, limit_job
from phalanx.text.schema_places import place_of

REASON_CHARS = 600  # of a refusal: llguidance quotes its input
EOS = "<phalanx end of sequence>"
TOKEN_ID = re.compile(r"<\[\d+\]>")
MARK = "<phalanx mark>"
"""Stands for every token that a grammar names by its id in the model's vocabulary."""
MARK_ID = 257  # behind the bytes and EOS


class _Bytes:
    """The 256 bytes as tokens, and the special tokens."""

    bos_token_id = None

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in (EOS, MARK, *special)]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=2)
def _tokenizer(special: tuple[str, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(special)))


def _refused(grammar: str, special: tuple[str, ...]) -> str:
    """Why a grammar cannot be used; empty if it can."""
    known = TOKEN_ID.sub(f"<[{MARK_ID}]>", grammar)  # any token does here
    matcher = LLMatcher(_tokenizer(special), known, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        try_first_masks(matcher)  # with bytes a grammar forces more than with tokens: these may join a brace to more
    return reason_of(matcher)[:REASON_CHARS]


def _refused_schema(schema: dict[str, Any], special: tuple[str, ...]) -> str:
    return _refused(msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode(), special)


def _lark(gbnf: str) -> GrammarReply:
    try:
        with library_errors(GrammarRefused):
            return GrammarReply(lark=gbnf_to_lark(gbnf))
    except (GrammarRefused, GbnfToLarkError) as error:
        return GrammarReply(refused=str(error)[:REASON_CHARS])
    except (IndexError, RecursionError):  # in the translator: an escape at the end; many parentheses
        return GrammarReply(refused="it is cut short, or nested too deeply")


def _answer(line: bytes) -> bytes:
    """A `GrammarReply` as JSON."""
    limited = msgspec.json.decode(line, type=LimitedJob)
    limit_job(limited.limits.seconds, limited.limits.memory)
    started = time.process_time()
    job = msgspec.json.decode(limited.job, type=GrammarJob)
    special = tuple(job.special)

    def refused_part(part: dict[str, Any]) -> str:
        """As `_refused_schema`, while a quarter of the time is left: a part may take as long as the whole."""
        in_time = time.process_time() - started < limited.limits.seconds / 4
        return _refused_schema(part, special) if in_time else ""

    if job.gbnf:
        answer = _lark(job.gbnf)
    elif job.schema is None:
        answer = GrammarReply(refused=_refused(job.grammar, special))
    elif reason := _refused_schema(job.schema, special):
        place = place_of(job.schema, reason, refused_part)
        answer = GrammarReply(refused=reason, place=".".join(place))
    else:
        answer = GrammarReply()
    return msgspec.json.encode(answer)


if __name__ == "__main__":
    answer_jobs(_answer)
