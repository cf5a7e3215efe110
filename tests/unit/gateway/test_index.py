"""The index chooses as the plain rule does, whatever has happened to the replicas."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import run_machine

from phalanx.gateway.breaker import BreakerRules
from phalanx.gateway.dispatch_request import DispatchRequest
from phalanx.gateway.health import Check, HealthRules, Load, Report
from phalanx.gateway.index import SPARE, ReplicaIndex
from phalanx.gateway.policies import Listed, by_load
from phalanx.gateway.replica import Replica
from phalanx.gateway.replicas_file import ReplicaSpec

NAMES = "abcd"
MODELS = (None, frozenset({"m"}), frozenset({"m", "n"}), frozenset({"n:latest"}))
ASKED = (None, "m", "n", "m:latest", "o")
TRIED = tuple(frozenset(some) for some in chain.from_iterable(combinations(NAMES, n) for n in range(3)))


def spec(name: str, weight: float = 1.0, most: int | None = None) -> ReplicaSpec:
    return ReplicaSpec(name=name, url=f"http://{name}", weight=weight, max_in_flight=most)


def up(name: str, limit: int = 2) -> Replica:
    found = Replica(spec(name), HealthRules(2, 1), BreakerRules(failures=2, successes=2, open_s=5.0))
    found.health.note(Check(ok=True, report=Report(Load(0, 0, limit))), 0.0, 0.0)
    return found


class AnyOrder(RuleBasedStateMachine):
    """Replicas come, go, fill, fail and change in any order; the plain rule is asked after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.grants = 0
        self.index = ReplicaIndex(by_load)
        self.replicas: list[Replica] = []
        self.granted: list[tuple[Replica, bool]] = []
        for name in NAMES[:3]:
            self.come_or_go(name)

    def of(self, name: str) -> Replica | None:
        return next((one for one in self.replicas if one.name == name), None)

    @rule(name=st.sampled_from(NAMES))
    def come_or_go(self, name: str) -> None:
        if (found := self.of(name)) is not None:
            self.replicas.remove(found)
            self.index.drop(found)
        else:
            self.replicas.append(up(name))
            self.index.add(self.replicas[-1])

    @rule(model=st.sampled_from(ASKED), tried=st.sampled_from(TRIED))
    def grant(self, model: str | None, tried: frozenset[str]) -> None:
        ask = DispatchRequest("", model, 0.0)
        ask.tried.update(tried)
        ready = self.index.ready(ask, self.now)
        if ready is not None:
            replica = ready.first()
            self.grants += 1
            replica.last_granted = self.grants
            replica.in_flight += 1
            self.granted.append((replica, replica.breaker.begin()))
            self.index.note(replica)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), how=st.sampled_from(["succeed", "fail", "abandon"]))
    def end(self, data: st.DataObject, how: str) -> None:
        replica, trial = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        replica.in_flight -= 1
        replica.is_suspect = how == "fail"
        if how == "succeed":
            replica.breaker.succeed(trial)
        elif how == "fail":
            replica.breaker.fail(trial, self.now)
        else:
            replica.breaker.abandon(trial)
        self.index.note(replica)

    @precondition(lambda self: self.replicas)
    @rule(
        data=st.data(),
        ok=st.booleans(),
        others=st.integers(0, 3),
        limit=st.integers(1, 3),
        models=st.sampled_from(MODELS),
    )
    def check(self, data: st.DataObject, ok: bool, others: int, limit: int, models: frozenset[str] | None) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        replica.models = models
        report = Report(Load(replica.in_flight, others, limit))
        if replica.health.note(Check(ok=ok, report=report), self.now, self.now) and ok:
            replica.breaker.reset()
        replica.note_load(replica.in_flight)
        self.index.note(replica)

    @precondition(lambda self: self.replicas)
    @rule(
        data=st.data(),
        draining=st.booleans(),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        most=st.sampled_from([None, 1, 4]),
    )
    def change(self, data: st.DataObject, draining: bool, weight: float, most: int | None) -> None:
        replica = data.draw(st.sampled_from(self.replicas))
        replica.is_draining = draining
        replica.spec = spec(replica.name, weight, most)
        self.index.note(replica)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def as_the_plain_rule(self) -> None:
        for model in ASKED:
            for tried in TRIED:
                ask = DispatchRequest("", model, 0.0)
                ask.tried.update(tried)
                able = [
                    one
                    for one in self.replicas
                    if one.serves(model) and one.is_available(self.now) and one.name not in tried
                ]
                room = [one for one in able if one.has_room]
                named = {one.name: one for one in room}
                sound = {one for one in room if not one.in_doubt} or set(room)
                assert self.index.has_able(ask, self.now) == bool(able)
                ready = self.index.ready(ask, self.now)
                assert (ready is None) == (not room)
                if ready is not None:
                    assert list(ready) == room and ready.first() is Listed(room, by_load).first()
                    assert [ready.named(name) for name in NAMES] == [named.get(name) for name in NAMES]
                    pairs = [ready.two(lambda n, k=k: k % n) for k in range(len(sound))]
                    assert {first for first, _ in pairs} == sound and {len({*two}) for two in pairs} == {
                        min(2, len(sound))
                    }


@pytest.mark.grows
def test_any_order_of_changes():
    run_machine(AnyOrder, usual=25, soak=3000)


def test_a_full_replica_gets_no_trial():
    index, ask, one = ReplicaIndex(by_load), DispatchRequest("", None, 0.0), up("a", 3)
    index.add(one)
    one.in_flight = 3
    for _ in range(2):
        one.breaker.fail(one.breaker.begin(), 0.0)
    index.note(one)
    assert index.has_able(ask, 6.0) and index.ready(ask, 6.0) is None
    one.in_flight = 2
    index.note(one)
    assert index.ready(ask, 6.0) is not None and not index.has_able(ask, 1.0)


def test_a_heap_stays_as_large_as_its_replicas_need():
    index, ask = ReplicaIndex(by_load), DispatchRequest("", None, 0.0)
    replicas = [up(f"r{i}", 100) for i in range(10)]
    for one in replicas:
        index.add(one)
    for n in range(5000):
        ready = index.ready(ask, 0.0)
        assert ready is not None
        one = ready.first() if n % 3 else replicas[n % 10]
        one.in_flight = (one.in_flight + 7) % 100
        index.note(one)
        (pool,) = index._pools.values()
        assert len(pool._heap) <= 2 * len(replicas) + SPARE
    for one in replicas:
        index.drop(one)
    assert not index._pools and index.ready(ask, 0.0) is None
