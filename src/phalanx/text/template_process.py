"""Renders chat templates in a process of their own, with limited time, memory and output.

A template is a program from the model's repository: jinja2's sandbox keeps it from files, but not from looping, nor
from one operation that takes a minute or all memory (`10**10**8`, `'x'.center(10**10)`). No list of such operations is
complete, and none of them can be interrupted inside this process. `limited_process.py` limits a process,
`template_child.py` is its program. Imports neither tokenizers nor jinja2, since ranks import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.text.limited_process import LimitedProcesses, ProcessLimit

CHILD = "phalanx.text.template_child"


class RenderLimits(Struct, frozen=True):
    """Limits of one rendering. Bytes grow with those of the messages, so that no honest template reaches a limit."""

    seconds: float = 5.0
    """Of processor time. A long conversation with tools takes 0.01."""
    memory: int = 256 << 20
    memory_factor: int = 24
    """Bytes of memory per byte of template, messages and variables: objects in memory, and a few copies of texts."""
    output: int = 4 << 20
    output_factor: int = 8

    def memory_for(self, size: int) -> int:
        """Bytes of address space for a job of `size` bytes."""
        return self.memory + self.memory_factor * size

    def output_for(self, size: int) -> int:
        """Bytes of text for a job of `size` bytes."""
        return self.output + self.output_factor * size


class TemplateLimit(Exception):
    """A template exceeded one of the `RenderLimits`; says which."""


class TemplateRefused(ValueError):
    """A template failed on these messages; says why."""


class TemplateBroken(TemplateRefused):
    """A line of a template is not jinja, whatever the messages."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


class Limited(Struct, frozen=True):
    """The part of a job that is read before its limits hold."""

    limits: RenderLimits


class RenderJob(Limited, frozen=True):
    """The arguments of `chat_template.render`, and the limits."""

    template: str
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    now: datetime


class RenderReply(Struct, frozen=True, omit_defaults=True):
    """A rendered text, or why there is none."""

    text: str = ""
    refused: str | None = None
    broken_line: int | None = None
    limit: str | None = None


class TemplateRenderer:
    """Renders in one process per thread that renders at the time. Threads may call all methods concurrently."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._processes = LimitedProcesses(CHILD)

    def start(self) -> None:
        """Start a process ahead of its first use. Returns at once."""
        self._processes.start()

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Render a conversation as text, as `chat_template.render`.

        Raises:
            TemplateRefused: the template failed on these messages; or `TemplateBroken`, on any.
            TemplateLimit: the template took too much time or memory, or its text is too long.
        """
        job = msgspec.json.encode(
            RenderJob(
                self._limits,
                template,
                messages,
                add_generation_prompt,
                continue_final_message,
                dict(variables),
                datetime.now(),
            ),
            enc_hook=lambda value: f"<{type(value).__name__}>",
        )
        try:
            memory = self._limits.memory_for(len(job))
            answered = self._processes.ask(job, seconds=self._limits.seconds, memory=memory)
        except ProcessLimit as error:
            raise TemplateLimit(str(error)) from None
        answer = msgspec.json.decode(answered, type=RenderReply)
        if answer.limit is not None:
            raise TemplateLimit(answer.limit)
        if answer.refused is not None:
            line, why = answer.broken_line, answer.refused
            raise TemplateRefused(why) if line is None else TemplateBroken(why, line)
        return answer.text
