"""Dispatch: any order of events keeps its promises, and 64 simulated replicas are kept equally busy."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import SOAK, examples, run_machine

from phalanx.errors import NoReplica, PhalanxError, QueueFull, UnknownModel
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Dispatcher, Grant
from phalanx.gateway.dispatch.policies import LeastLoad, PowerOfTwo
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthReport, HealthRules, ReplicaLoad
from phalanx.gateway.settings.replicas_file import ReplicaSpec

MODELS = {"a": frozenset({"m", "n"}), "b": frozenset({"m"}), "c": None}
DETERMINISM_KEYS = {"a": "n1", "b": "n2", "c": ""}


def replica(name: str, limit: int = 2, models: frozenset[str] | None = None, determinism_key: str = "") -> Replica:
    """Without a determinism key its streams cannot go on elsewhere, nor others' on it."""
    spec = ReplicaSpec(name=name, url=f"http://{name}", admin_key="k")
    found = Replica(spec, HealthRules(2, 1), BreakerRules(failures=2, successes=1, open_s=5.0))
    found.health.note(Check(ok=True, report=HealthReport(ReplicaLoad(0, 0, limit), determinism_key)), 0.0, 0.0)
    found.models = models
    return found


def dispatcher(*replicas: Replica, queue: int = 4) -> Dispatcher:
    found = Dispatcher(LeastLoad(), queue_size=queue)
    for one in replicas:
        found.add(one)
    return found


def ask(owner: str = "", model: str | None = "m", give_up_at: float = 60.0, rows: int = 1) -> DispatchRequest:
    return DispatchRequest(owner, model, give_up_at, rows=rows)


def begun(determinism_key: str = "n1", owner: str = "", tried: str = "", refused: str = "") -> DispatchRequest:
    """A request whose stream has begun at a server with this determinism key, and lost it."""
    found = ask(owner)
    found.determinism_key, found.tried, found.refused = determinism_key, set(tried), set(refused)
    return found


def fail(found: Dispatcher, grant: Grant, now: float) -> None:
    """An attempt fails, and its request is not the cause."""
    found.end(grant, "failed", now)
    found.blame(grant, now)


def test_a_request_waits_for_a_place_and_gets_the_first_that_is_free():
    found = dispatcher(replica("a", 1))
    first = found.arrive(ask(), 0.0)
    waiting = ask()
    assert isinstance(first, Grant) and found.arrive(waiting, 0.0) is None
    assert list(found.decided(1.0)) == []
    found.end(first, "answered", 1.0)
    ((who, grant),) = found.decided(1.0)
    assert who is waiting and isinstance(grant, Grant) and grant.replica.name == "a"


def test_beyond_the_queue_a_request_is_refused_with_the_time_that_places_take():
    found = dispatcher(replica("a", 1), queue=1)
    grant = found.arrive(ask(), 0.0)
    for at in range(10):
        found.end(grant, "answered", at * 4.0)
        grant = found.arrive(ask(), at * 4.0)
    found.arrive(ask(), 40.0)
    with pytest.raises(QueueFull) as refused:
        found.arrive(ask(), 40.0)
    assert refused.value.retry_after == pytest.approx(8.0)


def test_all_down_names_each_with_its_reason():
    down, drained = replica("a"), replica("b")
    for at in (1.0, 2.0):
        down.health.note(Check(ok=False, reason="answers 503 to /health: no memory"), at, at)
    drained.is_draining = True
    with pytest.raises(NoReplica, match=r"a: answers 503 to /health: no memory; b: is being drained"):
        dispatcher(down, drained).arrive(ask(), 3.0)
    with pytest.raises(NoReplica, match="there is none"):
        dispatcher().arrive(ask(), 0.0)


def test_a_model_that_is_served_nowhere_is_unknown_and_one_that_is_down_is_not():
    found = dispatcher(replica("a", models=MODELS["a"]), replica("b", models=MODELS["b"]))
    with pytest.raises(UnknownModel, match="Served are: m, n"):
        found.arrive(ask(model="x"), 0.0)
    many = dispatcher(replica("c", models=frozenset(f"m{i:03}" for i in range(100))))
    with pytest.raises(UnknownModel, match=r"m018, m019 and 80 more \(/v1/models\)\.$"):
        many.arrive(ask(model="x"), 0.0)
    found.replicas["a"].is_draining = True
    with pytest.raises(NoReplica, match="a: is being drained"):
        found.arrive(ask(model="n"), 0.0)


