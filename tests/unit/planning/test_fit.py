"""Slopes and intercepts of what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.planning.fit import Chunk, Decode, Measured, fit

times = st.floats(1e-6, 1.0)


def steps(layer: float, ends: float, context: float = 0.0, *, few: int = 2, more: int = 4, noise: float = 1.0):
    return Measured(
        decode=[
            Decode(
                layers=n, rows=rows, context=length, spread=0.03,
                seconds=noise * (n * (layer * rows + context * (length - 32)) + ends),
            )
            for rows, length in ((1, 32), (4, 32), (16, 32), (1, 1024))
            for n in (few, more)
        ],
    )  # fmt: skip


def chunks(token: float, context: float, ends: float = 0.0) -> Measured:
    """Everything else takes as long as so many layers."""
    return Measured(
        chunks=[
            Chunk(
                layers=n,
                tokens=size,
                context=done,
                seconds=(n + ends) * size * (token + context * (done + size / 2)),
            )
            for n in (2, 4)
            for size, done in ((256, 0), (512, 256), (200, 768))
        ]
    )


@given(times, times, st.floats(0.0, 1e-4), times, st.floats(0.0, 1e-4), st.floats(-0.9, 3.0))
def test_what_was_put_in_comes_out(
    layer: float, ends: float, context: float, token: float, behind: float, chunk_layers: float
):
    found = fit(1, [steps(layer, ends, context)], [chunks(token, behind, chunk_layers)])
    assert [point.rows for point in found.decode] == [1, 4, 16]
    for point in found.decode:
        assert point.layer_s == pytest.approx(layer * point.rows, rel=1e-6, abs=1e-9)
        assert point.ends_s == pytest.approx(ends, rel=1e-6, abs=1e-6)
    assert found.decode_context_s == pytest.approx(context, rel=1e-6, abs=1e-9)
    assert found.token_s == pytest.approx(token, rel=1e-3)
    assert found.token_context_s == pytest.approx(behind, rel=1e-3, abs=1e-9)
    assert found.chunk_layers == pytest.approx(chunk_layers, abs=0.01)
    assert found.spread == 0.03


def test_of_ranks_that_wait_for_each_other_the_slowest_counts():
    both = fit(2, [steps(0.001, 0.002), steps(0.001, 0.002, noise=3.0)], [chunks(1e-4, 0.0)])
    assert both.decode[0].layer_s == pytest.approx(0.003)


def test_noise_gives_no_negative_times():
    upside_down = Measured(
        decode=[Decode(layers=n, rows=1, context=32, seconds=1.0 / n, spread=0.0) for n in (2, 4)],
        chunks=[Chunk(layers=2, tokens=100, context=done, seconds=1.0 - done / 2000) for done in (0, 500, 1000)],
    )
    found = fit(1, [upside_down], [upside_down])
    assert found.decode[0].layer_s == 0.0 and found.decode[0].ends_s > 0
    assert found.token_s > 0 and found.token_context_s == 0.0


def test_one_number_of_layers_is_all_slope():
    found = fit(1, [Measured(decode=[Decode(layers=3, rows=1, context=1, seconds=0.3, spread=0.0)])], [])
    assert (found.decode[0].layer_s, found.decode[0].ends_s) == (pytest.approx(0.1), 0.0)
