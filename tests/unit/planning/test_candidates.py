"""Which plans there are for some hosts, and which of them memory allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.planning import host, shape

from phalanx.memory import GB, MachineMemory
from phalanx.planning.candidates import Candidate, PlanHost, candidates, fit_memory


def names(*args, **kwargs) -> list[str]:
    return [one.name for one in candidates(*args, **kwargs)]


def test_one_machine_has_its_ranks_only_as_many_as_asked_for():
    assert names(shape(), ["a"]) == ["one rank"]
    assert names(shape(), ["a"], ranks_here=2) == ["one rank", "tp 2", "pp 2"]


def test_several_hosts_form_groups_stages_and_replicas():
    assert names(shape(), ["a", "b"]) == ["one rank", "one rank", "tp 2", "pp 2", "2 replicas of one rank"]
    four = names(shape(), ["a", "b", "c", "d"])
    assert {"tp 2 x pp 2", "tp 4", "pp 4", "4 replicas of one rank", "2 replicas of tp 2", "pp 3"} <= set(four)
    assert "tp 3" not in four  # the model's heads cannot be divided by three


def test_what_a_model_cannot_do_is_no_plan():
    assert names(replace(shape(degrees=(1,)), unsplit="no recipe"), ["a", "b"])[2:] == [
        "pp 2",
        "2 replicas of one rank",
    ]
    assert "pp 2" not in names(replace(shape(), uncut="it has no layers"), ["a", "b"])
    assert "pp 4" not in names(shape(layers=3), list("abcd"))


def test_the_server_holds_its_tokenizer_besides():
    fits = [
        fit_memory(replace(shape(), tokenizer_bytes=size), Candidate(hosts=("a",)), {"a": host()})
        for size in (0, 1 << 20)
    ]
    small, large = (fit.ranks[0] for fit in fits)
    assert large.process == small.process + (22 << 20) and large.kv < small.kv


@given(st.integers(1, 6), st.integers(1, 4))
def test_every_rank_has_a_host_and_no_host_two_ranks_where_there_are_several(n_hosts: int, here: int):
    hosts = list("abcdef"[:n_hosts])
    for one in candidates(shape(), hosts, ranks_here=here):
        assert len(one.hosts) == one.size * one.replicas
        assert one.ranks_here == 1 or n_hosts == 1
        assert set(one.hosts) <= set(hosts)


def test_flags_say_how_to_start_a_plan():
    assert Candidate(stages=2, width=2, hosts=tuple("abcd")).flags == "--tp 2 --pp 2"
    assert Candidate(replicas=2, hosts=("a", "b")).flags == "--replicas 2"
    assert Candidate(hosts=("a",)).flags == "--tp 1"


# Memory ----------------------------------------------------------------------------------------------------------


def fit(candidate: Candidate, *hosts, **kwargs):
    return fit_memory(kwargs.pop("model", shape()), candidate, {one.name: one for one in hosts}, **kwargs)


def test_a_model_that_one_host_has_no_room_for_fits_on_two():
    small = [host("a", 10.0), host("b", 10.0)]
    alone = fit(Candidate(hosts=("a",)), *small)
    assert "does not fit: a lacks" in alone.problem
    shared = fit(Candidate(width=2, hosts=("a", "b")), *small)
    assert shared.problem == "" and shared.context > 0
    assert [rank.weights for rank in shared.ranks] == [4 * GB + GB // 2] * 2
    staged = fit(Candidate(stages=2, hosts=("a", "b")), *small)
    assert staged.problem == "" and sum(staged.split) == 8


def test_stages_keep_only_what_they_read():
    found = fit(Candidate(stages=2, hosts=("a", "b")), host("a"), host("b"))
    whole = fit(Candidate(hosts=("a",)), host("a"))
    assert sum(rank.weights for rank in found.ranks) == whole.ranks[0].weights
    assert found.ranks[0].layers[1] == 8  # rank 0 is in the stage with the head


def test_ranks_of_one_machine_share_its_memory():
    one = fit(Candidate(hosts=("a",)), host())
    two = fit(Candidate(width=2, hosts=("a", "a")), host())
    assert sum(rank.kv for rank in two.ranks) <= one.ranks[0].kv


@given(st.floats(6.0, 200.0), st.floats(0.0, 8.0), st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 1), (2, 2)]))
def test_what_fits_leaves_the_guard_free_and_holds_a_row_of_its_context(free: float, guard: float, grid):
    stages, width = grid
    names = tuple("abcd"[: stages * width])
    model = shape()
    found = fit_memory(
        model, Candidate(stages=stages, width=width, hosts=names), {name: host(name, free, guard) for name in names}
    )
    if found.problem:
        return
    for rank in found.ranks:
        assert rank.weights + rank.kv + rank.prefixes <= (free - guard) * GB
        own = model.share(width).kv_token_bytes[rank.layers[0] : rank.layers[1]]
        assert rank.kv >= found.context * sum(own) // 1
    assert found.rows >= 1 or found.context < 256


def test_rows_are_counted_in_pages():
    arenas = fit(Candidate(hosts=("a",)), host("a", 16.0), model=replace(shape(), max_len=300))
    pages = fit(Candidate(hosts=("a",)), host("a", 16.0), model=replace(shape(), max_len=300, page_tokens=64))
    assert (arenas.context, pages.context) == (300, 300)
    assert arenas.rows == arenas.ranks[0].kv // (512 * 8 * 1024)
    assert pages.rows == pages.ranks[0].kv // (320 * 8 * 1024)


@pytest.mark.parametrize(("kind", "taken"), [("host", 264), ("metal", 264), ("cuda", 0)])
def test_processes_take_memory_before_the_model_does(kind: str, taken: int):
    machine = MachineMemory(total=64 * GB, available=20 * GB, kind=kind)
    found = fit(Candidate(width=2, hosts=("a", "a")), PlanHost(name="a", memory=machine, guard=0))
    assert [rank.process >> 20 for rank in found.ranks] == [184, 80]
    left = 20 * GB - (taken << 20) - 2 * (4 * GB + GB // 2)
    assert [rank.kv for rank in found.ranks] == [int(left // 2 * 0.6)] * 2


def test_more_memory_never_makes_the_context_shorter():
    contexts = [fit(Candidate(hosts=("a",)), host("a", free)).context for free in (13.0, 14.0, 20.0, 64.0)]
    assert contexts == sorted(contexts) and contexts[0] < contexts[-1] == 32768


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does():
    large = shape(kv=1 << 18)
    longest = fit(Candidate(hosts=("a",)), host("a", 16.0), model=large).context
    assert 0 < longest < 32768
    beyond = fit(Candidate(hosts=("a",)), host("a", 16.0), model=large, max_len=longest + 1)
    assert f"one of {longest:,} does" in beyond.problem
    assert fit(Candidate(hosts=("a",)), host("a", 16.0), model=large, max_len=longest).problem == ""


def test_a_context_beyond_the_models_own_is_refused():
    assert fit(Candidate(hosts=("a",)), host("a"), max_len=32769).problem == "the model's own context is 32,768 tokens"


@pytest.mark.parametrize("kv_gb", [0.0, 1.0])
def test_a_kv_budget_counts(kv_gb: float):
    found = fit(Candidate(hosts=("a",)), host(), kv_gb=kv_gb)
    assert ("smaller than one short row" in found.problem) if not kv_gb else found.ranks[0].kv == GB


def test_replicas_fit_only_if_each_does():
    candidate = Candidate(replicas=2, hosts=("a", "b"))
    assert fit(candidate, host("a"), host("b")).rows == 2 * fit(Candidate(hosts=("a",)), host("a")).rows
    found = fit(candidate, host("a"), host("b", 6.0))
    assert "b lacks" in found.problem and found.candidate == candidate