def test_a_request_goes_to_no_replica_that_has_failed_it():
    found = dispatcher(replica("a"), replica("b"))
    again = ask()
    again.tried.add("a")
    assert {found.arrive(again, 0.0).replica.name for _ in range(2)} == {"b"}
    assert found.has_untried(again, 0.0)
    again.tried.add("b")
    assert not found.has_untried(again, 0.0)
    with pytest.raises(NoReplica, match="a: has failed this request; b: has failed this request"):
        found.arrive(again, 0.0)


def test_what_waits_is_told_when_the_last_replica_goes():
    found = dispatcher(replica("a", 1))
    found.arrive(ask(), 0.0)
    waiting = ask()
    found.arrive(waiting, 0.0)
    found.remove("a")
    ((who, error),) = found.decided(1.0)
    assert who is waiting and isinstance(error, NoReplica)


def test_a_half_open_circuit_lets_one_request_pass():
    found = dispatcher(replica("a", 4))
    for _ in range(2):
        fail(found, found.arrive(ask(), 0.0), 0.0)
    with pytest.raises(NoReplica, match="failed 2 requests in a row and gets none for another 4 s"):
        found.arrive(ask(), 1.0)
    trial = found.arrive(ask(), 5.0)
    with pytest.raises(NoReplica, match="on trial"):
        found.arrive(ask(), 5.0)
    found.end(trial, "answered", 6.0)
    assert found.arrive(ask(), 6.0) is not None


def test_a_full_replica_gets_no_trial():
    found = dispatcher(replica("a", 2))
    grants = [found.arrive(ask(), 0.0) for _ in range(2)]
    for _ in range(2):
        found.replicas["a"].breaker.fail(False, 0.0)
    with pytest.raises(NoReplica, match="failed 2 requests in a row"):
        found.arrive(ask(), 1.0)
    waiting = ask()
    assert found.arrive(waiting, 5.0) is None and list(found.decided(5.0)) == []
    found.end(grants[0], "cancelled", 6.0)
    ((who, grant),) = found.decided(6.0)
    assert who is waiting and grant.trial


def test_a_crash_under_many_requests_is_one_failure_and_the_replica_is_avoided_until_its_next_check():
    found = dispatcher(replica("a", 4), replica("b", 4))
    grants = [found.arrive(ask(), 0.0) for _ in range(6)]
    for grant in grants:
        if grant.replica.name == "a":
            fail(found, grant, 1.0)
    a = found.replicas["a"]
    assert a.breaker.is_closed and a.is_available(1.0) and a.is_degraded
    assert found.arrive(ask(), 1.0).replica.name == "b"  # though a has nothing to do
    assert found.arrive(ask(), 1.0).replica.name == "a"  # b is full
    a.is_suspect = False
    assert found.arrive(ask(), 1.0).replica.name == "a"


def test_what_a_request_may_have_caused_counts_once_it_was_not_the_cause():
    found = dispatcher(replica("a", 4))
    a, grants = found.replicas["a"], []
    for _ in range(9):
        grants.append(found.arrive(ask(), 0.0))
        found.end(grants[-1], "failed", 0.0)
    assert a.breaker.is_closed and not a.is_degraded
    found.blame(grants[-1], 1.0)
    assert a.breaker.is_closed and a.is_degraded
    late = found.arrive(ask(), 1.0)
    found.end(late, "failed", 1.0)
    found.blame(late, 1.0)
    assert not a.breaker.is_closed
    trial = found.arrive(ask(), 6.0)
    found.end(trial, "failed", 6.0)  # which leaves the next one its trial
    assert found.arrive(ask(), 6.0).trial
    found.blame(trial, 6.0)
    assert not a.breaker.allows(10.9)


def test_a_begun_stream_goes_where_it_can_go_on_and_rather_where_tokens_are_the_same():
    found = dispatcher(replica("a", 1), replica("b", 1, determinism_key="n2"), replica("c", 1, determinism_key="n1"))
    assert [found.arrive(begun("n1"), 0.0).replica.name for _ in range(2)] == ["c", "b"]
    assert found.arrive(begun("n1"), 0.0) is None  # though a has nothing to do
    key = found.replicas["c"].spec.admin_key
    found.replicas["c"].refused_key = key
    assert not found.replicas["c"].can_migrate


def test_a_begun_stream_needs_no_room_to_wait_and_goes_first():
    found = dispatcher(replica("a", 1, determinism_key="n1"), queue=1)
    running = found.arrive(ask(), 0.0)
    asked = ask()
    found.arrive(asked, 0.0)
    streams = [begun(), begun()]
    assert [found.arrive(one, 0.0) for one in streams] == [None, None] and found.n_waiting == 3
    with pytest.raises(QueueFull):
        found.arrive(ask(), 0.0)
    for expected in (*streams, asked):
        found.end(running, "answered", 1.0)
        ((who, running),) = found.decided(1.0)
        assert who is expected and isinstance(running, Grant)


