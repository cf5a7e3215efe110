"""The queue: its bound, its turns, and when a place will be free."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import run_machine

from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.fair_queue import DrainRate, FairQueue


def ask(owner: str, give_up_at: float = 100.0) -> DispatchRequest:
    return DispatchRequest(owner, None, give_up_at)


def filled(capacity: int, owners: str) -> FairQueue[DispatchRequest]:
    queue: FairQueue[DispatchRequest] = FairQueue(capacity)
    for owner in owners:
        assert queue.add(ask(owner)) is None
    return queue


def order(queue: FairQueue[DispatchRequest]) -> str:
    taken = []
    while (entry := queue.take(lambda _: True)) is not None:
        taken.append(entry.owner)
    return "".join(taken)


def test_owners_take_turns():
    assert order(filled(8, "aaaabbc")) == "abcabaa"


def test_an_owner_that_comes_back_waits_for_its_turn():
    queue = filled(8, "aab")
    assert queue.take(lambda _: True).owner == "a"
    queue.add(ask("c"))
    assert order(queue) == "bac"


def test_what_cannot_go_is_passed_over():
    queue = filled(8, "ab")
    assert queue.take(lambda entry: entry.owner == "b").owner == "b"
    assert queue.take(lambda entry: entry.owner == "b") is None
    assert len(queue) == 1


def test_a_full_queue_refuses_the_greediest():
    queue = filled(4, "aaaa")
    again = ask("a")
    assert queue.add(again) is again
    newest = list(queue)[-1]
    assert queue.add(ask("b")) is newest
    assert queue.add(ask("b")).owner == "a"
    third = ask("b")
    assert queue.add(third) is third  # two each
    assert len(queue) == 4


def test_without_room_nothing_waits():
    queue: FairQueue[DispatchRequest] = FairQueue(0)
    alone = ask("a")
    assert queue.add(alone) is alone


def test_a_greedy_key_gets_no_more_than_its_share():
    """One key always has ten waiting, another one or two; the places go to both alike."""
    queue: FairQueue[DispatchRequest] = FairQueue(12)
    served: Counter[str] = Counter()
    for _ in range(1000):
        waiting = Counter(entry.owner for entry in queue)
        for _ in range(10 - waiting["greedy"]):
            queue.add(ask("greedy"))
        for _ in range(2 - waiting["modest"]):
            queue.add(ask("modest"))
        served[queue.take(lambda _: True).owner] += 1
    assert served == {"greedy": 500, "modest": 500}


class AnyOrder(RuleBasedStateMachine):
    """Against a plain list, and what has to hold between owners."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[DispatchRequest] = FairQueue(6)
        self.waiting: list[DispatchRequest] = []
        self.now = 0.0

    @rule(owner=st.sampled_from("abc"), wait_s=st.sampled_from([1.0, 5.0, 50.0]))
    def add(self, owner: str, wait_s: float) -> None:
        entry = ask(owner, self.now + wait_s)
        before = Counter(other.owner for other in self.waiting)
        out = self.queue.add(entry)
        if out is not entry:
            self.waiting.append(entry)
        if out is None:
            return
        assert len(self.waiting) >= 6
        if out is entry:
            assert max(before.values()) <= before[owner] + 1
        else:
            assert before[out.owner] == max(before.values()) > before[owner] + 1
            assert out is [other for other in self.waiting if other.owner == out.owner][-1]
            self.waiting.remove(out)

    @rule(able=st.sets(st.sampled_from("abc")))
    def take(self, able: set[str]) -> None:
        entry = self.queue.take(lambda entry: entry.owner in able)
        possible = [other for other in self.waiting if other.owner in able]
        assert (entry is None) == (not possible)
        if entry is not None:
            assert entry is next(other for other in possible if other.owner == entry.owner)  # the owner's oldest
            self.waiting.remove(entry)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(entry) and not self.queue.remove(entry)
        self.waiting.remove(entry)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        overdue = self.queue.take_overdue(self.now)
        assert set(overdue) == {entry for entry in self.waiting if entry.give_up_at <= self.now}
        self.waiting = [entry for entry in self.waiting if entry not in overdue]

    @invariant()
    def same(self) -> None:
        assert len(self.queue) == len(self.waiting) <= 6
        assert set(self.queue) == set(self.waiting)


@pytest.mark.grows
def test_any_order_of_arrivals():
    run_machine(AnyOrder, usual=60, soak=2000)


def test_the_wait_follows_from_the_rate_of_the_last_places():
    rate = DrainRate()
    assert rate.seconds_until(5, 0.0) == DrainRate.MIN_S
    for at in range(11):
        rate.note(at * 2.0)
    assert rate.seconds_until(5, 22.0) == 10.0  # a place each two seconds
    assert rate.seconds_until(100, 22.0) == DrainRate.MAX_S
    assert rate.seconds_until(1, 500.0) > 40.0  # and nothing since
