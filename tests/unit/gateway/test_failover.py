"""What becomes of a request: tables of events and of what they bring about."""

from __future__ import annotations

import re

import pytest
from support.failover_world import BODY, CHAT, World
from support.token_replica import undisturbed

from phalanx.errors import NoReplica, QueueFull, ReplicaTooSlow
from phalanx.http.stream_records import StreamRecord


def do(world: World, event: str) -> None:
    """Let an event of a table happen."""
    word, _, rest = event.partition(" ")
    match word:
        case "place":
            world.failover.placed(world.places._grant(world.request, [world.places.replicas[rest]]), world.now)
        case "no":
            errors = {"replica": NoReplica("There is none."), "room": QueueFull("All are busy.", retry_after=1)}
            world.failover.place_refused(errors[rest], world.now)
        case "pieces":
            for _ in range(int(rest)):
                world.piece()
        case "ends":
            while not world.traffic.reader.ended:  # type: ignore[union-attr]
                world.piece()
            world.failover.passed_on(world.now)
        case "mark":
            setattr(world.traffic, rest, True)
        case "breaks":
            world.breaks()
        case "is":
            world.breaks(world.cut or {"late": ReplicaTooSlow("It is over.")}.get(rest))
        case "answers":
            status, _, text = rest.partition(" ")
            world.answers(int(status), text.encode(), is_final=text == "final")
        case "pauses":
            world.tell(StreamRecord(paused=True))
        case "refuses":
            world.check(world.places.replicas[rest], ok=False)
        case "leaves":
            world.places.remove(rest)
        case "wait":
            world.now += float(rest)
        case "back":
            world.failover.pause_over(world.now)
        case "gone":
            world.failover.client_gone(world.now)
        case _:
            {"tick": world.tick, "close": world.close}[word]()


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
        mark client_was_slow    sending
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
        place a                 done          a cancelled
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
        gone                    done          move from a cancelled
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
        ends                    done          a answered, b cancelled
    """,
    "the client leaves two places": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        gone                    done          a cancelled, b cancelled
    """,
    "the gateway ends with two places": """
        place a                 sending
        pieces 2                sending
        pauses                  sending
        tick                    sending       cut: The replica a has lost its engine.
        close                   sending
        is cut                  done          a failed, move from a failed, b cancelled
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
        gone                    done          move from a cancelled
    """,
    "a client that is written to": """
        place a                 sending
        pieces 2                sending
        mark is_relaying        sending
        wait 61                 sending
        tick                    sending
        gone                    done          a cancelled
    """,
}
"""Story -> events, the state after each, and what it brought about."""


@pytest.mark.parametrize("story", TABLES)
def test_story(story: str) -> None:
    world = World()
    for line in TABLES[story].strip().splitlines():
        event, state, *actions = re.split(r"\s{2,}", line.strip())
        world.actions.clear()
        do(world, event)
        assert (world.failover.state, ", ".join(world.actions)) == (state, "".join(actions)), event
    assert not world.places.held and undisturbed(CHAT, BODY).startswith(world.client)


def test_no_token_is_taken_for_a_retry_that_cannot_be() -> None:
    world = World()
    for event in ("place a", "wait 1800", "breaks"):
        do(world, event)
    assert world.failover.state == "done" and world.tokens.taken == 0


def test_a_request_that_breaks_so_many_replicas_ends_with_an_error_that_says_so() -> None:
    world = World(migration_limit=1)
    for event in ("place a", "pieces 2", "breaks", "place b", "pieces 2", "breaks"):
        do(world, event)
    said = "The replica a broke off. The replica b broke off. It is not moved again: perhaps it makes replicas fail"
    assert world.failover.state == "done" and str(world.failover.result).startswith(said)


def test_a_begun_stream_waits_less_long_than_a_request_that_has_not_begun():
    """One waits for its turn, the other for a server to come back."""
    world = World()
    for event in ("place a", "wait 5", "breaks"):
        do(world, event)
    assert world.request.give_up_at == 5 + 600
    world = World()
    for event in ("place a", "pieces 1", "wait 5", "breaks"):
        do(world, event)
    assert world.request.give_up_at == 5 + 60
