"""Which moments of a step send the events that the outbox holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.engine.outbox import EventOutbox
from phalanx.types import Batch, Tokens


class Post:
    def __init__(self) -> None:
        self.sent: list[Batch] = []

    def send(self, message: Batch) -> None:
        self.sent.append(message)


def tokens(start: int) -> Tokens:
    return Tokens(id="a", start=start, tokens=[7], logprobs=None)


@pytest.mark.parametrize(
    ("moment", "sends"),
    [
        (lambda outbox: outbox.before_draft(computes=False), False),
        (lambda outbox: outbox.before_draft(computes=True), True),
        (lambda outbox: outbox.before_execute(blocks=False), False),
        (lambda outbox: outbox.before_execute(blocks=True), True),
        (lambda outbox: outbox.while_computing(), True),
        (lambda outbox: outbox.after_step(idle=False), False),
        (lambda outbox: outbox.after_step(idle=True), True),
        (lambda outbox: outbox.flush(), True),
    ],
)
def test_events_are_held_until_sending_them_costs_nothing_or_holding_them_would(
    moment: Callable[[EventOutbox], None], sends: bool
):
    outbox = EventOutbox(post := Post())
    outbox.add(3, [tokens(0)])
    outbox.add(4, [])  # nothing to tell
    outbox.add(5, [tokens(1)])
    assert post.sent == []
    moment(outbox)
    assert post.sent == ([Batch(3, [tokens(0)]), Batch(5, [tokens(1)])] if sends else [])
    outbox.flush()
    assert len(post.sent) == 2
