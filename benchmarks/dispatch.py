"""Dispatch alone, in simulated time: how fast the gateway decides, how equally replicas are loaded, how fair keys are.

Requests arrive at random, each runs for a random time on the replica that it gets; nothing is sent anywhere.

    steady      requests come at 80 % of what all replicas can do
    saturated   one key asks for as much as all replicas can do, nine others for a fifth each: places go by turns
    changing    as steady, while replicas go down and come back

least_load runs in all three; the other policies run in the first, with fewer requests: consistent_hashing looks at
every replica.

Decisions per second count processor time in the dispatcher alone, arrivals and ends together as one decision.

    python benchmarks/dispatch.py [--replicas 1000] [--requests 1000000] [--policy least_load ...]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from collections import Counter, deque
from typing import Any

from phalanx.errors import QueueFull
from phalanx.gateway.breaker import BreakerRules
from phalanx.gateway.dispatch_request import Affinity, DispatchRequest
from phalanx.gateway.dispatcher import Dispatcher, Grant
from phalanx.gateway.health import Check, HealthRules, Load, Report
from phalanx.gateway.policies import CacheAware, ConsistentHashing, LeastLoad, Policy, PowerOfTwo, RoundRobin
from phalanx.gateway.replica import Replica
from phalanx.gateway.replicas_file import ReplicaSpec

PLACES = 4  # requests at once on a replica
QUEUE = 32
KEYS = 10  # the first is the greedy one
SESSIONS = 5000
MEAN_S = 1.0  # of a request
WARM_S = 5.0  # until as many requests end as begin
SAMPLE_EVERY = 997  # requests between two looks at all replicas
MOST_DOWN = 0.05  # of the replicas, in the scene where they change
OTHERS = ("power_of_two", "round_robin", "cache_aware", "consistent_hashing")
FEWER = 25  # times fewer requests for those
LEAST = 30  # requests for each replica, so that most come when as many end as begin
FLEETS = (2, 8, 32, 128, 512, 1000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", action="append", choices=["least_load", *OTHERS], help="may be repeated")
    options = parser.parse_args()
    try:
        found = measure(options.replicas, options.requests, options.policy or ["least_load", *OTHERS])
    except ValueError as error:
        parser.error(f"--requests: {error}")
    print(json.dumps(found))
    return 0


def least_requests(n_replicas: int) -> int:
    """Of policies that are simulated with fewer: so many that a few replicas are looked at often enough, too."""
    return max(LEAST * n_replicas, 4 * SAMPLE_EVERY)


def measure(n_replicas: int, n_requests: int, policies: list[str]) -> dict[str, Any]:
    """Every policy in its scenes, and least_load with other numbers of replicas.

    Raises:
        ValueError: so few requests end before as many end as begin.
    """
    n_others = max(n_requests // FEWER, least_requests(n_replicas))
    found: dict[str, Any] = {"replicas": n_replicas, "requests": n_requests, "other_requests": n_others}
    found["policies"] = {
        name: {"steady": Simulation(name, n_replicas, "steady").run(n_others if name in OTHERS else n_requests)}
        for name in policies
    }
    if "least_load" in policies:
        for scene in ("saturated", "changing"):
            found["policies"]["least_load"][scene] = Simulation("least_load", n_replicas, scene).run(n_requests)
        found["decisions_per_s_by_replicas"] = {
            n: Simulation("least_load", n, "steady").run(max(n_requests // FEWER, least_requests(n)))["decisions_per_s"]
            for n in FLEETS
        }
    return found


def policy_named(name: str, draw: random.Random) -> Policy:
    if name == "cache_aware":
        return CacheAware(threshold=0.3, more=4, times=1.5)
    if name == "power_of_two":
        return PowerOfTwo(draw.randrange)
    if name == "consistent_hashing":
        return ConsistentHashing()
    return RoundRobin() if name == "round_robin" else LeastLoad()


class Simulation:
    """One scene of one policy. The seed is fixed: two runs differ in times alone."""

    def __init__(self, policy: str, n_replicas: int, scene: str) -> None:
        self.draw = random.Random(45)
        self.scene = scene
        self.dispatcher = Dispatcher(policy_named(policy, self.draw), queue_size=QUEUE)
        self.replicas = [made(f"r{i}") for i in range(n_replicas)]
        for replica in self.replicas:
            self.dispatcher.add(replica)
        places = n_replicas * PLACES
        wanted = 1.0 + (KEYS - 1) * 0.2 if scene == "saturated" else 0.8
        self.rate = wanted * places / MEAN_S
        self.ends: list[tuple[float, int, Grant]] = []
        self.granted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.spent_s = 0.0
        self.in_flight: list[tuple[float, float, float]] = []  # mean, most and deviation at one time
        self.longest_queue = 0
        self.down: deque[Replica] = deque()
        self.n = 0

    def run(self, n_requests: int) -> dict[str, Any]:
        """Figures of so many requests, without those that only fill the replicas."""
        now = 0.0
        is_warm = False
        for n in range(n_requests):
            if not is_warm and now > WARM_S:
                is_warm = True
                self.granted.clear()
                self.refused.clear()
                self.in_flight.clear()
            now += self.draw.expovariate(self.rate)
            self._end_until(now)
            if self.scene == "changing" and n % 100 == 0:
                self._change(now)
            self._arrive(now)
            if n % SAMPLE_EVERY == 0:
                self._sample()
        if not (is_warm and self.in_flight):
            raise ValueError(f"{n_requests} requests are too few for {len(self.replicas)} replicas")
        return self._figures(n_requests)

    def _arrive(self, now: float) -> None:
        if self.scene == "saturated":
            greedy = self.draw.random() * (1.0 + (KEYS - 1) * 0.2) < 1.0
            owner = "greedy" if greedy else f"key {self.draw.randrange(1, KEYS)}"
        else:
            owner = f"key {self.draw.randrange(KEYS)}"
        ask = DispatchRequest(owner, "m", now + 60.0, Affinity(f"s{self.draw.randrange(SESSIONS)}"))
        begun = time.process_time()
        try:
            grant = self.dispatcher.arrive(ask, now)
            decided = list(self.dispatcher.decided(now))
        except QueueFull:
            grant, decided = None, []
            self.refused[owner] += 1
        self.spent_s += time.process_time() - begun
        if grant is not None:
            self._take(grant, now)
        self._take_in(decided, now)
        self.longest_queue = max(self.longest_queue, len(self.dispatcher.queue))

    def _end_until(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            at, _, grant = heapq.heappop(self.ends)
            begun = time.process_time()
            self.dispatcher.end(grant, "answered", at)
            decided = list(self.dispatcher.decided(at))
            self.spent_s += time.process_time() - begun
            self._take_in(decided, at)

    def _take_in(self, decided: list[tuple[DispatchRequest, Any]], now: float) -> None:
        for ask, decision in decided:
            if isinstance(decision, Grant):
                self._take(decision, now)
            else:
                self.refused[ask.owner] += 1

    def _take(self, grant: Grant, now: float) -> None:
        self.n += 1
        self.granted[grant.request.owner] += 1
        heapq.heappush(self.ends, (now + self.draw.expovariate(1 / MEAN_S), self.n, grant))

    def _change(self, now: float) -> None:
        """A replica fails its checks; the one that has been down longest is up again, if enough are down."""
        if len(self.down) > MOST_DOWN * len(self.replicas):
            self._check(self.down.popleft(), True, now)
        replica = self.draw.choice(self.replicas)
        if replica not in self.down:
            self.down.append(replica)
            self._check(replica, False, now)

    def _check(self, replica: Replica, ok: bool, now: float) -> None:
        for _ in range(3):
            replica.health.note(Check(ok=ok, report=Report(Load(0, 0, PLACES))), now, now)
        begun = time.process_time()
        self.dispatcher.changed(replica)
        self.spent_s += time.process_time() - begun

    def _sample(self) -> None:
        loads = [replica.in_flight for replica in self.replicas]
        self.in_flight.append((statistics.fmean(loads), max(loads), statistics.pstdev(loads)))

    def _figures(self, n_requests: int) -> dict[str, Any]:
        mean, most, deviation = (statistics.fmean(column) for column in zip(*self.in_flight, strict=True))
        found: dict[str, Any] = {
            "decisions_per_s": round(n_requests / self.spent_s),
            "in_flight_mean": round(mean, 3),
            "in_flight_max": round(most, 3),
            "in_flight_deviation": round(deviation, 3),
            "refused": sum(self.refused.values()),
            "longest_queue": self.longest_queue,
        }
        if self.scene == "saturated":
            fair = self.granted.total() / KEYS
            found["share_of_fair"] = {
                "greedy": round(self.granted["greedy"] / fair, 3),
                "others_least": round(min(self.granted[f"key {i}"] for i in range(1, KEYS)) / fair, 3),
                "others_most": round(max(self.granted[f"key {i}"] for i in range(1, KEYS)) / fair, 3),
            }
        return found


def made(name: str) -> Replica:
    replica = Replica(ReplicaSpec(name=name, url=f"http://{name}"), HealthRules(), BreakerRules())
    replica.models = frozenset({"m"})
    replica.health.note(Check(ok=True, report=Report(Load(0, 0, PLACES))), 0.0, 0.0)
    return replica


if __name__ == "__main__":
    raise SystemExit(main())
