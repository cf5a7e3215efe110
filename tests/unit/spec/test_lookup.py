"""The drafters that look things up, against themselves without an index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import naive
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive import NaiveNgram, NaiveSuffix
from support.drafts import drafted

from phalanx.spec import lookup
from phalanx.spec.drafters import Drafter, RandomDrafter
from phalanx.spec.lookup import IndexedText, TextGroup, common_suffix, continuation, nearby_matches, reliability
from phalanx.spec.ngram import NgramDrafter
from phalanx.spec.suffix import SuffixDrafter
from phalanx.speculation_config import NgramSpeculation, SuffixSpeculation

TOKENS = st.lists(st.integers(0, 2), max_size=40)  # three tokens: much repeats


@dataclass(frozen=True)
class Call:
    """One of a sequence's turns; what it does depends on whether the sequence runs."""

    key: int
    tokens: list[int]
    salt: str
    n: int
    ends: bool


CALLS = st.lists(
    st.builds(
        Call,
        key=st.integers(0, 3),
        tokens=TOKENS,
        salt=st.sampled_from(["", "", "other"]),
        n=st.integers(1, 9),
        ends=st.integers(0, 3).map(lambda i: i == 0),
    ),
    max_size=30,
)


def agree(ours: Drafter, naive: Drafter, calls: list[Call]) -> int:
    """The same drafts after the same calls; returns how many tokens were drafted."""
    running: set[int] = set()
    n_drafted = 0
    for call in calls:
        for drafter in (ours, naive):
            if call.key not in running:
                drafter.begin(call.key, call.tokens, call.salt)
            elif call.ends:
                drafter.end(call.key)
            else:
                drafter.extend(call.key, call.tokens)
        running ^= {call.key} if call.key not in running or call.ends else set()
        wanted = dict.fromkeys(sorted(running), call.n)
        drafts = ours.draft(wanted)
        assert drafts == naive.draft(wanted)
        assert all(1 <= len(draft.tokens) == len(draft.buckets) <= call.n for draft in drafts.values())
        n_drafted += sum(len(draft.tokens) for draft in drafts.values())
    return n_drafted