def test_a_begun_stream_waits_for_a_replica_that_has_failed_it_until_its_next_good_check():
    found = dispatcher(replica("a", determinism_key="n1"))
    found.end(found.arrive(ask(), 0.0), "failed", 0.0)
    waiting = begun(tried="a")
    assert found.arrive(waiting, 0.0) is None and list(found.decided(1.0)) == []
    found.replicas["a"].needs_check = False
    ((who, grant),) = found.decided(2.0)
    assert who is waiting and isinstance(grant, Grant)


def test_a_begun_stream_waits_while_all_are_down_and_then_gives_up_with_the_reason_of_each():
    found = dispatcher(replica("a", determinism_key="n1"), replica("b"))
    for at in (1.0, 2.0):
        found.replicas["a"].health.note(Check(ok=False, reason="cannot be reached"), at, at)
    waiting = begun()
    assert found.arrive(waiting, 3.0) is None and list(found.decided(59.0)) == []
    ((who, error),) = found.decided(61.0)
    assert who is waiting and isinstance(error, NoReplica)
    assert "a: cannot be reached; b: cannot continue the stream" in str(error)


def test_a_begun_stream_that_no_replica_takes_does_not_wait():
    found = dispatcher(replica("a", determinism_key="n1"), replica("b"))
    with pytest.raises(NoReplica, match="a: cannot continue the stream; b: cannot continue the stream"):
        found.arrive(begun(refused="a"), 0.0)
    full = dispatcher(replica("a", 1, determinism_key="n1"))
    full.arrive(ask(), 0.0)
    waiting = begun()
    full.arrive(waiting, 0.0)
    full.remove("a")
    ((who, error),) = full.decided(1.0)
    assert who is waiting and isinstance(error, NoReplica)


def test_a_second_place_is_where_tokens_are_the_same_and_nothing_is_in_doubt():
    found = dispatcher(*(replica(name, 1, determinism_key="n2" if name == "c" else "n1") for name in "abcd"))
    a, b, _, d = found.replicas.values()
    found.arrive(ask(), 0.0)  # a's
    b.is_suspect = True
    stream = begun("n1", refused="d")
    assert found.elsewhere(stream, a, 0.0) is None and found.n_waiting == 0
    stream.refused.clear()
    second = found.elsewhere(stream, a, 0.0)
    assert second is not None and second.replica is d and d.in_flight == 1
    assert found.elsewhere(stream, a, 0.0) is None  # d is full
    b.is_suspect = False
    stream.tried.add("b")
    b.needs_check = True  # b failed it after its last good check
    assert found.elsewhere(stream, a, 0.0) is None
    b.needs_check = False
    assert found.elsewhere(stream, a, 0.0).replica is b


def test_a_second_place_of_a_request_that_has_not_begun_is_one_that_has_not_failed_it():
    found = dispatcher(*(replica(name, 2) for name in "abc"))
    one = ask()
    first = found.arrive(one, 0.0)
    one.tried.add("b")
    assert first.replica.name == "a" and found.elsewhere(one, first.replica, 0.0).replica.name == "c"
    one.tried.add("c")
    assert found.elsewhere(one, first.replica, 0.0) is None


def test_a_second_place_has_room_for_every_row():
    """Else some would wait there behind others', while their own server comes back. An empty one is as good as any."""
    found = dispatcher(*(replica(name, 3) for name in "ab"))
    a, b = found.replicas.values()
    two, wide = found.arrive(ask(rows=2), 0.0), ask(rows=2)
    assert two.replica is a and a.in_flight == 2 and a.has_room
    assert found.elsewhere(wide, b, 0.0) is None
    found.end(two, "answered", 1.0)
    assert a.in_flight == 0 and found.elsewhere(wide, b, 1.0).replica is a
    assert found.elsewhere(ask(rows=9), a, 1.0).replica is b and b.in_flight == 9


