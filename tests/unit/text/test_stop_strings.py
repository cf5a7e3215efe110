"""Stop strings found in a stream, against a search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.text.stop_strings import StopAutomaton, StopMatch, StopStrings

pieces_of_text = st.lists(st.text(alphabet="ab\n", max_size=4), max_size=20)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), min_size=1, max_size=4)


def naive(text: str, strings: list[str]) -> tuple[int, str] | None:
    """Where the text stops being safe: the first end of any stop string, the longest of those ending there."""
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(pieces=pieces_of_text, strings=stops, include=st.booleans())
@example(pieces=["aa", "ab"], strings=["aab"], include=False)
@example(pieces=["", "abab", "", "aba"], strings=["ababaa", "b\n"], include=True)
def test_any_cutting_of_the_text_gives_what_the_whole_gives(
    pieces: list[str], strings: list[str], include: bool
) -> None:
    text = "".join(pieces)
    found = naive(text, strings)
    search = StopStrings(StopAutomaton(strings), include=include)
    shown, seen = "", ""
    for n, piece in enumerate(pieces, start=1):
        before = search.matched
        shown += search.add(piece, n)
        seen += piece
        assert text.startswith(shown)
        if search.matched is not None and before is None:
            assert found is not None
            end, string = found
            assert search.matched == StopMatch(string, n)
            assert len(seen) - len(piece) < end <= len(seen), "completed by another token"
        if search.matched is None:
            held = seen[len(shown) :]
            undecided = [n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in strings)]
            assert len(held) == max(undecided), "held back more or less than could still become a stop string"
    shown += search.finish()
    if found is None:
        assert (search.matched, shown) == (None, text)
    else:
        end, string = found
        assert shown == (text[:end] if include else text[: end - len(string)])
    assert search.finish() == ""


def test_nothing_is_shown_after_a_match() -> None:
    search = StopStrings(StopAutomaton(["END"]))
    assert search.add("so E", 1) == "so "
    assert search.add("ND and more", 2) == ""
    assert search.matched == StopMatch("END", 2)
    assert (search.add("more", 3), search.finish()) == ("", "")
    assert search.matched == StopMatch("END", 2)


def test_a_very_long_stop_string_costs_no_more_per_character() -> None:
    """A search that compares suffixes would need 10**10 steps here."""
    search = StopStrings(StopAutomaton(["a" * 100_000 + "b"]))
    assert "".join(search.add("a" * 100, n) for n in range(2000)) == "a" * 100_000
    assert search.finish() == "a" * 100_000


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton([""])


class Counted(StopAutomaton):
    """Counts the states that it looks at."""

    looks = 0

    def step(self, state: int, char: str) -> int:
        self.looks += 1
        return super().step(state, char)


def test_many_stop_strings_are_prepared_once_and_cost_no_more_than_one() -> None:
    """16 strings of 4,096 characters, prepared for each of 16 choices, took 1.3 s."""
    automaton = Counted(["ab" * 128 + str(i) for i in range(16)])
    assert automaton.looks < 16 * 257
    automaton.looks = 0
    choices = [StopStrings(automaton) for _ in range(16)]
    assert automaton.looks == 0
    for search in choices:
        assert search.add("ab" * 1000, 1) == "ab" * (1000 - 128)
    assert automaton.looks == 16 * 2000
    assert choices[3].add("7", 2) == "" and choices[3].matched == StopMatch("ab" * 128 + "7", 2)
    assert choices[4].matched is None
