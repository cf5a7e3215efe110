"""Steps that wait for drafts, and those that need not."""

from __future__ import annotations

import pytest

from phalanx.spec.waiting import MOST, Waiting


def early(rows: int = 1) -> Waiting:
    waiting = Waiting()
    waiting.begin()
    assert waiting.end(rows) == (True, False)
    return waiting


def test_plain_steps_are_measured_where_they_begin_early():
    waiting = Waiting()
    assert not waiting.is_known(1)
    assert waiting.end(1) == (True, False)  # a machine on which none does
    waiting.begin()
    assert waiting.end(1) == (True, False)
    assert waiting.is_known(1) and not waiting.is_known(2)
    assert waiting.end(1) == (False, False)  # late for another reason
    assert waiting.end(2) == (True, False)


def test_a_step_waits_as_was_decided_in_the_one_before():
    waiting = early()
    assert waiting.decide(True)
    assert waiting.end(1) == (False, False)
    assert waiting.end(1) == (False, True)
    assert waiting.end(1) == (False, False)
    waiting.decide(False)
    waiting.end(1)
    assert waiting.end(1) == (False, False)


def test_what_waiting_costs_is_measured_from_the_first_step_on():
    waiting = early()
    assert waiting.lost(None) == 0.0
    assert waiting.lost(0.3) == 0.3
    assert 0.25 < waiting.lost(0.2) < 0.3
    assert waiting.lost(-5.0) > 0.0
    before = waiting.lost(None)
    assert waiting.lost(50.0) <= before + MOST / 8


def test_it_pays_while_drafts_promise_more():
    waiting = early()
    assert not waiting.pays
    waiting.note(1.0)
    assert waiting.pays  # what it costs is not known yet
    waiting.lost(0.5)
    assert not waiting.pays
    for _ in range(20):
        waiting.note(1.0)
    assert waiting.pays
    for _ in range(40):
        waiting.note(0.0)
    assert not waiting.pays


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_rare_drafts_have_to_promise_more_than_frequent_ones(share: float):
    waiting = early()
    waiting.lost(0.3)
    for n in range(200):
        waiting.note(0.5 if (n + 1) * share % 1.0 < share else 0.0)
    assert waiting.pays == (share > 0.5)


def test_what_a_text_promised_ends_with_it():
    waiting = early()
    waiting.lost(0.1)
    for _ in range(40):
        waiting.note(1.0)
    waiting.forget(0.25)  # three others go on
    assert waiting.pays
    waiting.forget(1.0)
    assert not waiting.pays
