"""Grammars that answers must match, compiled by llguidance for a model's tokenizer (design: Constrained decoding).

A grammar is in llguidance's format: JSON text `{"grammars": [...]}`, of JSON schemas, regular expressions and Lark
grammars. A client's grammar is compiled in a limited process first: llguidance's own limits bound most of its cost, but
not all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from phalanx.errors import GrammarRefused
from phalanx.text.tokenizer import Tokenizer

COMPILE_STACK = 64 << 20
"""Bytes of stack of a thread that makes matchers. llguidance recurses along chains of references, and a grammar that
compiled once, on the usual 8 MB, must not overflow another stack."""
BEFORE = "\x02"
"""A character that tokenizers do not join with the text after it, nor separate from it by a space."""
MAX_COMPILED = 16  # compiled grammars that are kept, of up to 60 MB each

NOTHING_MATCHES = "NoExtensionBias"
"""llguidance's message if not even a first token is allowed."""

LIMITS = LLParserLimits(
    max_grammar_size=200_000,  # a schema of 5,000 optional properties has more
    max_lexer_states=50_000,  # 1 to 2 KB each, per row
    step_max_items=10_000,  # Earley items of a mask, 10 ms; an ambiguous grammar had 50,000 of 0.5 s, for each token
    verbose_errors=False,
)
"""Besides llguidance's own limits. Masks are computed between two steps, while the rows of all clients wait. Figures
are for a vocabulary of 150,000 tokens."""


class _TokenizerAdapter:
    """A tokenizer in the form that llguidance asks for. It tokenises bytes that grammars force in the middle of a text.

    Tokens that do not spell exactly these bytes would make llguidance allow a wrong token. Some tokenizers put a space
    before every text, and all read the name of a special token as that token.

    Args:
        eos_ids: at least one.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens  # by id; empty for an id without text, which no grammar allows
        self.special_token_ids = special  # a grammar allows them only where it names them
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self._before = self._encode(BEFORE)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("bytes")  # llguidance tries once, and passes texts from then on
        spelled = text.encode()
        if self._spell(ids := self._encode(text), spelled):
            return ids
        ids = self._encode(BEFORE + text)
        start = len(self._before)
        if ids[:start] == self._before and self._spell(ids[start:], spelled):
            return ids[start:]
        return self._longest_first(spelled)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _spell(self, ids: list[int], spelled: bytes) -> bool:
        """Whether these are the bytes of plain tokens."""
        return self._special.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == spelled

    def _longest_first(self, spelled: bytes) -> list[int]:
        """The longest token that fits, then the next one, up to a byte that begins no token."""
        ids: list[int] = []
        while spelled:
            sizes = range(min(len(spelled), self._longest), 0, -1)
            token = next((self._plain[part] for n in sizes if (part := spelled[:n]) in self._plain), None)
            if token is None:
                break
            ids.append(token)
            spelled = spelled[len(self.tokens[token]) :]
        return ids

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    @cached_property
    def _plain(self) -> dict[bytes, int]:
        return {spelled: token for token, spelled in enumerate(self.tokens) if token not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._plain))


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may call all methods concurrently.

    Args:
        tokenizer: of the model.
        eos_ids: ids that end an answer; all of them are allowed where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(token for token in eos_ids if 0 <= token < tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the latest used last

    def prepare(self) -> None:
        """Read the vocabulary, so that the first grammar need not: 0.5 s per 50,000 tokens. Blocks."""
        with self._lock:
            self._llguidance  # noqa: B018

    def check(self, grammar: str) -> None:
        """Compile a grammar and compute its first masks. Blocks; call it on a thread.

        Raises:
            GrammarRefused: it does not compile within `LIMITS`, or allows no first token; says why.
        """
        matcher = self.matcher(grammar)
        try_first_masks(matcher)
        if matcher.is_error():
            raise GrammarRefused(reason(matcher))

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh matcher of a grammar. Blocks, without the interpreter's lock.

        Raises:
            GrammarRefused: it does not compile within `LIMITS`; says why.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                compiled = LLMatcher(self._llguidance, grammar, log_level=0, limits=LIMITS)
                if compiled.is_error():
                    raise GrammarRefused(reason(compiled))
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    @property
    def mask_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self._llguidance.vocab_size // 32)

    def clear_placeholder(self, masks: npt.NDArray[np.uint32]) -> None:
        """Forbid, in masks [P, words], the stand-in for an end token if the tokenizer has none."""
        if not self._eos_ids:
            token = self._tokenizer.vocab_size
            masks[:, token // 32] &= ~np.uint32(1 << token % 32)

    @cached_property
    def _llguidance(self) -> LLTokenizer:
        tokenizer, eos_ids = self._tokenizer, self._eos_ids
        tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        special = sorted(token for token in tokenizer.special_ids if token < len(tokens))
        if not eos_ids:  # llguidance needs one
            eos_ids = [len(tokens)]
            tokens, special = [*tokens, b"<end>"], [*special, len(tokens)]
        adapter = TokenizerWrapper(_TokenizerAdapter(tokenizer, tokens, special, eos_ids))
        # In two calls, because each holds the interpreter's lock, for 0.1 s per 50,000 tokens; heartbeats wait for it.
        return LLTokenizer(adapter, eos_token=eos_ids, slices=[]).with_slices(LLTokenizer.general_slices())


def try_first_masks(matcher: LLMatcher) -> None:
    """Compute a matcher's first mask, and the one after the tokens that the grammar forces: some grammars are too large
    only there (many optional properties, after the brace). Changes the matcher."""
    matcher.compute_bitmask()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()


def reason(matcher: LLMatcher) -> str:
    """Why a matcher failed: llguidance's message, on one line."""
    error, _, _ = matcher.get_error().removesuffix("<non-verbose/>").partition("<backtrace>")
    message = " ".join(error.split())
    return "no text matches it" if message == NOTHING_MATCHES else message
