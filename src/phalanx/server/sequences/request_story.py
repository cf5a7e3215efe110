"""A request's life as JSON and in sentences: where its time went, and why its prompt was prefilled again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.server.sequences.request_log import ChoiceLife, RequestLife
from phalanx.types import Finished, SequenceProgress

Progress = Mapping[str, SequenceProgress]
"""Sequence id -> the engine's last figures, for sequences with a row."""


def life_json(life: RequestLife, progress: Progress, now: float, checks: int) -> dict[str, Any]:
    """The response of `GET /v1/requests/{id}`.

    Args:
        now: on the same clock as the life's times.
        checks: all-reduces per forward that are verified with a checksum; 0 on one rank, or without checksums.
    """
    first = life.choices[0]
    end = life.ended if life.ended is not None else now
    return {
        "id": life.id,
        "object": "request",
        "request_id": life.request_id,
        "endpoint": life.endpoint,
        "model": life.model,
        "created": life.created,
        "stream": life.stream,
        "state": state_of(life, progress),
        "error": life.error or None,
        "seconds": {"total": round(end - life.arrived, 3), **_seconds(life, first)},
        "prompt_tokens": first.prompt_tokens,
        "prefix": _prefix(life, first, progress),
        "choices": [_choice(choice, progress, checks) for choice in life.choices],
        "pauses": [
            {
                "after_seconds": round(pause.began - life.arrived, 3),
                "seconds": round((pause.ended if pause.ended is not None else end) - pause.began, 3),
                "reason": pause.reason,
            }
            for pause in life.pauses
        ],
        "moves": life.moves,
        "story": list(_story(life, progress, now, checks)),
    }


def row_json(life: RequestLife, progress: Progress, now: float) -> dict[str, Any]:
    """A request as one line of a table."""
    known = [_known(choice, progress) for choice in life.choices]
    n_tokens = sum(choice.output_tokens for choice in life.choices)
    end = life.ended if life.ended is not None else now
    row: dict[str, Any] = {
        "id": life.id,
        "number": life.number,
        "model": life.model,
        "endpoint": life.endpoint,
        "created": life.created,
        "state": state_of(life, progress),
        "prompt_tokens": sum(choice.prompt_tokens for choice in life.choices),
        "cached_tokens": sum(one.cached_tokens for one in known),
        "disk_tokens": sum(one.disk_tokens for one in known),
        "output_tokens": n_tokens,
        "drafted_tokens": sum(one.drafted_tokens for one in known),
        "accepted_tokens": sum(one.accepted_tokens for one in known),
        "moves": life.moves,
        "pauses": len(life.pauses),
        "seconds": round(end - life.arrived, 1 if life.ended is None else 2),
    }
    if (rate := sum(_rate(choice) for choice in life.choices)) > 0:
        row["tokens_per_second"] = round(rate, 1)
    if row["state"] == "prefill":
        rows = [progress[choice.id] for choice in life.choices if choice.id in progress]
        row["prefilled"] = round(sum(one.computed for one in rows) / max(1, sum(one.known for one in rows)), 2)
    return row


def state_of(life: RequestLife, progress: Progress) -> str:
    """The request's state or outcome."""
    if life.outcome:
        return life.outcome
    if life.is_paused:
        return "paused"
    states = {choice.state(progress.get(choice.id)) for choice in life.choices}
    return next(state for state in ("decode", "prefill", "queued", "finished") if state in states)


def _known(choice: ChoiceLife, progress: Progress) -> Finished | SequenceProgress:
    """Its cached, drafted and accepted tokens, and work; none where it has had no row."""
    return choice.finished or progress.get(choice.id) or SequenceProgress(id=choice.id, computed=0, known=0)


def _rate(choice: ChoiceLife) -> float:
    if choice.first_token is None or choice.last_token is None or choice.last_token <= choice.first_token:
        return 0.0
    return (choice.output_tokens - 1) / (choice.last_token - choice.first_token)


def _seconds(life: RequestLife, choice: ChoiceLife) -> dict[str, float]:
    found: dict[str, float] = {}
    if choice.first_token is not None:
        found["first_token"] = choice.first_token - life.arrived
    if choice.finished is not None:
        timing = choice.finished.timing
        found |= {"queue": timing.queue_s, "prefill": timing.prefill_s, "decode": timing.decode_s}
    return {name: round(value, 3) for name, value in found.items()}


