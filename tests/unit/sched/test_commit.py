"""Stop rules, commits and the mirror's refusals (A1, A2, A9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import make_request

from phalanx.engine.mirror import Mirror
from phalanx.errors import Desync
from phalanx.sched.commit import accept, commit_chunk, commit_tokens
from phalanx.sched.plan import Admit, Evict, Forward, Free, Move, Resize, Restore, Share, Step, Store, Swap
from phalanx.sched.sequence import Sequence
from phalanx.sched.stop import clip
from phalanx.types import StopRule


@pytest.mark.parametrize(
    ("drafts", "sampled", "verified"),
    [([], [4], [4]), ([1, 2], [1, 9, 7], [1, 9]), ([1, 2], [8, 2, 7], [8]), ([1, 2], [1, 2, 7], [1, 2, 7])],
)
def test_drafts_count_up_to_the_first_wrong_one_and_the_token_in_its_place(drafts, sampled, verified):
    assert accept(drafts, sampled) == verified


tokens = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@given(tokens, st.integers(0, 10), st.integers(1, 20), st.sets(st.integers(0, 5), max_size=2), st.integers(0, 8))
def test_clip_equals_taking_tokens_one_by_one(verified, before, max_tokens, stop_ids, min_tokens):
    rule = StopRule(max_tokens=before + max_tokens, min_tokens=min_tokens, stop_ids=frozenset(stop_ids))
    kept, finish, stop_id = 0, None, None
    for token in verified:
        kept += 1
        if token in stop_ids and before + kept > min_tokens:
            finish, stop_id = "stop", token
            break
        if before + kept == rule.max_tokens:
            finish = "length"
            break
    assert clip(rule, before, verified) == (kept, finish, stop_id)


@given(tokens, st.integers(0, 10), st.integers(1, 20), st.integers(0, 8))
def test_with_a_grammar_a_stop_id_ends_a_row_even_before_min_tokens(verified, before, max_tokens, min_tokens):
    """It is drawn there only if the grammar allows nothing else."""
    rule = StopRule(max_tokens=before + max_tokens, min_tokens=min_tokens, stop_ids=frozenset({0}))
    anywhere = StopRule(max_tokens=before + max_tokens, stop_ids=frozenset({0}))
    assert clip(rule, before, verified, constrained=True) == clip(anywhere, before, verified)


def test_a_row_without_any_token_left_commits_none_of_what_it_fed():
    seq = Sequence(3, make_request("a", [1, 2, 3]), now=0.0)
    commit = commit_tokens(seq, 2, 4, [])
    assert (commit.tokens, commit.computed, commit.kv_len, commit.finish) == ((), 6, 2, None)


@given(tokens, st.integers(1, 8))
def test_commit_keeps_one_position_per_token(verified, max_tokens):
    seq = Sequence(3, make_request("a", [1, 2, 3], max_tokens), now=0.0)
    commit = commit_tokens(seq, 2, len(verified) + 2, verified)
    assert commit.tokens == tuple(verified[:max_tokens])
    assert commit.kv_len == 2 + len(commit.tokens) <= commit.computed == 2 + len(verified) + 2
    assert (commit.finish == "length") == (len(verified) >= max_tokens)


def test_chunk_commits_no_token():
    seq = Sequence(3, make_request("a", [1, 2, 3]), now=0.0)
    assert commit_chunk(seq, 0, 2).kv_len == 2 and commit_chunk(seq, 0, 2).tokens == ()


def one_row() -> Mirror:
    mirror = Mirror()
    step = Step(1, (), (Resize(0, 2, 256), Admit(0, 0, seq=7)), (), digest=0)
    with pytest.raises(Desync, match="digest"):  # a wrong digest is refused ...
        mirror.begin(step)
    return mirror  # ... and leaves the row there for the tests below


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Admit(0, 0, seq=8), "slot 0 is taken"),
        (Restore(0, 0, entry=5, length=3), "prefix entry 5"),
        (Restore(0, 1, entry=5, length=3), "slot 1, which is empty"),
        (Share(0, 0, 0, 0, length=9), "fewer than the 9 tokens to share"),
        (Move(0, 1, 0, 0), "slot 1, which is empty"),
        (Swap(0, 0, 1), "slot 1, which is empty"),
        (Store(0, 0, entry=1, length=4), "fewer than the 4 tokens to keep"),
        (Evict(entry=9), "entry 9 is not here"),
        (Free(0, 1), "slot 1, which is empty"),
    ],
)
def test_an_operation_that_does_not_fit_is_a_desync(op, words):
    with pytest.raises(Desync, match=words):
        one_row().begin(Step(2, (), (op,), (), digest=0))


def test_commits_and_forwards_must_mean_the_rows_that_are_there():
    seq = Sequence(7, make_request("a", [1, 2, 3]), now=0.0)
    with pytest.raises(Desync, match="has 0 computed positions here, 2 in the plan"):
        one_row().begin(Step(2, (commit_chunk(seq, 0, 2),), (), (), digest=0))
    with pytest.raises(Desync, match="sequence 8, which has no row"):
        one_row().begin(Step(2, (commit_chunk(Sequence(8, seq.request, 0.0), 0, 2),), (), (), digest=0))
    with pytest.raises(Desync, match="means sequence 8, the row holds sequence 7"):
        one_row().lengths(Forward(0, 0, (8,), ((1,),), (1,), sample=True))
    with pytest.raises(Desync, match="step 3 follows step 1"):
        one_row().begin(Step(3, (), (), (), digest=0))
