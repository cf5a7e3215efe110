"""Random lives of rows in arrays of MLX's, whose contents are those of a plain model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_lives import HYBRID, KV, Lives

from phalanx.model.cache.layer_layout import Layout


@pytest.mark.parametrize("layouts", [KV, HYBRID])
@settings(max_examples=40)
@given(data=st.data())
def test_rows_hold_what_was_written_to_them(layouts: tuple[Layout, ...], data: st.DataObject) -> None:
    Lives(layouts).play(data)