class AnyOrder(RuleBasedStateMachine):
    """Requests and replicas come, go and fail in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.found = dispatcher(*(replica(name, 2, MODELS[name], DETERMINISM_KEYS[name]) for name in "abc"), queue=3)
        self.waiting: list[DispatchRequest] = []  # in order: an example that is run again draws the same ones
        self.granted: list[Grant] = []
        self.unexplained: list[Grant] = []  # of attempts that failed, and nobody is blamed yet
        self.gone: list[Replica] = []

    def settle(self) -> None:
        for who, decision in self.found.decided(self.now):
            self.waiting.remove(who)
            if isinstance(decision, Grant):
                self.take(decision)
                self.assert_least_busy(decision)
            else:
                assert isinstance(decision, PhalanxError)

    def ready(self, one: DispatchRequest) -> list[Replica]:
        """The replicas with room that a request which has not begun may get now."""
        return [
            other
            for other in self.found.replicas.values()
            if other.serves(one.model) and other.is_available(self.now) and other.has_room
            if other.name not in one.tried
        ]

    def assert_least_busy(self, grant: Grant) -> None:
        """No other replica would have been better when this one was granted."""
        chosen, one = grant.replica, grant.request
        before = chosen.is_degraded, (chosen.busy - one.rows) / (chosen.limit * chosen.spec.weight)
        if not one.is_begun:
            assert all(before <= (other.is_degraded, other.load) for other in self.ready(one) if other is not chosen)

    def take(self, grant: Grant) -> None:
        one = grant.request
        assert grant.replica.serves(one.model) and grant.replica.name not in one.refused
        assert grant.replica.name not in one.tried or (one.is_begun and not grant.replica.needs_check)
        assert grant.replica.name != "c" or not one.is_begun  # which has no determinism_key
        assert not grant.replica.is_draining and grant.replica.health.state == "up"
        self.granted.append(grant)

    @rule(
        owner=st.sampled_from("xyz"),
        model=st.sampled_from(["m", "n", "o", None]),
        tried=st.sets(st.sampled_from("abc")),
        refused=st.sets(st.sampled_from("abc")),
        determinism_key=st.sampled_from([None, "n1", "n2"]),
        rows=st.integers(1, 3),
    )
    def arrive(
        self, owner: str, model: str | None, tried: set[str], refused: set[str], determinism_key: str | None, rows: int
    ) -> None:
        one = ask(owner, model, self.now + 20.0, rows)
        one.tried, one.determinism_key = tried, determinism_key
        one.refused = refused if determinism_key is not None else set()
        try:
            grant = self.found.arrive(one, self.now)
        except QueueFull:
            assert len(self.found.queue) == 3 and not one.is_begun
        except (NoReplica, UnknownModel):
            pass
        else:
            if grant is None:
                self.waiting.append(one)
            else:
                self.take(grant)
                self.assert_least_busy(grant)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), verdict=st.sampled_from(["answered", "failed", "cancelled"]))
    def end(self, data: st.DataObject, verdict: str) -> None:
        grant = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        before = grant.replica.is_suspect, grant.replica.breaker.is_closed
        self.found.end(grant, verdict, self.now)
        assert verdict == "answered" or before == (grant.replica.is_suspect, grant.replica.breaker.is_closed)
        self.unexplained += [grant] if verdict == "failed" else []
        self.settle()

    @precondition(lambda self: self.unexplained)
    @rule(data=st.data())
    def blame(self, data: st.DataObject) -> None:
        self.found.blame(self.unexplained.pop(data.draw(st.integers(0, len(self.unexplained) - 1))), self.now)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def elsewhere(self, data: st.DataObject) -> None:
        first = self.granted[data.draw(st.integers(0, len(self.granted) - 1))]
        second = self.found.elsewhere(first.request, first.replica, self.now)
        if second is not None:
            assert second.replica is not first.replica and not second.replica.is_degraded
            assert not first.request.is_begun or second.replica.health.determinism_key == first.request.determinism_key
            assert second.replica.in_flight <= max(second.replica.limit, first.request.rows)
            self.take(second)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        self.found.withdraw(one)
        self.waiting.remove(one)

    @rule(name=st.sampled_from("abc"), ok=st.booleans())
    def check(self, name: str, ok: bool) -> None:
        if name in self.found.replicas:
            report = HealthReport(ReplicaLoad(0, 0, 2), DETERMINISM_KEYS[name])
            self.found.replicas[name].health.note(Check(ok=ok, report=report), self.now, self.now)
            self.found.replicas[name].is_suspect &= not ok
            self.found.replicas[name].needs_check &= not ok
        self.settle()

    @rule(name=st.sampled_from("abc"), draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        if name in self.found.replicas:
            self.found.replicas[name].is_draining = draining
        self.settle()

    @rule(name=st.sampled_from("abc"))
    def come_or_go(self, name: str) -> None:
        if name in self.found.replicas:
            self.gone.append(self.found.remove(name))
        else:
            self.found.add(replica(name, 2, MODELS[name], DETERMINISM_KEYS[name]))
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @invariant()
    def promises(self) -> None:
        assert len(self.found.queue) <= 3 and self.found.n_waiting == len(self.waiting)
        assert {*self.found.queue, *self.found.begun} == {*self.waiting}
        assert all(one.is_begun for one in self.found.begun) and not any(one.is_begun for one in self.found.queue)
        for one in (*self.found.replicas.values(), *self.gone):
            rows = [grant.request.rows for grant in self.granted if grant.replica is one]
            assert one.in_flight == sum(rows) < one.limit + max(rows, default=1)
        assert list(self.found.decided(self.now)) == []
        for one in self.waiting:
            assert one.give_up_at > self.now and (one.is_begun or not self.ready(one))


def test_every_kind_of_waiting_request_looks_at_the_replicas_with_room_only(monkeypatch):
    """64 busy replicas serve any model, and each of 200 waiting requests wants another one."""
    found = dispatcher(*(replica(f"r{i}", 1) for i in range(64)), queue=200)
    grants = [found.arrive(ask(), 0.0) for _ in range(64)]
    waiting = [ask(model=f"m{i}") for i in range(200)]
    assert all(grants) and [found.arrive(one, 0.0) for one in waiting] == [None] * 200
    looks = 0

    def looked(self: Replica) -> bool:
        nonlocal looks
        looks += 1
        return self.in_flight < self.limit

    monkeypatch.setattr(Replica, "has_room", property(looked))
    found.end(grants[7], "answered", 1.0)
    ((request, grant),) = found.decided(1.0)
    assert request is waiting[0] and grant.replica.name == "r7"
    assert looks <= 2 * 64  # for the place that is free, and for none after it


@pytest.mark.grows
def test_any_order_of_events():
    run_machine(AnyOrder, usual=60, soak=3000)


@pytest.mark.grows
@pytest.mark.parametrize(
    "policy", [LeastLoad(), PowerOfTwo(random.Random(1).randrange)], ids=["least_load", "power_of_two"]
)
def test_64_replicas_are_kept_equally_busy(policy):
    """Requests arrive at 80 % of what all replicas together can do, in simulated time."""
    n_replicas, limit, n_requests = 64, 16, 100_000 if SOAK else 3000
    draw = random.Random(7)
    found = Dispatcher(policy, queue_size=32)
    for i in range(n_replicas):
        found.add(replica(f"r{i}", limit))
    ends: list[tuple[float, int, Grant]] = []
    now, most, refused = 0.0, 0, 0
    rate = 0.8 * n_replicas * limit  # a second each, on average
    for n in range(n_requests):
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            at, _, grant = heapq.heappop(ends)
            found.end(grant, "answered", at)
        grant = found.arrive(ask(f"key {n % 3}"), now)
        refused += grant is None
        if grant is not None:
            heapq.heappush(ends, (now + draw.expovariate(1.0), n, grant))
        most = max(most, len(ends))
    loads = [one.in_flight for one in found.replicas.values()]
    assert sum(loads) == len(ends) and max(loads) <= limit
    spread = max(loads) - min(loads)
    assert refused == 0 and spread <= (2 if isinstance(policy, LeastLoad) else 8)


@examples(10, soak=500)
@given(
    seed=st.integers(0, 1000),
    n_keys=st.integers(2, 6),
    greedy=st.integers(2, 10),
    n_replicas=st.integers(1, 5),
    queue=st.integers(12, 40),
)
def test_keys_share_places_fairly_beside_a_greedy_one(seed, n_keys, greedy, n_replicas, queue):
    """Each key always has a request waiting, and one of them sends many more; the places go to all alike."""
    draw = random.Random(seed)
    found = dispatcher(*(replica(f"r{i}") for i in range(n_replicas)), queue=queue)
    keys = [f"key {i}" for i in range(n_keys)]
    granted: Counter[str] = Counter()
    under_way: list[Grant] = []

    def take_in() -> None:
        for _, decision in found.decided(0.0):
            if isinstance(decision, Grant):
                under_way.append(decision)
                granted[decision.request.owner] += 1

    for _ in range(60 * n_keys):  # places that become free
        waiting = {one.owner for one in found.queue}
        for owner in [keys[0]] * greedy + [key for key in keys if key not in waiting or draw.random() < 0.1]:
            with suppress(QueueFull):
                if (grant := found.arrive(ask(owner), 0.0)) is not None:
                    under_way.append(grant)
            take_in()
            assert len(found.queue) <= queue
        found.end(under_way.pop(draw.randrange(len(under_way))), "answered", 0.0)
        take_in()
    assert all(abs(granted[key] / granted.total() * n_keys - 1.0) <= 0.1 for key in keys), granted
