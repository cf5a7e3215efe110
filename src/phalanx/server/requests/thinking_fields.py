"""Converts a request's fields on thinking, in the forms of several APIs, into variables of the chat template.

`thinking` is Anthropic's, DeepSeek's and GLM's, `reasoning` OpenRouter's and OpenAI's, `enable_thinking` and
`thinking_budget` Qwen's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.server.fields.openai_bodies import ReasoningOptions, ThinkingOptions
from phalanx.server.fields.refusals import count, invalid

ENABLED, EFFORT, BUDGET = "enable_thinking", "reasoning_effort", "thinking_budget"
TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
"""`thinking.type` -> whether the model thinks; None: the template's default."""


def thinking_variables(
    *,
    effort: str | None = None,
    thinking: ThinkingOptions | None = None,
    reasoning: ReasoningOptions | None = None,
    enabled: bool | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """The template's variables. Clients send several forms at once, which must not contradict each other.

    Args:
        effort, enabled, budget: the fields `reasoning_effort`, `enable_thinking` and `thinking_budget`.

    Raises:
        InvalidRequest: names the field.
    """
    found: dict[str, tuple[str, Any]] = {}
    for field, variable, value in _given(effort, thinking, reasoning, enabled, budget):
        if value is None:
            continue
        other, first = found.setdefault(variable, (field, value))
        if first != value:
            raise invalid(field, f"{other} and {field} contradict each other; send one of them.")
    return {variable: value for variable, (_, value) in found.items()}


def _given(
    effort: str | None,
    thinking: ThinkingOptions | None,
    reasoning: ReasoningOptions | None,
    enabled: bool | None,
    budget: int | None,
) -> Iterator[tuple[str, str, Any]]:
    """(field, variable, value)"""
    yield from _effort("reasoning_effort", effort)
    yield ENABLED, ENABLED, enabled
    yield BUDGET, BUDGET, count(BUDGET, budget, least=1)
    if thinking is not None:
        if thinking.type not in TYPES:
            known = ", ".join(TYPES)
            raise invalid("thinking.type", f"thinking.type is {thinking.type[:40]!r}; it must be one of {known}.")
        yield "thinking.type", ENABLED, TYPES[thinking.type]
        yield "thinking.budget_tokens", BUDGET, count("thinking.budget_tokens", thinking.budget_tokens, least=1)
    if reasoning is not None:
        yield from _effort("reasoning.effort", reasoning.effort)
        yield "reasoning.enabled", ENABLED, reasoning.enabled
        yield "reasoning.max_tokens", BUDGET, count("reasoning.max_tokens", reasoning.max_tokens, least=1)


def _effort(field: str, effort: str | None) -> Iterator[tuple[str, str, Any]]:
    yield field, EFFORT, effort
    yield field, ENABLED, False if effort == "none" else None