def _prefix(life: RequestLife, choice: ChoiceLife, progress: Progress) -> dict[str, Any]:
    known = _known(choice, progress)
    work = known.work
    message = None
    if life.left_in is not None and life.left_in < len(life.roles):
        message = {"index": life.left_in, "role": life.roles[life.left_in]}
    return {
        "cached_tokens": known.cached_tokens,
        "disk_tokens": known.disk_tokens,
        "nearest_tokens": work.nearest_tokens,
        "left_at_token": work.left_at if work.nearest_tokens else None,
        "left_at_message": message,
    }


def _choice(choice: ChoiceLife, progress: Progress, checks: int) -> dict[str, Any]:
    known = _known(choice, progress)
    work = known.work
    return {
        "state": choice.state(progress.get(choice.id)),
        "finish_reason": choice.finished.reason if choice.finished is not None else None,
        "output_tokens": choice.output_tokens,
        "chunks": work.chunks,
        "steps": work.steps,
        "drafted_tokens": known.drafted_tokens,
        "accepted_tokens": known.accepted_tokens,
        "preemptions": work.preemptions,
        "checked_sums": (work.chunks + work.steps) * checks,
    }


# In words -----------------------------------------------------------------------------------------------------------


def _story(life: RequestLife, progress: Progress, now: float, checks: int) -> Iterator[str]:
    """The events of a request in order, one sentence each."""
    first = life.choices[0]
    if life.moves:
        yield f"It came from another server, which had failed it ({_times(life.moves, 'move')})."
    if first.finished is not None:
        timing = first.finished.timing
        yield f"It waited {timing.queue_s:.2f} s for a row."
    elif first.state(progress.get(first.id)) == "queued" and not life.outcome:
        yield f"It has waited {now - life.arrived:.1f} s for a row."
    if first.finished is not None or first.id in progress:
        yield _why(life, first, _known(first, progress))
    for choice in life.choices:
        yield from _computed(choice, progress, checks, len(life.choices))
    for pause in life.pauses:
        end = pause.ended if pause.ended is not None else life.ended if life.ended is not None else now
        yield f"It paused for {end - pause.began:.2f} s and lost no token: {pause.reason}."
    if life.error:
        yield f"It failed: {life.error}"
    elif life.outcome == "client left":
        yield "Its client left before the end."


def _why(life: RequestLife, choice: ChoiceLife, known: Finished | SequenceProgress) -> str:
    """Which part of the prompt was computed, and why. Memory or disk holds the whole prefix that a row begins with."""
    work, place = known.work, " on disk" if known.disk_tokens else " in memory" if known.cached_tokens else ""
    of = f"{known.cached_tokens} of {choice.prompt_tokens} prompt tokens were cached{place}"
    if not work.nearest_tokens:
        return f"{of}: nothing was kept that begins as this prompt does."
    if work.left_at >= min(work.nearest_tokens, choice.prompt_tokens - 1):
        return f"{of}: all that was kept of it."
    message = ""
    if life.left_in is not None and life.left_in < len(life.roles):
        message = f", in message {life.left_in + 1} of {len(life.roles)} ({life.roles[life.left_in]})"
    where = (
        f"the nearest kept prefix has {work.nearest_tokens} tokens and differs from token {work.left_at} on{message}"
    )
    return f"{of}: {where}."


def _computed(choice: ChoiceLife, progress: Progress, checks: int, n_choices: int) -> Iterator[str]:
    known = _known(choice, progress)
    work = known.work
    name = f"Choice {choice.id.rpartition('/')[2]}" if n_choices > 1 else "It"
    if work.chunks:
        took = f" in {choice.finished.timing.prefill_s:.2f} s" if choice.finished is not None else ""
        yield f"{name} was prefilled in {_times(work.chunks, 'chunk')}{took}."
    if work.steps:
        rate = f", {_rate(choice):.1f} a second" if _rate(choice) else ""
        accepted = f"; {known.accepted_tokens} of {known.drafted_tokens} drafted tokens were accepted"
        drafts = accepted if known.drafted_tokens else ""
        yield f"{name} got {_times(choice.output_tokens, 'token')} in {_times(work.steps, 'step')}{rate}{drafts}."
    if work.preemptions:
        yield f"{name} gave its row up {_times(work.preemptions, 'time')} for others, and was computed again."
    if checks and work.steps:
        yield f"{_times((work.chunks + work.steps) * checks, 'all-reduce')} of it were verified with a checksum."


def _times(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
