"""Where no plan fits, the changes with which one does: each is tried here as it would be by the user."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from support.planning import host, shape

from phalanx.memory import GB
from phalanx.planning.candidates import PlanHost, candidates, fit_memory
from phalanx.planning.nearest import nearest


def refused(hosts: Sequence[PlanHost], model=None, **wanted) -> list[str]:
    """What is suggested where nothing fits."""
    model = model or shape()
    tried = candidates(model, [one.name for one in hosts])
    assert all(fit_memory(model, one, {each.name: each for each in hosts}, **wanted).problem for one in tried)
    return nearest(model, tried, hosts, **wanted)


def fits(model, hosts: Sequence[PlanHost], **wanted) -> bool:
    found = candidates(model, [one.name for one in hosts])
    return any(not fit_memory(model, one, {each.name: each for each in hosts}, **wanted).problem for one in found)


def test_a_smaller_cache():
    (suggested, _) = refused([host("a", 14.0)], kv_gb=8.0)
    number = re.fullmatch(r"--kv-cache-gb ([\d.]+) \(one rank\)", suggested)
    assert number is not None and fits(shape(), [host("a", 14.0)], kv_gb=float(number[1]))


def test_a_larger_cache_where_it_is_smaller_than_a_row():
    assert re.fullmatch(r"--kv-cache-gb [\d.]+ \(one rank\)", refused([host()], kv_gb=0.0)[0])


def test_a_shorter_context():
    large = shape(kv=1 << 18)
    (suggested, more) = refused([host("a", 16.0)], large, max_len=32000)
    number = re.fullmatch(r"--max-model-len (\d+) \(one rank\)", suggested)
    assert number is not None and fits(large, [host("a", 16.0)], max_len=int(number[1]))
    assert not fits(large, [host("a", 16.0)], max_len=int(number[1]) + 256)
    assert re.fullmatch(r"\d+ more hosts? like a \(.*\)", more)


def test_both_flags_where_neither_alone_is_enough():
    (suggested,) = refused([host("a", 14.0)], max_len=40000, kv_gb=8.0)
    numbers = re.fullmatch(r"--kv-cache-gb ([\d.]+) --max-model-len (\d+) \(one rank\)", suggested)
    assert numbers is not None
    assert fits(shape(), [host("a", 14.0)], kv_gb=float(numbers[1]), max_len=int(numbers[2]))


def test_a_context_beyond_the_models_own_fits_on_no_number_of_hosts():
    assert refused([host()], max_len=40000) == ["--max-model-len 32768 (one rank)"]


@pytest.mark.parametrize(("free", "more"), [(10.0, 1), (9.0, 2), (6.0, 7)])
def test_the_fewest_further_hosts(free: float, more: int):
    (suggested,) = refused([host("a", free)])
    plan = re.fullmatch(r"(\d+) more hosts? like a \((?:tp|pp) .*\)", suggested)
    assert plan is not None and int(plan[1]) == more
    assert not fits(shape(), [host(f"h{i}", free) for i in range(more)])
    assert fits(shape(), [host(f"h{i}", free) for i in range(more + 1)])


def test_further_hosts_are_like_the_roomiest():
    assert refused([host("a", 4.5), host("b", 8.5)]) == ["2 more hosts like b (pp 3)"]  # a has no room for a layer


def test_nothing_where_no_number_of_hosts_is_enough():
    assert refused([host("a", 4.0)]) == []
    uncut = replace(shape(degrees=(1,), layer=4 * GB), uncut="it has no layers", unsplit="no recipe", parts=None)
    assert refused([host("a", 16.0)], uncut) == []
