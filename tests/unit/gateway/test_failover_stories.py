"""Random stories of requests that lose replicas, places and clients: each ends once, and keeps and changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.failover_world import BODY, CHAT, CLOSING, World
from support.token_replica import undisturbed

from phalanx.errors import PhalanxError, ReplicaFailed, ReplicaTooSlow
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Grant
from phalanx.gateway.relay.failover import Failover
from phalanx.gateway.relay.traffic import BufferedResponse
from phalanx.http.stream_records import MIGRATION, StreamRecord

PATHS = (CHAT, "/v1/responses", "/v1/messages", "/api/chat")


class Chance:
    """Plays one story, and checks it as it goes."""

    def __init__(self, draw: random.Random, kind: type[Failover] = Failover) -> None:
        limits = {"migration_limit": draw.choice((0, 1, 3, 3)), "retry_max_retries": draw.choice((0, 1, 5))}
        self.draw, self.world = draw, World(kind, draw.choice(PATHS), **limits, request_timeout_secs=100.0)
        self.others: list[Grant] = []  # places of other requests
        self.waits: tuple[object, ...] | None = None  # what the dispatcher reads of the request that waits
        self.is_gone = False
        self.mischief = draw.choice((2, 5, 10, 30))  # events that are left before all goes well

    @property
    def failover(self) -> Failover:
        return self.world.failover

    def play(self) -> None:
        for _ in range(200):
            if self.failover.state == "done":
                break
            options = {"sending": self.sending, "backing off": self.backing_off, "queued": self.queued}
            event = self.draw.choice(options[self.failover.state]())
            state, tokens = self.failover.state, self.world.tokens.taken
            is_refused_key = event == self.refuses_key and self.world.traffic.admin_key is not None
            event()
            if self.failover.state == state == "queued" and event != self.asks:
                assert self.waits is None or self.waits == self.of_request(), "a request that waits is changed"
            is_retry = self.failover.state in ("queued", "backing off") and not self.failover.has_begun
            is_retry = is_retry and (state == "sending" or (state, self.failover.state) == ("queued", "backing off"))
            spent = self.world.tokens.taken - tokens
            assert spent == (is_retry and not is_refused_key) or (event == self.asks and spent <= 1), "tokens"
            is_over = self.failover.gateway_end is not None
            assert not is_over or self.failover.state in ("done", state), "a step after the gateway's end"
        self.check_end()

    def check_end(self) -> None:
        world, failover, result = self.world, self.failover, self.failover.result
        assert failover.state == "done", "a story without an end"
        assert not [grant for grant in world.places.held if grant.request is world.request], "places"
        assert failover.traffic is None and failover.gap_since is None
        moved = [action for action in world.actions if action.startswith("move")]
        assert len(moved) == failover.moves
        whole = undisturbed(world.path, BODY)
        assert whole.startswith(world.client), "what passed is another answer"
        if not self.is_gone and world.client:
            assert isinstance(result, PhalanxError) if result is not None else world.client == whole
        elif not self.is_gone:
            assert isinstance(result, (BufferedResponse, PhalanxError))
        assert failover.breaks <= failover.config.max_breaks + 1
        assert not any(world.places.queue) and not any(world.places.begun)

    # Events ------------------------------------------------------------------------------------------------------

    def of_request(self) -> tuple[object, ...]:
        one = self.world.request
        return one.model, one.determinism_key, frozenset(one.tried), frozenset(one.refused), one.give_up_at

    def mischievous(self, *events: Callable[[], None]) -> list[Callable[[], None]]:
        self.mischief -= 1
        return [*events, self.tick, self.passes_time, self.checks, self.occupies] if self.mischief > 0 else []

    def queued(self) -> list[Callable[[], None]]:
        if self.waits is None:
            return [self.asks]
        return [self.settles, *self.mischievous(self.leaves, self.closes, self.settles, self.settles)]

    def backing_off(self) -> list[Callable[[], None]]:
        return [self.pause_over, *self.mischievous(self.leaves, self.closes, self.pause_over)]

    def sending(self) -> list[Callable[[], None]]:
        world, traffic = self.world, self.world.traffic
        if traffic.reader is not None and traffic.reader.ended:
            return [self.passed_on, *([self.is_cut] if world.cut else [])]
        if world.cut is not None:
            return [self.is_cut, self.is_cut, world.piece, self.ends_first]
        bad: list[Callable[[], None]] = [self.breaks, self.breaks, self.leaves, self.removes, self.world.tick]
        bad += [self.closes, self.is_late]
        if traffic.passed_at is None and traffic.reader is self.failover.stream:
            bad += [self.answers, self.answers, self.refuses_key]
        if traffic.transcript is not None and traffic.transcript.start is not None:
            bad += [self.pauses] * 4
        return [world.piece, *self.mischievous(world.piece, world.piece, *bad)]

    def asks(self) -> None:
        world = self.world
        try:
            grant = world.places.arrive(world.request, world.now)
        except PhalanxError as error:
            self.failover.place_refused(error, world.now)
            return
        self.waits = self.of_request() if grant is None else None
        if grant is not None:
            self.failover.placed(grant, world.now)

    def settles(self) -> None:
        """Others leave their places, or time passes, until something is decided."""
        world = self.world
        if self.others:
            world.places.end(self.others.pop(), "answered", world.now)
        else:
            self.passes_time()
        for request, decision in world.places.decided(world.now):
            assert request is world.request
            self.waits = None
            if isinstance(decision, Grant):
                self.failover.placed(decision, world.now)
            else:
                self.failover.place_refused(decision, world.now)

    def pause_over(self) -> None:
        self.world.now += self.failover.pause_s
        self.failover.pause_over(self.world.now)

    def passed_on(self) -> None:
        self.failover.passed_on(self.world.now)

    def is_cut(self) -> None:
        self.world.breaks(self.world.cut)

    def ends_first(self) -> None:
        """The rest of a stream comes before its attempt is cut; not of one that waits for its engine."""
        for _ in range(self.draw.choice((0, 20))):
            self.world.piece()

    def is_late(self) -> None:
        self.world.breaks(ReplicaTooSlow("The request's time was over."))

    def breaks(self) -> None:
        traffic = self.world.traffic
        traffic.is_unreachable = not traffic.is_sent and self.draw.random() < 0.3
        traffic.is_reused, traffic.client_was_slow = self.draw.random() < 0.2, self.draw.random() < 0.2
        if self.draw.random() < 0.5:
            self.world.half_a_piece()
        self.world.breaks()

    def answers(self) -> None:
        self.world.answers(self.draw.choice((200, 400, 404, 429, 500, 503)), is_final=self.draw.random() < 0.2)

    def refuses_key(self) -> None:
        self.world.answers(403, MIGRATION.encode())

    def pauses(self) -> None:
        """Seen at once, as often as not."""
        self.world.tell(StreamRecord(paused=True))
        if self.draw.random() < 0.5:
            self.world.tick()

    def leaves(self) -> None:
        if self.waits is not None:
            self.world.places.withdraw(self.world.request)
        self.is_gone = True
        self.failover.client_gone(self.world.now)

    def closes(self) -> None:
        self.world.close()
        if self.waits is not None:
            self.world.places.withdraw(self.world.request)
            self.waits = None
            self.failover.place_refused(CLOSING, self.world.now)

    def removes(self) -> None:
        traffic = self.world.traffic
        if len(self.world.places.replicas) > 1 and traffic.grant.replica.name in self.world.places.replicas:
            self.world.places.remove(traffic.grant.replica.name)
            self.world.cut = ReplicaFailed("The replica was removed.")

    def tick(self) -> None:
        self.world.tick()

    def passes_time(self) -> None:
        self.world.now += self.draw.choice((0.1, 1.0, 10.0))

    def checks(self) -> None:
        ok, answered = self.draw.random() < 0.6, self.draw.random() < 0.5
        for one in self.world.places.replicas.values():
            if self.draw.random() < 0.6:
                self.world.check(one, ok=ok, answered=ok or answered)

    def occupies(self) -> None:
        """Other requests take what places there are."""
        other = DispatchRequest("another", "m", 1e9)
        while any(one.has_room and one.is_available(self.world.now) for one in self.world.places.replicas.values()):
            grant = self.world.places.arrive(other, self.world.now)
            assert grant is not None
            self.others.append(grant)


@examples(300, soak=20_000)
@given(st.randoms(use_true_random=False))
def test_random_stories(draw: random.Random) -> None:
    Chance(draw).play()


class KeepsSuccessor(Failover):
    """An answer that ends just before it moves keeps the place elsewhere."""

    def _done(self, outcome: str, now: float) -> None:
        self.successor = None
        super()._done(outcome, now)


class KeepsPlace(Failover):
    """A client leaves, and its place stays taken."""

    def client_gone(self, now: float) -> None:
        self.traffic = None
        super().client_gone(now)


class BeginsAnew(Failover):
    """A begun stream is sent as if it had not begun."""

    def resume(self, now: float) -> None:
        return None


class KeepsHalves(Failover):
    """What was held back of the lost replica's events stays before the next one's."""

    def placed(self, grant: Grant, now: float) -> None:
        stream, self.stream = self.stream, None
        super().placed(grant, now)
        if stream is not None:
            assert self.traffic is not None
            self.stream = self.traffic.reader = stream
            self.traffic.transcript = stream.transcript


class WastesTokens(Failover):
    """A token is taken before it is known whether there is a retry."""

    def _may_retry(self, now: float) -> bool:
        self.budget.take(now)
        return super()._may_retry(now)


class ChangesWaiting(Failover):
    """A look at a request changes what the dispatcher knows of it while it waits."""

    def tick(self, now: float) -> PhalanxError | None:
        self.request.tried.clear()
        return super().tick(now)


class OutlivesGateway(Failover):
    """A back-off ends after the gateway, and the request is sent."""

    def _next(self, now: float) -> None:
        self.gateway_end, error = None, self.gateway_end
        super()._next(now)
        self.gateway_end = error


class NeverEnds(Failover):
    """A stream that may not move goes on and on."""

    def _end(self, result: Any, now: float) -> None:
        if self.has_begun:
            self._next(now)
        else:
            super()._end(result, now)


PLANTED = (
    KeepsSuccessor, KeepsPlace, BeginsAnew, KeepsHalves, WastesTokens, ChangesWaiting, OutlivesGateway,
    NeverEnds,
)  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_random_stories_find(planted: type[Failover]) -> None:
    for seed in range(3000):
        try:
            Chance(random.Random(seed), planted).play()
        except (AssertionError, RecursionError, ValueError):
            return
    pytest.fail(f"no story found: {planted.__doc__}")
