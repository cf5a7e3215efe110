"""What becomes of a request: tables of events and of what they bring about, and random stories."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.token_replica import MEDIA, Piece, Writer, start_of, undisturbed

from phalanx.errors import NoReplica, PhalanxError, QueueFull, ReplicaFailed, ReplicaTooSlow
from phalanx.gateway.dispatch.breaker import BreakerRules
from phalanx.gateway.dispatch.dispatch_request import DispatchRequest
from phalanx.gateway.dispatch.dispatcher import Dispatcher, Grant, Verdict
from phalanx.gateway.dispatch.policies import LeastLoad
from phalanx.gateway.dispatch.replica import Replica
from phalanx.gateway.dispatch.replica_health import Check, HealthReport, HealthRules, ReplicaLoad
from phalanx.gateway.dispatch.retries import RetryBudget
from phalanx.gateway.relay.api_kinds import dialect_of
from phalanx.gateway.relay.event_reader import EventReader
from phalanx.gateway.relay.failover import Failover
from phalanx.gateway.relay.gateway_metrics import GatewayMetrics
from phalanx.gateway.relay.traffic import BufferedResponse, Traffic
from phalanx.gateway.settings.gateway_settings import GatewayConfig
from phalanx.gateway.settings.replicas_file import ReplicaSpec
from phalanx.http.stream_records import MIGRATION, StreamRecord, framed

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/responses", "/v1/messages", "/api/chat")
BODY = b'{"model": "m", "stream": true}'
CLOSING = NoReplica("The gateway is shutting down.")


class Places(Dispatcher):
    """Notes what becomes of places. One that is given back twice is a ValueError."""

    def __init__(self, actions: list[str]) -> None:
        super().__init__(LeastLoad(), queue_size=4)
        self.actions = actions
        self.held: list[Grant] = []

    def _grant(self, request: DispatchRequest, among: list[Replica]) -> Grant:
        self.held.append(super()._grant(request, among))
        return self.held[-1]

    def end(self, grant: Grant, verdict: Verdict, now: float) -> None:
        self.held.remove(grant)
        self.actions.append(f"{grant.replica.name} {verdict}")
        super().end(grant, verdict, now)

    def blame(self, grant: Grant, now: float) -> None:
        assert grant not in self.held
        self.actions.append(f"blame {grant.replica.name}")
        super().blame(grant, now)


class Counts(GatewayMetrics):
    """Notes what is counted but for attempts, which places have."""

    def __init__(self, dispatcher: Places) -> None:
        super().__init__(dispatcher)
        self.actions = dispatcher.actions

    def retried(self, replica: str) -> None:
        self.actions.append(f"retry after {replica}")

    def migrated(self, replica: str, outcome: str) -> None:
        self.actions.append(f"move from {replica} {outcome}")


class Tokens(RetryBudget):
    taken = 0

    def take(self, now: float) -> bool:
        is_taken = super().take(now)
        self.taken += is_taken
        return is_taken


class World:
    """One request before three simulated servers, of which c cannot continue streams. `client` is what passed.

    Args:
        kind: the machine.
    """

    def __init__(self, kind: type[Failover] = Failover, path: str = CHAT, **settings: Any) -> None:
        self.path, self.now, self.actions, self.client = path, 0.0, list[str](), b""
        self.places = Places(self.actions)
        for name in "abc":
            spec = ReplicaSpec(name=name, url=f"http://{name}", admin_key="k" if name < "c" else None)
            one = Replica(spec, HealthRules(2, 1), BreakerRules(failures=3, successes=1, open_s=5.0))
            self.places.add(one)
            self.check(one, ok=True)
        self.tokens = Tokens(0.2)
        config = GatewayConfig(**settings)
        self.request = DispatchRequest("", "m", config.queue_timeout_secs)
        self.failover = kind(
            request=self.request,
            config=config,
            dispatcher=self.places,
            metrics=Counts(self.places),
            budget=self.tokens,
            random=lambda: 0.5,
            deadline=config.request_timeout_secs,
            may_stream=True,
        )
        self.under_way: Traffic | None = None  # for which `pieces` are
        self.pieces: Iterator[Piece] = iter(())
        self.cut: PhalanxError | None = None

    def check(self, one: Replica, *, ok: bool, answered: bool = True) -> None:
        """A health check has ended. In a table replica c is another vendor's server."""
        report = HealthReport(ReplicaLoad(0, 0, 2), "n" if one.name < "c" else "")
        one.health.note(Check(ok=ok, answered=answered, report=report), self.now, self.now)
        one.is_suspect &= not ok
        one.needs_check &= not ok

    @property
    def traffic(self) -> Traffic:
        """Of the attempt; what is sent for it is decided when it begins."""
        traffic = self.failover.traffic
        assert traffic is not None
        if traffic is not self.under_way:
            known = self.failover.resume(self.now)
            start = known.start if known is not None else start_of(BODY, "n")
            self.under_way, self.cut = traffic, None
            self.pieces = Writer(self.path, BODY, start, known).pieces()
        return traffic

    def tell(self, record: StreamRecord, data: bytes = b"") -> None:
        """Bytes of the stream come, and pass where they may."""
        traffic, lines = self.traffic, self.path in MEDIA
        traffic.is_sent = traffic.has_begun = True
        if traffic.reader is None:
            traffic.reader = EventReader(dialect_of(self.path), lines=lines, transcript=traffic.transcript)
        whole = traffic.reader.feed(data + (framed(record, lines=lines) if traffic.transcript is not None else b""))
        assert not traffic.reader.fault
        traffic.last_byte = self.now
        if whole:
            is_first, traffic.passed_at = traffic.passed_at is None, self.now
            self.client += whole
            if is_first:
                self.failover.first_byte(self.now)

    def piece(self) -> None:
        """The next piece comes, or nothing more."""
        traffic = self.traffic
        if (piece := next(self.pieces, None)) is not None:
            is_start = traffic.transcript is not None and traffic.transcript.start is None
            self.tell(StreamRecord(start=start_of(BODY, "n") if is_start else None, choices=piece.choices), piece.data)

    def half_a_piece(self) -> None:
        """Its rest never comes."""
        traffic = self.traffic
        if (piece := next(self.pieces, None)) is not None and traffic.reader is not None:
            assert traffic.reader.feed(piece.data.rstrip(b"\n")[:-1]) == b""

    def breaks(self, error: PhalanxError | None = None) -> None:
        traffic = self.traffic
        traffic.is_sent |= not traffic.is_unreachable
        self.failover.broke_off(
            error or ReplicaFailed(f"The replica {traffic.grant.replica.name} broke off."), self.now
        )

    def answers(self, status: int, body: bytes = b"", *, is_final: bool = False) -> None:
        self.traffic.is_sent = self.traffic.has_begun = True
        self.failover.answered(BufferedResponse(status, {}, body, is_final), self.now)

    def tick(self) -> None:
        if (error := self.failover.tick(self.now)) is not None:
            self.actions.append(f"cut: {error}")
            self.cut = error

    def close(self) -> None:
        self.failover.gateway_end = self.cut = CLOSING

    # A table -------------------------------------------------------------------------------------------------

    def do(self, event: str) -> None:
        word, _, rest = event.partition(" ")
        match word:
            case "place":
                self.failover.placed(self.places._grant(self.request, [self.places.replicas[rest]]), self.now)
            case "no":
                errors = {"replica": NoReplica("There is none."), "room": QueueFull("All are busy.", retry_after=1)}
                self.failover.place_refused(errors[rest], self.now)
            case "pieces":
                for _ in range(int(rest)):
                    self.piece()
            case "ends":
                while not self.traffic.reader.ended:  # type: ignore[union-attr]
                    self.piece()
                self.failover.passed_on(self.now)
            case "mark":
                setattr(self.traffic, rest, True)
            case "breaks":
                self.breaks()
            case "is":
                self.breaks(self.cut or {"late": ReplicaTooSlow("It is over.")}.get(rest))
            case "answers":
                status, _, text = rest.partition(" ")
                self.answers(int(status), text.encode(), is_final=text == "final")
            case "pauses":
                self.tell(StreamRecord(paused=True))
            case "refuses":
                self.check(self.places.replicas[rest], ok=False)
            case "leaves":
                self.places.remove(rest)
            case "wait":
                self.now += float(rest)
            case "back":
                self.failover.pause_over(self.now)
            case "gone":
                self.failover.client_gone(self.now)
            case _:
                {"tick": self.tick, "close": self.close}[word]()


