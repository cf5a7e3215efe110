"""A replica's health from its checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.gateway.dispatch.replica_health import (
    Check,
    HealthReport,
    HealthRules,
    ReplicaHealth,
    ReplicaLoad,
    report_of,
)

GOOD, BAD, SILENT = Check(ok=True), Check(ok=False, reason="503"), Check(ok=False, answered=False, reason="silence")
RULES = HealthRules(failures=3, successes=2)


def after(*checks: Check) -> ReplicaHealth:
    health = ReplicaHealth(RULES)
    for at, check in enumerate(checks):
        health.note(check, float(at), at + 0.5)
    return health


@pytest.mark.parametrize(
    ("checks", "state"),
    [
        ([], "unknown"),
        ([GOOD], "up"),
        ([BAD], "down"),
        ([GOOD, BAD, BAD], "up"),
        ([GOOD, BAD, BAD, SILENT], "down"),
        ([GOOD, BAD, BAD, GOOD, BAD, BAD], "up"),
        ([BAD, GOOD], "down"),
        ([BAD, GOOD, GOOD], "up"),
        ([BAD, GOOD, BAD, GOOD], "down"),
    ],
)
def test_checks_in_a_row_decide(checks, state):
    assert after(*checks).state == state


def test_a_replica_is_in_doubt_from_its_first_failed_check():
    assert not after(GOOD).is_degraded
    assert after(GOOD, BAD).is_degraded
    assert not after(GOOD, BAD, GOOD).is_degraded


def test_silence_is_not_a_no():
    """Streams of a replica that itself says it cannot serve may go on; of one that says nothing, not."""
    said, silent = after(GOOD, BAD, BAD, BAD), after(GOOD, SILENT, SILENT, SILENT)
    assert said.state == silent.state == "down"
    assert not said.is_lost(0.0) and said.silence(0.0, 9.0) == 0.0
    assert silent.is_lost(0.0) and silent.silence(0.0, 9.0) == 9.0
    assert after(GOOD, SILENT, BAD).silence(0.0, 9.0) == 0.0


def test_a_byte_while_an_unanswered_check_is_under_way_keeps_no_stream():
    """It did, until the stream's own time-out: the check had begun before it."""
    health = after(GOOD, SILENT)
    assert health.silence(1.2, 3.0) == pytest.approx(1.8)
    assert health.silence(1.6, 3.0) == 0.0
    health.note(SILENT, 2.0, 2.5)
    assert health.silence(1.6, 3.0) == pytest.approx(1.4)
    health.note(SILENT, 3.0, 3.5)
    assert health.is_lost(1.2) and not health.is_lost(1.6)
    health.note(SILENT, 4.0, 4.5)
    assert health.is_lost(1.6)


def test_since_when_it_says_that_it_cannot_serve():
    assert after(GOOD, BAD, BAD).refused_since == 1.0
    assert after(GOOD, BAD, GOOD).refused_since is None
    assert after(GOOD, BAD, SILENT).refused_since is None
    assert after(GOOD, BAD, SILENT, BAD).refused_since == 3.0


@examples(100, soak=5000)
@given(st.lists(st.booleans(), max_size=30))
def test_any_order_of_checks(oks):
    """Against the definition: the state follows from the checks alone."""
    health, state = ReplicaHealth(RULES), "unknown"
    for i, ok in enumerate(oks):
        run = 1
        while run <= i and oks[i - run] == ok:
            run += 1
        if i == 0 or run >= (RULES.successes if ok else RULES.failures):
            state = "up" if ok else "down"
        before = health.state
        assert health.note(GOOD if ok else BAD, float(i), float(i)) == (before != state)
        assert health.state == state


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (b'{"status": "ok", "requests": {"running": 3, "waiting": 1, "limit": 16}}', ReplicaLoad(3, 1, 16)),
        (b'{"status": "ok"}', None),
        (b"", None),
        (b"OK", None),
        (b'{"requests": {"running": 3, "waiting": 1, "limit": 0}}', None),
        (b'{"requests": {"running": -1, "waiting": 1, "limit": 8}}', None),
        (b'{"requests": {"running": "3", "waiting": 1, "limit": 8}}', None),
        (b'{"requests": {"running": 0, "waiting": 0, "limit": 99999999999}}', None),
    ],
)
def test_the_load_in_a_health(body, load):
    assert report_of(body) == HealthReport(load)


def test_numerics_are_those_of_the_last_good_check():
    """A server whose engine starts again does not say them, and has the same ones afterwards."""
    said = report_of(b'{"status": "ok", "determinism_key": "3f", "requests": {"running": 0, "waiting": 0, "limit": 0}}')
    assert said == HealthReport(determinism_key="3f")
    health = after(Check(ok=True, report=said), BAD, BAD, BAD)
    assert (health.state, health.determinism_key) == ("down", "3f")
    health.note(GOOD, 9.0, 9.0)
    assert health.determinism_key == ""


def test_whether_prefixes_survive_is_known_of_a_replica_that_is_down():
    good = Check(ok=True, report=report_of(b'{"status": "ok", "keeps_prefixes": true}'))
    assert after(good, BAD, BAD, BAD).keeps_prefixes and not after(good, GOOD).keeps_prefixes
