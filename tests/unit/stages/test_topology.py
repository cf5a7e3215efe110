"""Ranks and places are one to one, and layers are shared out as well as trying every split would (P1, P4)."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from phalanx.dist.topology import LayerCost, Parts, PipelinePosition, Room, Topology, split_layers
from phalanx.errors import ConfigError, MemoryShortage
from phalanx.memory import GB

widths = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


@given(widths)
def test_every_rank_has_one_place(widths: tuple[int, ...]):
    topology = Topology(widths)
    places = [PipelinePosition(stage, tp_rank) for stage, width in enumerate(widths) for tp_rank in range(width)]
    assert sorted(map(topology.rank, places)) == list(range(topology.size))
    assert [topology.place(topology.rank(place)) for place in places] == places
    assert [topology.ranks(stage)[place] for stage, place in places] == list(map(topology.rank, places))
    with pytest.raises(ValueError, match=f"rank {topology.size} "):
        topology.place(topology.size)


@given(widths)
def test_the_leader_has_the_logits_and_is_on_the_first_host(widths: tuple[int, ...]):
    assert Topology(widths).place(0) == PipelinePosition(len(widths) - 1, 0)


def test_one_stage_is_a_group_as_ever():
    topology = Topology((4,))
    assert [topology.place(rank) for rank in range(4)] == [PipelinePosition(0, rank) for rank in range(4)]
    assert all(topology.sender(rank) is None and topology.receivers(rank) == () for rank in range(4))


def test_two_stages_of_four():
    topology = Topology((4, 4))
    assert list(topology.ranks(1)) == [0, 1, 2, 3] and list(topology.ranks(0)) == [4, 5, 6, 7]
    assert [topology.receivers(rank) for rank in range(4, 8)] == [(0,), (1,), (2,), (3,)]


@given(widths)
def test_every_rank_hears_from_one_rank_of_the_stage_before(widths: tuple[int, ...]):
    topology = Topology(widths)
    for rank in range(topology.size):
        stage, tp_rank = topology.place(rank)
        sender = topology.sender(rank)
        if sender is None:
            assert stage == 0
            continue
        before = topology.place(sender)
        assert before.stage == stage - 1 and rank in topology.receivers(sender)
        if tp_rank < widths[stage - 1]:
            assert before.tp_rank == tp_rank
    heard = [other for rank in range(topology.size) for other in topology.receivers(rank)]
    assert sorted(heard) == sorted(rank for stage in range(1, len(widths)) for rank in topology.ranks(stage))
    for stage in range(len(widths) - 1):
        loads = [len(topology.receivers(rank)) for rank in topology.ranks(stage)]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("widths", [(), (2, 0), (-1,)])
def test_a_stage_without_ranks_is_refused(widths: tuple[int, ...]):
    with pytest.raises(ConfigError, match="ranks cannot be formed"):
        Topology(widths)


# Layers ---------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Topology, Parts, list[Room]]:
    """Small models on unlike machines; about half of them fit."""
    topology = Topology(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))))
    time = st.integers(0, 9).map(float)
    part = st.builds(LayerCost, st.integers(0, 12), st.integers(0, 3), time, time)
    n = draw(st.integers(topology.n_stages, 8))
    parts = Parts(draw(part), tuple(draw(st.lists(part, min_size=n, max_size=n))), draw(part))
    room = st.builds(Room, st.just("h"), st.integers(0, 40), st.sampled_from((0.5, 1.0, 3.0)))
    rooms = draw(st.lists(room, min_size=topology.size, max_size=topology.size))
    return topology, parts, rooms


def judge(topology: Topology, parts: Parts, rooms: list[Room], split: tuple[range, ...]) -> tuple[bool, float, float]:
    """Whether a split fits, the time of its slowest stage for a chunk, and of all for a token; counted the long way."""
    fits, chunk, token = True, 0.0, 0.0
    for stage, layers in enumerate(split):
        has = [parts.layers[layer] for layer in layers]
        has += [parts.embedding] * (stage == 0) + [parts.head] * (stage == topology.n_stages - 1)
        width = topology.widths[stage]
        for tp_rank in range(width):
            room = rooms[topology.rank(PipelinePosition(stage, tp_rank))]
            fits &= sum(-(-part.split // width) + part.whole for part in has) <= room.bytes
        slowest = min(rooms[rank].speed for rank in topology.ranks(stage))
        chunk = max(chunk, sum(part.chunk_cost for part in has) / width / slowest)
        token += sum(part.cost for part in has) / width / slowest
    return fits, chunk, token


def every_split(n_layers: int, n_stages: int) -> list[tuple[range, ...]]:
    found = []
    for inner in combinations(range(1, n_layers), n_stages - 1):
        found.append(tuple(range(start, stop) for start, stop in pairwise([0, *inner, n_layers])))
    return found


@examples(120, soak=5000)
@given(problems())
def test_no_split_is_better(problem: tuple[Topology, Parts, list[Room]]):
    topology, parts, _ = problem
    judged = [judge(*problem, split) for split in every_split(len(parts.layers), topology.n_stages)]
    fitting = [times for fits, *times in judged if fits]
    if not fitting:
        with pytest.raises(MemoryShortage, match="h lacks"):
            split_layers(*problem)
        return
    split = split_layers(*problem)
    assert [layer for layers in split for layer in layers] == list(range(len(parts.layers)))
    fits, chunk, token = judge(*problem, split)
    fastest = min(chunk for chunk, _ in fitting)
    assert fits and chunk == pytest.approx(fastest)
    assert token == pytest.approx(min(token for chunk, token in fitting if chunk == pytest.approx(fastest)))


def model(n_layers: int, layer: int = GB, *, embedding: int = 0, head: int = 0) -> Parts:
    """A model whose cost is its bytes; the embedding is looked up and costs nothing, nor does the head for a chunk."""
    layers = (LayerCost(layer, cost=layer, chunk_cost=layer),) * n_layers
    return Parts(LayerCost(embedding), layers, LayerCost(head, cost=head))


def rooms(**gigabytes: int) -> list[Room]:
    return [Room(host, size * GB) for host, size in gigabytes.items()]


def test_equal_machines_have_equal_times():
    assert split_layers(Topology((1, 1)), model(12), rooms(a=64, b=64)) == (range(6), range(6, 12))
    assert split_layers(Topology((1, 1)), model(13), rooms(a=64, b=64)) == (range(7), range(7, 13))


def test_a_head_does_not_unbalance_prompts():
    """A token takes as long however layers are shared out, since it passes one stage after the other."""
    assert split_layers(Topology((1, 1)), model(12, head=4 * GB), rooms(a=64, b=64)) == (range(6), range(6, 12))
    assert split_layers(Topology((1, 1)), model(12, head=4 * GB), rooms(a=9, b=64)) == (range(7), range(7, 12))


def test_of_splits_that_are_as_fast_for_prompts_the_fastest_for_tokens_is_taken():
    """Of 5 layers, 3 on one host take as long for a chunk as 4 on the pair; a token is faster with more on the pair."""
    wide = Topology((2, 1))
    assert split_layers(wide, model(5), rooms(a=64, b=64, c=64)) == (range(4), range(4, 5))


def test_a_wider_stage_has_more_layers():
    assert split_layers(Topology((2, 1)), model(12), rooms(a=64, b=64, c=64)) == (range(8), range(8, 12))


def test_a_faster_machine_has_more_layers():
    fast = Room("fast", 64 * GB, speed=3.0)
    assert split_layers(Topology((1, 1)), model(12), [fast, Room("slow", 64 * GB)]) == (range(3), range(3, 12))


def test_a_small_machine_has_the_layers_that_fit():
    assert split_layers(Topology((1, 1)), model(12), rooms(a=4, b=8)) == (range(8), range(8, 12))
    assert split_layers(Topology((1, 1)), model(12, embedding=2 * GB), rooms(a=7, b=8)) == (range(6), range(6, 12))


def test_a_choice_is_taken_as_it_is():
    assert split_layers(Topology((1, 1)), model(12), rooms(a=64, b=64), (2, 10)) == (range(2), range(2, 12))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((12,), "--pp-split 12 has 1 numbers; there are 2 stages"),
        ((5, 6), "has 11 layers; the model has 12"),
        ((0, 12), "every stage needs one"),
        ((-1, 13), "every stage needs one"),
    ],
)
def test_a_choice_that_cannot_be(chosen: tuple[int, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        split_layers(Topology((1, 1)), model(12), rooms(a=64, b=64), chosen)


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match=r"--pp 3 needs a model of 3 layers at least; this one has 2\. Use --pp 2"):
        split_layers(Topology((1, 1, 1)), model(2), rooms(a=9, b=9, c=9))


def test_a_shortage_names_the_hosts_what_they_lack_and_for_what():
    said = r"b lacks 3\.00 GiB of the 8\.00 GiB for stage 0 \(layers 0 to 7\), which may have 5\.00 GiB there\."
    with pytest.raises(MemoryShortage, match=said) as of:
        split_layers(Topology((1, 1)), model(12), rooms(a=4, b=5), (8, 4))
    assert (
        "fewer layers" in of.value.remedy and "--memory-guard-gb" in of.value.remedy and "a lacks" not in str(of.value)
    )


def test_where_nothing_fits_the_least_shortage_is_named():
    with pytest.raises(MemoryShortage, match="does not fit") as caught:
        split_layers(Topology((1, 1)), model(12), rooms(a=4, b=5))
    assert sum(map(float, re.findall(r"lacks ([\d.]+) GiB", str(caught.value)))) == 12 - 9
