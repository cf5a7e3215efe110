"""Builds a grammar in llguidance's dialect of Lark, rule by rule."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.server.fields.json_schemas import bounded

STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON with at most one space between tokens: a small model that may write more white space may never stop."""


class GrammarUnsupported(ValueError):
    """A tool's schema cannot be written in the model's format of calls. The message names the tool and the reason."""


class Lark:
    """Rules and terminals with names of their own. Texts that are tokens of the vocabulary are written as tokens."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        self.tokens = added_tokens
        self._split = re.compile("|".join(re.escape(token) for token in sorted(added_tokens, key=len, reverse=True)))
        self._lines: list[str] = []

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        parts = []
        at = 0
        for token in self._split.finditer(text) if self.tokens else ():
            if token.start() > at:
                parts.append(json.dumps(text[at : token.start()]))
            parts.append(f"<[{self.tokens[token.group()]}]>")
            at = token.end()
        if text[at:]:
            parts.append(json.dumps(text[at:]))
        return " ".join(parts)

    def begins_with_token(self, text: str) -> bool:
        """Whether a text begins with a token of the vocabulary."""
        return bool(self.tokens) and self._split.match(text) is not None

    def rule(self, expression: str) -> str:
        """The name of a rule."""
        return self._define("r", expression)

    def terminal(self, expression: str) -> str:
        """The name of a terminal: a regular expression, with `&`, `|` and `~` between expressions."""
        return self._define("T", expression)

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression for JSON that follows the schema, as answers in JSON do (see `bounded`)."""
        return self.rule("%json " + json.dumps({**bounded(dict(schema)), "x-guidance": STYLE}))

    def grammar(self, start: str) -> dict[str, Any]:
        """The whole, as an entry of llguidance's list of grammars."""
        return {"lark_grammar": "\n".join([f"start: {start}", *self._lines])}

    def _define(self, kind: str, expression: str) -> str:
        name = f"{kind}{len(self._lines)}" if kind == "r" else f"{kind}_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name


def schemas_in(grammar: str) -> Iterator[dict[str, Any]]:
    """The JSON schemas that stand in a Lark grammar, as `Lark.json` writes them."""
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON, which the compiler reports
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]


def pattern(expression: str) -> str:
    """A regular expression between slashes, as Lark has it."""

    def escaped(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])

    return "/" + re.sub(r"\\.|/|\n", escaped, expression, flags=re.DOTALL) + "/"


def literal(text: str) -> str:
    """A regular expression for exactly this text, without slashes. (`re.escape` escapes too much for llguidance.)"""
    return "".join(map(_literal, text))


def _literal(char: str) -> str:
    if char < " ":
        return f"\\x{{{ord(char):x}}}"
    return "\\" + char if char in r"\.+*?()|[]{}^$#&-~/" else char
