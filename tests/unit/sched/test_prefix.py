"""The prefix index against brute force."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.sched.prefix import BLOCK, PrefixIndex, common_prefix


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 50))
def test_common_prefix(a, b, limit):
    n = 0
    while n < min(len(a), len(b), limit) and a[n] == b[n]:
        n += 1
    assert common_prefix(a, b, limit) == n


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 2000))
def test_find_is_the_longest_shared_prefix(seed, exact, budget):
    rnd = random.Random(seed)
    stem = [rnd.randrange(4) for _ in range(120)]
    index = PrefixIndex(budget, bytes_per_token=2, bytes_per_row=5, whole_only=exact)
    kept: dict[int, tuple[str, list[int]]] = {}
    for i in range(12):
        tokens = stem[: rnd.randrange(120)] + [9 + i] * rnd.randrange(20)
        salt = rnd.choice(["", "x"])
        number, evicted = index.add(salt, tokens)
        for old in evicted:
            del kept[old]
        if number is not None:
            kept[number] = (salt, tokens)
        assert index.used == sum(2 * len(t) + 5 for _, t in kept.values()) <= budget
        assert len(index) == len(kept)
        prompt = stem[: rnd.randrange(120)] + [7, 7]
        limit = len(prompt) - 1
        lengths = [common_prefix(t, prompt, limit) for s, t in kept.values() if s == salt]
        if exact:
            lengths = [
                n for n in lengths if any(len(t) == n and t == prompt[:n] for s, t in kept.values() if s == salt)
            ]
        best = max(lengths, default=0)
        hit = index.find(salt, prompt, limit)
        assert (hit.length if hit else 0) == (best if best >= BLOCK else 0)
        if hit:
            assert kept[hit.entry][1][: hit.length] == prompt[: hit.length] and kept[hit.entry][0] == salt
    assert sorted(index.clear()) == sorted(kept) and index.used == 0 and index.find("", stem, 120) is None


def test_the_least_recently_used_goes_first():
    index = PrefixIndex(100 * 2, bytes_per_token=2)
    a, b, c = ([i] * 40 for i in (1, 2, 3))
    (first, _), (second, _) = index.add("", a), index.add("", b)
    assert index.find("", [*a, 0], 40).entry == first
    assert index.add("", c)[1] == [second]


def test_a_longer_entry_supersedes_the_one_it_contains():
    index = PrefixIndex(1000, bytes_per_token=1)
    first, _ = index.add("", [1] * 32)
    second, evicted = index.add("", [1] * 32 + [2] * 16)
    assert evicted == [first] and second is not None
    assert index.add("", [1] * 32) == (None, [])