TABLES = {
    "an answer": """
        place a                 sending
        answers 200             done          a answered
    """,
    "a stream": """
        place a                 sending
        pieces 1                sending
        ends                    done          a answered
    """,
    "a failure is explained by the next answer": """
        place a                 sending
        breaks                  queued        a failed, retry after a
        place b                 sending
        answers 200             done          blame a, b answered
    """,
    "one that every replica has counts against none": """
        place a                 sending
        answers 500             queued        a failed, retry after a
        place b                 sending
        answers 500             queued        b failed, retry after b
        place c                 sending
        answers 400             done          c answered
    """,
    "no connection is the replica's fault at once": """
        place a                 sending
        mark is_unreachable     sending
        breaks                  queued        a failed, blame a, retry after a
        gone                    done
    """,
    "an old connection and a slow client explain a failure": """
        place a                 sending
        mark is_reused          sending
        breaks                  queued        a failed, retry after a
        place b                 sending
        mark was_held           sending
        breaks                  queued        b failed, retry after b
        place c                 sending
        answers 200             done          c answered
    """,
    "a back-off before the same one": """
        place a                 sending
        breaks                  queued        a failed, retry after a
        place b                 sending
        breaks                  queued        b failed, retry after b
        place c                 sending
        breaks                  backing off   c failed, retry after c
        back                    queued
        place a                 sending
        answers 429 final       done          a answered
    """,
    "the end of the gateway in a back-off": """
        place a                 sending
        breaks                  queued        a failed, retry after a
        place b                 sending
        breaks                  queued        b failed, retry after b
        place c                 sending
        breaks                  backing off   c failed, retry after c
        close                   backing off
        back                    done
    """,
    "the end of the gateway before a place": """
        close                   queued
        place a                 done          a abandoned
    """,
    "the end of the gateway in an attempt": """
        place a                 sending
        close                   sending
        is cut                  done          a failed
    """,
    "no time for a retry": """
        place a                 sending
        wait 1800               sending
        is late                 done          a failed
    """,
    "all are gone, and the one that failed may be back": """
        place a                 sending
        breaks                  queued        a failed, retry after a
        leaves b                queued
        leaves c                queued
        no replica              backing off
        back                    queued
        no room                 done
    """,
    "a key that is refused": """
        place a                 sending
        answers 403 x-phalanx-migration  queued        a answered
        place a                 sending
        answers 403 x-phalanx-migration  done          a answered
    """,
    "a 404 of a model is asked for once more": """
        place a                 sending
        answers 404             queued        a answered, retry after a
        place b                 sending
        answers 404             done          b answered
    """,
    "a stream moves": """
        place a                 sending
        pieces 3                sending
        breaks                  queued        a failed
        place b                 sending
        pieces 1                sending       blame a, move from a continued
        ends                    done          b answered
    """,
    "a stream moves twice before anything passes": """
        place a                 sending
        pieces 3                sending
        breaks                  queued        a failed
        place b                 sending
        breaks                  queued        b failed, move from a failed
        no room                 done          move from b failed
    """,
    "a stream that no one takes": """
        place a                 sending
        pieces 3                sending
        breaks                  queued        a failed
        place b                 sending
        answers 400 too long    queued        b answered
        no replica              done          move from a failed
    """,
    "a stream waits for one that is busy": """
        place a                 sending
        pieces 3                sending
        breaks                  queued        a failed
        place b                 sending
        answers 503             backing off   b failed
        back                    queued
        gone                    done          move from a abandoned
    """,
    "a stream waited too long for it": """
        place a                 sending
        pieces 3                sending
        breaks                  queued        a failed
        place b                 sending
        answers 503             backing off   b failed
        wait 61                 backing off
        back                    done          move from a failed
    """,
    "a stream of another vendor": """
        place c                 sending
        pieces 2                sending
        breaks                  done          c failed
    """,
    "a stream whose time is over": """
        place a                 sending
        pieces 2                sending
        is late                 done          a failed, move from a failed
    """,
    "a lost engine, and a place elsewhere": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        tick                    sending
        is cut                  sending       a failed
        ends                    done          blame a, move from a continued, b answered
    """,
    "the engine is back before the stream has left": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        ends                    done          a answered, b abandoned
    """,
    "the client leaves two places": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        gone                    done          a abandoned, b abandoned
    """,
    "the gateway ends with two places": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        close                   sending
        is cut                  done          a failed, move from a failed, b abandoned
    """,
    "an answer that is no stream leaves a server that cannot serve": """
        place a                 sending
        wait 1                  sending
        refuses a               sending
        tick                    sending       cut: The replica a says that it cannot serve.
        is cut                  sending       a failed, retry after a
        answers 200             done          blame a, b answered
    """,
    "of another vendor's it stays": """
        place c                 sending
        wait 1                  sending
        refuses c               sending
        tick                    sending
        answers 200             done          c answered
    """,
    "a stream that stands still": """
        place a                 sending
        pieces 2                sending
        wait 61                 sending
        tick                    sending       cut: The replica a sent nothing for 60 s.
        is cut                  queued        a failed
        gone                    done          move from a abandoned
    """,
    "a client that is written to": """
        place a                 sending
        pieces 2                sending
        mark is_relaying        sending
        wait 61                 sending
        tick                    sending
        gone                    done          a abandoned
    """,
}
"""Story -> events, the state after each, and what it brought about."""