class TestDrafts:
    """They are those of a search through everything."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def every_place(cls) -> Iterator[None]:
        """No place is forgotten but those of texts that left."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookup, "PLACES", 10_000)
            patch.setattr(naive, "PLACES", 10_000)
            yield

    @given(CALLS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
    def test_ngram(self, calls, a, b, requests):
        longest, shortest = max(a, b), min(a, b)
        config = NgramSpeculation(
            prompt_lookup_max=longest, prompt_lookup_min=shortest, prompt_lookup_requests=requests
        )
        agree(NgramDrafter(config), NaiveNgram(longest, shortest, requests), calls)

    @given(CALLS, st.integers(2, 10), st.floats(0.1, 4), st.floats(0, 1), st.integers(0, 3))
    def test_suffix(self, calls, depth, factor, least, requests):
        config = SuffixSpeculation(
            suffix_decoding_max_tree_depth=depth,
            suffix_decoding_max_spec_factor=factor,
            suffix_decoding_min_token_prob=least,
            suffix_decoding_max_cached_requests=requests,
        )
        agree(SuffixDrafter(config), NaiveSuffix(depth, factor, least, requests), calls)


@given(CALLS)
def test_the_latest_places_are_heard(calls):
    """Without texts that leave: what leaves after the index forgot older places does not bring those back."""
    config = SuffixSpeculation(suffix_decoding_max_cached_requests=100)
    agree(SuffixDrafter(config), NaiveSuffix(24, 2.0, 0.1, 100), calls)
    agree(NgramDrafter(NgramSpeculation(prompt_lookup_requests=100)), NaiveNgram(4, 2, 100), calls)


def test_the_search_finds_something():
    """Else the two tests above would compare nothing with nothing."""
    calls = [Call(key, [0, 1, 2, 0, 1], "", 4, False) for key in (0, 1, 0, 1)]
    assert agree(NgramDrafter(NgramSpeculation()), NaiveNgram(4, 2, 16), calls) > 10
    assert agree(SuffixDrafter(SuffixSpeculation()), NaiveSuffix(24, 2.0, 0.1, 64), calls) > 10


def ngram(tokens: list[int], n: int = 4, **fields: int) -> list[int]:
    drafter = NgramDrafter(NgramSpeculation(**fields))
    drafter.begin(0, tokens)
    return drafted(drafter, {0: n}).get(0, [])


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest occurrence; reads on in the draft
        ([9, 1, 2, 3, 5, 1, 2, 4, 9, 1, 2], [3, 5, 1, 2]),  # a longer run is worth more than a later one
        ([7, 8, 7, 8], [7, 8, 7, 8]),  # a loop goes on
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_ngram(tokens, draft):
    assert ngram(tokens) == draft


def suffix(tokens: list[int], n: int = 8, **fields: float) -> list[int]:
    drafter = SuffixDrafter(SuffixSpeculation(**fields))
    drafter.begin(0, tokens)
    return drafted(drafter, {0: n}).get(0, [])


def test_the_majority_goes_on():
    """`1 2` was followed by 3 twice and by 4, the latest, once: prompt lookup says 4, the votes 3."""
    tokens = [1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]
    assert suffix(tokens, 1) == [3]
    assert ngram(tokens, 1) == [4]


def test_a_long_context_outvotes_short_ones():
    tokens = [5, 6, 7, 1, 2, 4, *range(10, 20), 1, 2, 3, *range(20, 30), 1, 2, 3, *range(30, 40), 5, 6, 7, 1, 2]
    assert suffix(tokens, 1) == [4]


def test_a_record_goes_on_as_others_at_this_field():
    name, town, end = 1, 2, 3
    tokens = [name, 50, end, town, 60, end, name, 51, end, town, 61, end, name, 52, end]  # 52 is new
    assert suffix(tokens, 1) == [town]
    assert suffix([*tokens, town, 62, end], 1) == [name]


def test_a_draft_ends_where_voices_differ():
    start = [1, 2, 3, 4]
    tokens = [*start, 10, 11, *start, 20, 21, *start, *range(30, 40), 1, 2]
    assert suffix(tokens, suffix_decoding_min_token_prob=0.3) == [3, 4]
    assert len(suffix(tokens, suffix_decoding_min_token_prob=0.0)) == 4  # twice the context, at most


def test_certainty_is_needed():
    assert suffix([1, 2, 3, 1, 2], suffix_decoding_min_token_prob=1.0) == []
    assert reliability(2) == pytest.approx(2 / 3)


def test_shared_contexts():
    assert common_suffix([1, 2, 3], [0, 2, 3], 3, 24) == 2
    assert common_suffix([1, 2, 3], [1, 2, 3, 4], 3, 24) == 3
    assert common_suffix([1, 2, 3], [1, 2, 3], 3, 1) == 1


def test_what_stands_before_them():
    assert nearby_matches([1, 4, 9, 3], [1, 8, 9, 3], 4, 1) == 2
    assert nearby_matches([1, 4, 4, 4, 9, 3], [1, 5, 4, 3], 4, 1) == 2  # 1 is two tokens nearer
    assert nearby_matches([1, 4, 4, 4, 4, 9, 3], [1, 5, 4, 3], 4, 1) == 1
    assert nearby_matches([7, *range(10, 18), 3], [7, *range(20, 28), 3], 10, 1) == 0
    assert nearby_matches([3], [3, 3], 1, 1) == 0


@pytest.mark.parametrize("make", [lambda: NgramDrafter(NgramSpeculation()), lambda: SuffixDrafter(SuffixSpeculation())])
class TestOthers:
    """What sequences learn from each other."""

    TEXT = [*range(100, 120)]

    def test_an_ended_request_helps_the_next(self, make):
        drafter = make()
        drafter.begin(0, self.TEXT[:10])
        drafter.extend(0, self.TEXT[10:])
        drafter.end(0)
        drafter.begin(1, [1, 2, *self.TEXT[:8]])
        assert drafted(drafter, {1: 4}) == {1: self.TEXT[8:12]}

    def test_a_running_one_too(self, make):
        drafter = make()
        drafter.begin(0, self.TEXT)
        drafted(drafter, {0: 1})
        drafter.begin(1, self.TEXT[:8])
        assert drafted(drafter, {1: 4}) == {1: self.TEXT[8:12]}

    def test_not_under_another_salt(self, make):
        drafter = make()
        drafter.begin(0, self.TEXT, "a")
        drafter.end(0)
        drafter.begin(1, self.TEXT[:8], "b")
        assert drafted(drafter, {1: 4}) == {}

    def test_tokens_kept_are_bounded(self, make, monkeypatch):
        monkeypatch.setattr(lookup, "KEPT_TOKENS", 30)
        drafter = make()
        for key, text in enumerate([self.TEXT, [*range(200, 220)]]):
            drafter.begin(key, text)
            drafter.end(key)
        drafter.begin(2, self.TEXT[:8])
        drafter.begin(3, [*range(200, 208)])
        assert drafted(drafter, {2: 2, 3: 2}) == {3: [208, 209]}

    def test_a_key_begins_once(self, make):
        drafter = make()
        drafter.begin(0, [1])
        with pytest.raises(ValueError, match="sequence 0 has begun already"):
            drafter.begin(0, [1])


def test_a_long_prompt_is_indexed_over_several_steps():
    drafter = NgramDrafter(NgramSpeculation(), indexed_per_step=10)
    long, short = [*range(100), 0, 1], [7, 8, 9, 7, 8]
    drafter.begin(0, long)
    drafter.begin(1, short)
    # the short one first, then 5 tokens of the long one
    assert drafted(drafter, {0: 2, 1: 2}) == {0: [2, 3], 1: [9, 7]}
    long_again = [*range(50, 100), 95, 96]
    drafter.begin(2, long_again)
    assert drafted(drafter, {2: 1}) == {}
    steps = next(step for step in range(20) if drafted(drafter, {2: 1}))
    assert steps == 3  # 95 96 was followed by the token at place 47, and 10 more places are indexed each time


def test_ended_texts_are_indexed_to_their_end():
    drafter = NgramDrafter(NgramSpeculation(), indexed_per_step=30)
    drafter.begin(0, [*range(100)])
    drafter.end(0)
    drafter.begin(1, [80, 81, 82, 83])
    assert [bool(drafted(drafter, {1: 2})) for _ in range(4)] == [False, False, True, True]


def put(group: TextGroup, tokens: list[int], number: int) -> IndexedText:
    text = group.texts[number] = IndexedText(list(tokens), number, group)
    return text


@given(TOKENS, st.integers(1, 7))
def test_indexing_by_pieces_is_indexing_at_once(tokens, piece):
    pieces, whole = TextGroup("", (3, 1)), TextGroup("", (3, 1))
    one, other = put(pieces, tokens, 5), put(whole, tokens, 5)
    while pieces.index(one, piece):
        pass
    whole.index(other, len(tokens))
    for size in (3, 1):
        for at in range(size, len(tokens) + 1):
            run = tuple(tokens[at - size : at])
            assert pieces.indexes[size].latest(run) == whole.indexes[size].latest(run)


@given(st.lists(TOKENS, max_size=4), st.integers(1, 7))
def test_what_leaves_leaves_nothing(texts, piece):
    group = TextGroup("", (3, 1))
    there = [put(group, tokens, number) for number, tokens in enumerate(texts)]
    for text in there:
        group.index(text, 1000)
    for text in there:
        while group.remove(text, piece) and text.indexed:
            pass
    assert not group.texts
    assert [len(index._places) for index in group.indexes.values()] == [0, 0]


def test_a_run_that_is_everywhere_takes_bounded_room():
    group = TextGroup("", (1,))
    text = put(group, [7] * 1000, 0)
    group.index(text, 1000)
    assert group.indexes[1].latest((7,)) == [*range(999, 999 - lookup.PLACES, -1)]
    kept = group.indexes[1]._places[7,]
    assert isinstance(kept, list)
    assert len(kept) <= 2 * lookup.PLACES


def test_nothing_is_kept_of_salts_that_are_gone():
    drafter = NgramDrafter(NgramSpeculation(prompt_lookup_requests=1))
    for key in range(5):
        drafter.begin(key, [1, 2, 3], salt=f"key {key}")
        drafted(drafter, {key: 1})
        drafter.end(key)
    drafted(drafter, {})
    assert len(drafter._groups) == 1


def test_reading_on():
    group = TextGroup("", (1,))
    text, other = put(group, [1, 2, 3], 0), put(group, [1, 2, 3], 1)
    assert continuation(text, text, 1, 5) == [2, 3, 2, 3, 2]
    assert continuation(text, text, 0, 2) == [1, 2]
    assert continuation(text, other, 1, 5) == [2, 3]


def test_noise_is_the_same_each_time():
    drafter = RandomDrafter(100)
    drafter.begin(3, [1, 2])
    first = drafted(drafter, {3: 8})[3]
    assert drafted(drafter, {3: 8})[3] == first
    drafter.extend(3, [5])
    assert drafted(drafter, {3: 8})[3] != first
    assert len(set(first)) > 4
    assert all(0 <= token < 100 for token in first)
    drafter.end(3)
    with pytest.raises(KeyError):
        drafted(drafter, {3: 1})
