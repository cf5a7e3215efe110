"""A stream's tokens cost the same however many came before, also where their bytes never become characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.text.text_stream import CONTEXT, MAX_WINDOW, REPLACEMENT, WindowStream


def decode(ids: Sequence[int]) -> str:
    """As the libraries' byte fallback: a run of bytes that is no UTF-8 becomes a replacement character for each."""
    data = bytes(ids)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(data)


@pytest.mark.parametrize(("token", "piece"), [(0xFF, REPLACEMENT), (0xE2, REPLACEMENT), (300, "")])
def test_tokens_without_a_certain_end_cost_no_more_than_a_window(token, piece):
    longest = 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return piece * len(ids) if token > 255 else decode(ids)

    stream = WindowStream(counted, frozenset())
    text = "".join(stream.add(token) for _ in range(1000)) + stream.finish()
    assert text == piece * 1000
    assert longest <= MAX_WINDOW + CONTEXT + 1


def test_characters_after_such_a_cut_are_whole():
    ids = [0xFF] * (MAX_WINDOW + 3)
    stream = WindowStream(decode, frozenset())
    text = "".join(stream.add(token) for token in [*ids, *"é".encode()])
    assert text + stream.finish() == decode([*ids, *"é".encode()])