@pytest.mark.parametrize("story", TABLES)
def test_story(story: str) -> None:
    world = World()
    for line in TABLES[story].strip().splitlines():
        event, state, *actions = re.split(r"\s{2,}", line.strip())
        world.actions.clear()
        world.do(event)
        assert (world.failover.state, ", ".join(world.actions)) == (state, "".join(actions)), event
    assert not world.places.held and undisturbed(CHAT, BODY).startswith(world.client)


def test_no_token_is_taken_for_a_retry_that_cannot_be() -> None:
    world = World()
    for event in ("place a", "wait 1800", "breaks"):
        world.do(event)
    assert world.failover.state == "done" and world.tokens.taken == 0


def test_a_request_that_breaks_so_many_replicas_ends_with_an_error_that_says_so() -> None:
    world = World(migration_limit=1)
    for event in ("place a", "pieces 2", "breaks", "place b", "pieces 2", "breaks"):
        world.do(event)
    said = "The replica a broke off. The replica b broke off. It goes nowhere else: perhaps it breaks them"
    assert world.failover.state == "done" and str(world.failover.result).startswith(said)


# Random stories --------------------------------------------------------------------------------------------------


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
        assert failover.breaks <= failover.config.most_breaks + 1
        assert not any(world.places.queue) and not any(world.places.begun)

    # Events ------------------------------------------------------------------------------------------------------

    def of_request(self) -> tuple[object, ...]:
        one = self.world.request
        return one.model, one.numerics, frozenset(one.tried), frozenset(one.refused), one.give_up_at

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
        traffic.is_reused, traffic.was_held = self.draw.random() < 0.2, self.draw.random() < 0.2
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


class RetriesFree(Failover):
    """Retries need no token."""

    def _may_retry(self, now: float) -> bool:
        self.budget, budget = RetryBudget(1.0), self.budget
        may_retry = super()._may_retry(now)
        self.budget = budget
        return may_retry


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


class ForgetsGap(Failover):
    """A client leaves while its stream has no replica, and stays counted as one that waits."""

    def client_gone(self, now: float) -> None:
        since, self.gap_since = self.gap_since, None
        super().client_gone(now)
        self.gap_since = since


class NeverEnds(Failover):
    """A stream that may not move goes on and on."""

    def _end(self, result: Any, now: float) -> None:
        if self.has_begun:
            self._next(now)
        else:
            super()._end(result, now)


PLANTED = (
    KeepsSuccessor, KeepsPlace, BeginsAnew, KeepsHalves, WastesTokens, RetriesFree, ChangesWaiting, OutlivesGateway,
    ForgetsGap, NeverEnds,
)  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_random_stories_find(planted: type[Failover]) -> None:
    for seed in range(3000):
        try:
            Chance(random.Random(seed), planted).play()
        except (AssertionError, RecursionError, ValueError):
            return
    pytest.fail(f"no story found: {planted.__doc__}")
