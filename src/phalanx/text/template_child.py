"""The program of the process that renders chat templates: reads jobs from stdin, a line of JSON each, and answers.

Sets the limits of a job before it reads the rest of it. `template_process.py` starts it.
"""

from __future__ import annotations

import msgspec
from jinja2 import TemplateSyntaxError

from phalanx.text.chat_template import FAILURES, render
from phalanx.text.limited_process import answer_jobs, limit_job
from phalanx.text.template_process import Limited, RenderJob, RenderReply

REASON_CHARS = 1000  # of a refusal: templates and their libraries quote whole texts


def _answer(line: bytes) -> bytes:
    """A `RenderReply` as JSON."""
    limits = msgspec.json.decode(line, type=Limited).limits
    memory, output = limits.memory_for(len(line)), limits.output_for(len(line))
    limit_job(limits.seconds, memory)
    try:
        text = _render(msgspec.json.decode(line, type=RenderJob))
        if len(text) > output:
            return msgspec.json.encode(RenderReply(limit=f"its text has {len(text)} characters, more than {output}"))
        return msgspec.json.encode(RenderReply(text=text))
    except FAILURES as error:
        reason = "something is nested too deeply" if isinstance(error, RecursionError) else str(error)
        reason = reason[:REASON_CHARS].encode(errors="backslashreplace").decode()
        line_number = error.lineno if isinstance(error, TemplateSyntaxError) else None
        return msgspec.json.encode(RenderReply(refused=reason or type(error).__name__, broken_line=line_number))


def _render(job: RenderJob) -> str:
    return render(
        job.template,
        job.messages,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        variables=job.variables,
        now=job.now,
    )


if __name__ == "__main__":
    answer_jobs(_answer)
