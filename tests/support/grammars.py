"""Grammars to try on tiny random models, and what mlx-lm answers under them, one token at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

if mx.default_device() == mx.Device(mx.cpu):
    mx.disable_compile()  # as the engine does


def json_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


PERSON = closed(
    name={"enum": ["alice", "bob"]},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    married={"type": "boolean"},
    tags={"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
)
ORDER = closed(id={"type": "string", "pattern": "^[a-f0-9]{4}$"}, lines={"const": 3})
NESTED = closed(order=ORDER, paid={"const": True})
GRAMMARS = {
    "person": json_schema(PERSON),
    "nested": json_schema(NESTED),
    "any object": json_schema({"type": "object"}),
    "regex": LLMatcher.grammar_from_regex("[a-f]{5,30}(xy)+z"),
    "choice": LLMatcher.grammar_from_lark('start: "positive" | "negative" | "neutral, as far as can be told"'),
    "text": LLMatcher.grammar_from_regex("(.|\\n){0,30}"),
    "lists": LLMatcher.grammar_from_lark('start: "[" item ("," item){1,4} "]"\nitem: /[a-c]{1,3}/ | start'),
}


def reference(model: Any, path: Path, prompt: Sequence[int], grammar: str, n: int, eos: int) -> list[int]:
    """Greedy tokens of an mlx-lm model without a cache; a matcher of its own reads all tokens before each step."""
    tokenizer = LLTokenizer(str(path / "tokenizer.json"), eos_token=eos)
    tokens: list[int] = []
    while len(tokens) < n and eos not in tokens:
        logits = np.array(model(mx.array([[*prompt, *tokens]]))[0, -1].astype(mx.float32))
        if grammar:
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            assert matcher.consume_tokens(tokens), matcher.get_error()
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            logits = np.where(bits[: len(logits)], logits, -np.inf)
        tokens.append(int(np.argmax(logits)))
    return tokens
