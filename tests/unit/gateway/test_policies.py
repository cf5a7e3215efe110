"""Which replica a policy chooses."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.gateway.dispatch.affinity import BLOCK_BYTES, affinity_of
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.dispatch_request import Affinity, DispatchRequest
from phalanx.gateway.dispatch.policies import CacheAware, ConsistentHashing, LeastLoad, PowerOfTwo, RoundRobin
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthReport, HealthRules, ReplicaLoad
from phalanx.gateway.settings.replicas_file import ReplicaSpec

ANY = DispatchRequest("", None, 0.0)


def replica(name: str, *, limit: int = 16, weight: float = 1.0, in_flight: int = 0) -> Replica:
    found = Replica(ReplicaSpec(name=name, url=f"http://{name}", weight=weight), HealthRules(), BreakerRules())
    found.health.note(Check(ok=True, report=HealthReport(ReplicaLoad(0, 0, limit))), 0.0, 0.0)
    found.in_flight = in_flight
    return found


def grants(policy, among, requests):
    """Names of the replicas that some requests get, while none of them ends."""
    names = []
    for n, one in enumerate(requests):
        chosen = policy.choose(one, among)
        policy.granted(one, chosen)
        chosen.in_flight += 1
        chosen.last_granted = n + 1
        names.append(chosen.name)
    return names


def test_least_load_counts_against_the_limit_and_takes_turns():
    among = [replica("a", limit=2), replica("b", limit=2), replica("c", limit=4)]
    assert "".join(grants(LeastLoad(), among, [ANY] * 8)) == "abccabcc"


def test_least_load_sees_the_requests_of_others():
    busy, idle = replica("busy"), replica("idle", in_flight=2)
    busy.health.note(Check(ok=True, report=HealthReport(ReplicaLoad(5, 1, 16))), 1.0, 1.0)
    busy.note_load(own=0)
    assert LeastLoad().choose(ANY, [busy, idle]) is idle
    busy.note_load(own=6)  # they were this gateway's own
    assert LeastLoad().choose(ANY, [busy, idle]) is busy


@pytest.mark.parametrize("policy", [LeastLoad(), RoundRobin(), PowerOfTwo(lambda n: 0), ConsistentHashing()])
def test_what_is_in_doubt_comes_last(policy):
    sound, doubtful = replica("sound", in_flight=15), replica("doubtful")
    doubtful.health.note(Check(ok=False), 1.0, 1.0)
    among = [doubtful, sound]
    requests = [DispatchRequest("", None, 0.0, Affinity(f"s{i}")) for i in range(10)]
    assert {policy.choose(one, among).name for one in requests} == {"sound"}
    assert policy.choose(requests[0], [doubtful]) is doubtful


def test_round_robin_follows_weights_and_floods_no_newcomer():
    policy, among = RoundRobin(), [replica("a"), replica("b", weight=2.0)]
    assert Counter(grants(policy, among, [ANY] * 30)) == {"a": 10, "b": 20}
    among.append(replica("new"))
    assert Counter(grants(policy, among, [ANY] * 40))["new"] in (9, 10, 11)


def test_power_of_two_takes_the_better_of_two():
    among = [replica("a", in_flight=3), replica("b", in_flight=1), replica("c")]
    drawn = iter([0, 0])  # the first, and the one after it
    assert PowerOfTwo(lambda n: next(drawn)).choose(ANY, among).name == "b"
    assert PowerOfTwo(lambda n: 0).choose(ANY, among[:1]).name == "a"


def test_consistent_hashing_moves_only_what_has_to_move():
    among = [replica(name, weight=2.0 if name == "d" else 1.0) for name in "abcd"]
    policy = ConsistentHashing()
    requests = [DispatchRequest("", None, 0.0, Affinity(f"session {i}")) for i in range(2000)]
    homes = {one: policy.choose(one, among) for one in requests}
    shares = Counter(home.name for home in homes.values())
    assert all(abs(shares[name] - 2000 / 5 * (1 + (name == "d"))) < 100 for name in "abcd")
    for one, home in homes.items():
        assert (policy.choose(one, among[1:]) is home) == (home.name != "a")


# cache_aware -----------------------------------------------------------------------------------------------------


def conversation(turns: int, topic: str = "x") -> DispatchRequest:
    messages = b"[" + b",".join(f'{{"content":"{topic * 600}{turn}"}}'.encode() for turn in range(turns)) + b"]"
    return DispatchRequest("", "m", 0.0, affinity_of("", {}, None, "m", (b"", messages)))


def cache_aware(**more) -> CacheAware:
    return CacheAware(**{"threshold": 0.3, "more": 4, "times": 1.5, **more})


def test_a_conversation_stays_where_its_prefix_is():
    policy, among = cache_aware(), [replica("a"), replica("b")]
    assert grants(policy, among, [conversation(1), conversation(1, "y")]) == ["a", "b"]
    names = grants(policy, among, [conversation(n, topic) for n in (2, 3, 4) for topic in "xy"])
    assert names == ["a", "b"] * 3


def test_unless_that_replica_is_much_busier():
    policy, among = cache_aware(), [replica("a"), replica("b")]
    grants(policy, among, [conversation(1)])
    among[0].in_flight = 4
    assert policy.choose(conversation(2), among).name == "a"
    among[0].in_flight = 5
    assert policy.choose(conversation(2), among).name == "b"
    among[1].in_flight = 4  # five is not 1.5 times as many
    assert policy.choose(conversation(2), among).name == "a"


def test_a_short_common_beginning_decides_nothing():
    policy, among = cache_aware(threshold=0.5), [replica("a"), replica("b")]
    grants(policy, among, [conversation(1)])
    assert policy.choose(conversation(9), among).name == "b"


def test_a_session_is_known_by_its_name_alone():
    policy, among = cache_aware(), [replica("a"), replica("b")]
    one = DispatchRequest("", None, 0.0, Affinity("s"))
    among[0].in_flight = 1
    assert grants(policy, among, [one]) == ["b"]
    assert policy.choose(one, among).name == "b"
    policy.forget("b")
    assert policy.choose(one, among).name == "a"


def test_affinity_names_whole_blocks_and_all_before_them():
    text = bytes(range(256)) * 4
    whole = affinity_of("me", {}, None, "m", (text,)).blocks
    assert len(whole) == len(text) // BLOCK_BYTES
    assert affinity_of("me", {}, None, "m", (text + b"more",)).blocks == whole
    changed = affinity_of("me", {}, None, "m", (b"?" + text[1:],)).blocks
    assert not set(changed) & set(whole)
    for owner, model in (("me", "other"), ("you", "m"), ("", "m"), ("mem", "")):
        assert not set(affinity_of(owner, {}, None, model, (text,)).blocks) & set(whole)


@pytest.mark.parametrize(
    ("headers", "cache_key", "session"),
    [
        ({"x-session-id": "a", "x-claude-code-session-id": "b"}, "c", "me a"),
        ({"x-claude-code-session-id": "b"}, "c", "me b"),
        ({}, "c", "me c"),
        ({}, None, ""),
    ],
)
def test_what_a_client_says_comes_first(headers, cache_key, session):
    assert affinity_of("me", headers, cache_key, "m", ()).session == session


def test_two_keys_name_no_session_in_common():
    """Whatever each of them calls it: servers share nothing of their caches between keys."""
    headers = {"x-session-id": "a"}
    assert len({affinity_of(owner, headers, None, "m", ()).session for owner in ("me", "you", "")}) == 3
    policy, among = cache_aware(), [replica("a"), replica("b")]
    mine, yours = (DispatchRequest(key, "m", 0.0, affinity_of(key, headers, None, "m", ())) for key in ("me", "you"))
    assert grants(policy, among, [mine]) == ["a"]
    among[0].in_flight = 1
    assert policy.choose(mine, among).name == "a" and policy.choose(yours, among).name == "b"


def test_a_conversation_without_a_name_has_the_same_key_in_every_gateway():
    assert affinity_of("me", {}, None, "m", (b"x" * BLOCK_BYTES,)).key == "9915999634676646150"
