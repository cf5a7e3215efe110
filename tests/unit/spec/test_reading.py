"""What reading takes, as measured: prices and chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.reading import HOPED, SAMPLES, SMALLEST, Reading

MEASURED = st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 10)), max_size=40)


@given(MEASURED, st.floats(0, 20))
def test_a_chunk_takes_as_long_as_it_may_or_is_the_smallest(measured, seconds):
    reading = Reading()
    for tokens, took in measured:
        reading.observe(tokens, took)
    chunk = reading.within(seconds)
    assert chunk >= SMALLEST
    if chunk > SMALLEST:
        assert reading.seconds(chunk, chunk) <= seconds


def test_before_anything_is_known():
    reading = Reading()
    reading.observe(SMALLEST - 1, 1.0)
    assert not reading.known
    assert reading.within(1e9) == SMALLEST


def test_prices_are_those_of_the_chunks():
    """Eight tokens at once take as long as one; many take less each."""
    reading = Reading()
    reading.observe(8, 0.8)
    assert reading.seconds(1000, 500) == pytest.approx(100.0)
    reading.observe(512, 5.12)
    assert reading.seconds(1000, 600) == pytest.approx(10.0)
    assert reading.seconds(1000, 511) == pytest.approx(100.0)
    assert reading.within(6.0) == 600
    assert reading.within(1.0) == 10 or reading.seconds(reading.within(1.0), 1000) <= 1.0


def test_what_was_not_tried_is_hoped_to_be_cheaper():
    reading = Reading()
    reading.observe(8, 0.8)
    assert reading.hoped(8, 8) == pytest.approx(0.8)
    assert reading.hoped(1000, 32) == pytest.approx(50.0)  # up to 15 were as much as eight
    assert reading.hoped(1000, 500) == pytest.approx(25.0)
    reading.observe(512, 51.2)
    assert reading.hoped(1000, 500) == pytest.approx(100.0)


@given(MEASURED, st.integers(1, 5000), st.integers(1, 5000))
def test_hope_is_bounded(measured, tokens, at_once):
    reading = Reading()
    for chunk, took in [(SMALLEST, 1.0), *measured]:
        reading.observe(chunk, took)
    price = reading.seconds(tokens, at_once)
    assert price / HOPED <= reading.hoped(tokens, at_once) <= price


def test_chunks_grow_to_what_the_time_holds():
    """A forward of n tokens takes 10 + n ms: found from the smallest chunk on."""
    reading, chunks = Reading(), []
    for _ in range(20):
        chunks.append(reading.within(0.1))
        reading.observe(chunks[-1], 0.01 + chunks[-1] * 0.001)
    assert chunks[0] == SMALLEST
    assert max(chunks) <= 90
    assert chunks[-1] > 60


def test_one_disturbed_reading_means_nothing():
    reading = Reading()
    for _ in range(SAMPLES):
        reading.observe(64, 0.64)
    reading.observe(64, 64.0)
    assert reading.seconds(64, 64) == pytest.approx(0.64)
