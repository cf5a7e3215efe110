"""The index of blocks on disk against brute force."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.sched.disk_index import BLOCK_TOKENS, DiskIndex
from phalanx.sched.prefix import common_prefix

SECRET = b"s" * 32


def written(index: DiskIndex, sharing: str, tokens: list[int], owner: str = "") -> tuple[bytes, ...] | None:
    """Write a prefix to the end. Returns the names of blocks that made room; None if nothing was written."""
    new = index.write(sharing, owner, tokens)
    if new is None:
        return None
    assert index.settle(new.blocks, written=True) == ()
    return new.dropped


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_find_is_the_longest_prefix_of_the_same_owner(seed, whole_only):
    rnd = random.Random(seed)
    stem = [rnd.randrange(4) for _ in range(5 * BLOCK_TOKENS)]
    index = DiskIndex(SECRET, 1000, 1000, whole_only=whole_only)
    kept: list[tuple[str, list[int]]] = []
    for i in range(8):
        tokens = stem[: rnd.randrange(5 * BLOCK_TOKENS)] + [9 + i] * rnd.choice([0, 30, 600])
        sharing = rnd.choice(["", "x"])
        written(index, sharing, tokens)
        kept.append((sharing, tokens))
        prompt = stem[: rnd.randrange(5 * BLOCK_TOKENS)] + [9 + i] * rnd.randrange(700) + [7, 7]
        limit = len(prompt) - 1
        shared = [(len(t), common_prefix(t, prompt, limit)) for s, t in kept if s == sharing]
        if whole_only:
            best = max((n for whole, n in shared if n == whole), default=0)
        else:
            best = max((n // BLOCK_TOKENS * BLOCK_TOKENS for _, n in shared), default=0)
        hit = index.find(sharing, prompt, limit)
        assert (hit.length if hit else 0) == best
        assert index.find("nobody", prompt, limit) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_the_budget_holds_and_it_never_knows_of_a_block_that_is_gone(seed, limit, whole_only):
    rnd = random.Random(seed)
    index, disk = DiskIndex(SECRET, limit, limit, whole_only=whole_only), {}
    for _ in range(30):
        tokens = [rnd.randrange(3)] * (BLOCK_TOKENS * rnd.randrange(4)) + [rnd.randrange(3)] * rnd.randrange(500)
        new = index.write("", "", tokens)
        if new is not None:
            for name in new.dropped:
                del disk[name]
            disk.update((block.name, block) for block in new.blocks)
            for ending in (False, True):
                assert sum(block.ending is ending for block in disk.values()) <= limit
            outcome = rnd.random() < 0.8
            for name in index.settle(new.blocks, written=outcome):
                del disk[name]
        assert set(index.names) == disk.keys()
        if hit := index.find("", tokens, len(tokens)):
            index.use(hit.names)


def test_what_was_used_twice_stays_longer():
    index = DiskIndex(SECRET, 2)
    first, second, third = ([i] * BLOCK_TOKENS for i in (1, 2, 3))
    written(index, "", first)
    hit = index.find("", first, BLOCK_TOKENS)
    index.use(hit.names)
    written(index, "", second)
    written(index, "", third)  # the second is younger, but was used once
    assert index.find("", first, BLOCK_TOKENS) and not index.find("", second, BLOCK_TOKENS)


def test_a_prefix_that_goes_on_is_written_from_where_it_was_left_and_only_once():
    index = DiskIndex(SECRET, 100)
    tokens = list(range(3 * BLOCK_TOKENS + 5))
    begun = index.write("", "", tokens[: 2 * BLOCK_TOKENS])
    assert begun is not None and (begun.first, len(begun.blocks)) == (0, 2)
    assert index.find("", tokens, len(tokens)) is None, "a block counts once all ranks have written it"
    beside = index.write("", "", tokens)
    assert beside is not None and (beside.first, len(beside.blocks)) == (2, 1)
    index.settle(beside.blocks, written=True)
    index.settle(begun.blocks, written=True)
    assert index.find("", tokens, len(tokens)).length == 3 * BLOCK_TOKENS
    assert index.write("", "", tokens) is None


def test_tokens_are_compared_where_names_collide(monkeypatch):
    monkeypatch.setattr("phalanx.sched.disk_index._name", lambda parent, tokens: b"n" * 16)
    index = DiskIndex(SECRET, 100)
    written(index, "", [1] * BLOCK_TOKENS)
    assert index.find("", [1] * BLOCK_TOKENS, BLOCK_TOKENS) is not None
    assert index.find("", [2] * BLOCK_TOKENS, BLOCK_TOKENS) is None


@pytest.mark.parametrize("other", [{"secret": b"t" * 32}, {"sharing": "other"}])
def test_names_are_of_one_owner_and_one_installation(other):
    tokens = [1] * BLOCK_TOKENS
    names = []
    for secret, sharing in ((SECRET, "own"), (other.get("secret", SECRET), other.get("sharing", "own"))):
        index = DiskIndex(secret, 100)
        written(index, sharing, tokens)
        names.append(set(index.names))
    assert names[0].isdisjoint(names[1])


def test_what_belongs_to_a_key_that_was_removed_goes():
    index = DiskIndex(SECRET, 100)
    written(index, "a", [1] * BLOCK_TOKENS, owner="a")
    written(index, "b.client/salt", [2] * BLOCK_TOKENS, owner="b.client")  # of a gateway that has the key b
    assert len(index.forget_owners(["b"])) == 1
    assert index.find("b.client/salt", [2] * BLOCK_TOKENS, BLOCK_TOKENS)
    assert len(index.forget_owners([])) == 1 and len(index) == 0


def test_names_do_not_depend_on_the_process():
    index = DiskIndex(SECRET, 100)
    new = index.write("", "", list(range(BLOCK_TOKENS)))
    assert [block.name.hex() for block in new.blocks] == ["eba86f6605b6e197a018a59c178badeb"]
    assert array("I", new.blocks[0].tokens).tolist() == list(range(BLOCK_TOKENS))
