"""Streams that outlive their replica, before stand-ins that tell records: whatever a replica does, the client gets the
bytes that it would have got.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import force_setattr
from support.gateways import CHAT, Client, gateway, run
from support.stub_replica import Call, StubReplica, event
from support.token_replica import Fault, TokenReplica, undisturbed

from phalanx.gateway.relay import proxy, traffic
from phalanx.gateway.relay.attempt import Attempt
from phalanx.http.stream_records import MIGRATION, RESUME

PATHS = [CHAT, "/v1/responses", "/v1/messages", "/api/chat"]
BODY = b'{"model": "m", "stream": true}'
KEYED: dict[str, Any] = {"worker_admin_key": "adm"}
SUSPICIOUS: dict[str, Any] = {"health_check_timeout_secs": 0.1}  # where a replica falls silent


@asynccontextmanager
async def behind_gateway(*replicas: StubReplica, **settings: Any) -> AsyncIterator[Client]:
    """A gateway before these, which asks them by turns, the first one first."""
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        urls = [replica.url for replica in replicas]
        yield await stack.enter_async_context(gateway(*urls, policy="round_robin", **{**KEYED, **settings}))


async def raw(client: Client, path: str = CHAT, body: bytes = BODY, **headers: str) -> bytes:
    """The bytes of an answer."""
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    async with client.session.post(client.url + path, data=body, headers=headers) as response:
        text = await response.read()
        assert response.status == 200, text
        return text


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def said(answer: bytes) -> str:
    """The error that ends a chat."""
    *_, last, done = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    return str(json.loads(last)["error"]["message"])


async def metrics(client: Client) -> str:
    async with client.request("GET", "/metrics") as response:
        return str(await response.text())


def waiting(client: Client) -> int:
    return len(client.gateway._dispatcher.core.begun)


# The client gets what it would have got --------------------------------------------------------------------------

FAULTS = (
    "reset", "half a piece", "without its record", "half a record", "a malformed record", "a failure",
    "a malformed event", "an early end", "silence",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", FAULTS)
def test_whatever_happens_to_a_replica_the_client_gets_the_same_bytes(path, how):
    async def scenario() -> None:
        a, b = TokenReplica(Fault(2, how)), TokenReplica()
        async with behind_gateway(a, b, **(SUSPICIOUS if how == "silence" else {})) as client:
            assert await raw(client, path) == undisturbed(path, BODY)
            (resume,) = b.resumes
            assert resume.moves == 1 and not a.running

    run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_at_each_of_its_pieces_a_stream_can_be_carried_on(path):
    """Also where the first replica has sent all but the last record, or before its first."""

    async def scenario() -> None:
        a, b = TokenReplica(), TokenReplica()
        async with behind_gateway(a, b) as client:
            for at in range(7):
                a.faults, b.faults = [Fault(at, "without its record")], []
                while a.faults:  # turns of others
                    assert await raw(client, path) == undisturbed(path, BODY)
            assert a.calls[-1].headers[MIGRATION] == "adm"

    run(scenario())


@pytest.mark.parametrize("n", [1, 2, 3])
def test_choices_go_on_each_from_where_it_is(n):
    async def scenario() -> None:
        body = json.dumps({"model": "m", "stream": True, "n": n, "tokens": 9}).encode()
        a, b = TokenReplica(*[Fault(4, "reset")] * 9), TokenReplica(*[Fault(3, "reset")] * 9)
        async with behind_gateway(a, b, migration_limit=20) as client:
            assert await raw(client, CHAT, body) == undisturbed(CHAT, body)
            assert len(a.resumes + b.resumes) == max(resume.moves for resume in a.resumes + b.resumes) > 1

    run(scenario())


def test_many_streams_of_all_dialects_lose_their_replicas_in_turn():
    async def scenario() -> None:
        a, b = TokenReplica(pause_s=0.01), TokenReplica(pause_s=0.01)
        often = {"migration_limit": 100, "retry_max_retries": 100, "retry_budget": 10.0, "cb_failure_threshold": 1000}
        async with behind_gateway(a, b, **often) as client:
            fields = {"model": "m", "stream": True, "tokens": 30}
            asked = [(PATHS[i % 4], json.dumps({**fields, "i": i}).encode()) for i in range(24)]
            streams = asyncio.gather(*(raw(client, path, body) for path, body in asked))
            for round in range(6):
                victim = (a, b)[round % 2]
                await until(lambda one=victim: one.running > 0 or streams.done())
                port = victim.port
                await victim.close()
                await asyncio.sleep(0.02)
                await victim.listen(port)
                await client.until_up(2)
            assert await streams == [undisturbed(path, body) for path, body in asked]
            assert a.resumes and b.resumes

    run(scenario())


def test_a_client_sees_and_sends_nothing_of_it():
    """Records are taken out, and a client's own headers of that name are no replica's."""

    async def scenario() -> None:
        a, b = TokenReplica(Fault(3, "reset")), TokenReplica()
        async with behind_gateway(a, b) as client:
            own = {MIGRATION: "theirs", RESUME: "2"}
            answer = await raw(client, **{name.replace("-", "_"): text for name, text in own.items()})
            assert answer == undisturbed(CHAT, BODY) and b"phalanx" not in answer
            assert [call.headers[MIGRATION] for call in a.calls + b.calls] == ["adm", "adm"]
            assert RESUME not in a.calls[0].headers and b.calls[0].headers[RESUME] != "2"
            status, _ = await client.ask()
            assert status == 200  # what is no stream is not changed

    run(scenario())


def test_a_request_without_a_model_goes_on_with_the_one_that_began_it():
    async def scenario() -> None:
        a, b, c = TokenReplica(Fault(2, "reset")), TokenReplica(), TokenReplica()
        b.models = ("another",)
        async with behind_gateway(a, b, c) as client:
            body = b'{"stream": true}'
            assert await raw(client, CHAT, body) == undisturbed(CHAT, body)
            assert not b.calls and len(c.resumes) == 1

    run(scenario())


def test_a_replica_with_equal_numerics_is_preferred():
    async def scenario() -> None:
        a, b, c = TokenReplica(Fault(2, "reset")), TokenReplica(determinism_key="other"), TokenReplica()
        async with behind_gateway(a, b, c) as client:
            assert await raw(client) == undisturbed(CHAT, BODY)
            assert not b.calls and len(c.resumes) == 1
            a.faults, c.health = [Fault(2, "reset")], 503
            await until(lambda: client.gateway._dispatcher.core.replicas[c.name].health.state == "down")
            while a.faults:
                assert await raw(client) == undisturbed(CHAT, BODY)
            assert len(b.resumes) == 1  # and another one is better than none

    run(scenario())


# Where a replica lives and does not compute ----------------------------------------------------------------------


@pytest.fixture
def ticks(monkeypatch):
    monkeypatch.setattr(proxy, "TICK_S", 0.01)


async def many_ticks() -> None:
    """What is done in them is seen to be done; that nothing is done, a slow machine cannot make wrong."""
    await asyncio.sleep(0.2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_leaves_a_replica_that_has_lost_its_engine(path, n, ticks):
    """Its connection is closed, and it is never back."""

    async def scenario() -> None:
        a, b = TokenReplica(Fault(3, "a pause")), TokenReplica()
        async with behind_gateway(a, b) as client:
            body = json.dumps({"model": "m", "stream": True, "n": n}).encode()
            assert await raw(client, path, body) == undisturbed(path, body)
            (resume,) = b.resumes
            assert resume.moves == 1 and [len(choice.tokens) for choice in resume.choices] == {1: [3], 2: [1, 1]}[n]
            await until(lambda: not a.running)
            requests = (await client.get("/health"))[1]["requests"]
            assert (requests["running"], requests["waiting"]) == (0, 0)
            assert f'migrations_total{{outcome="continued",replica="{a.name}"}} 1.0' in await metrics(client)

    run(scenario())


@pytest.mark.parametrize("why", ["other determinism_key", "no room", "no replica", "in doubt", "no move left"])
def test_where_no_other_replica_is_as_good_a_stream_waits_for_its_own(why, ticks):
    async def scenario() -> None:
        a, b = TokenReplica(limit=1), TokenReplica(Fault(3, "a pause"))
        a.determinism_key = "other" if why == "other determinism_key" else "n"
        a.faults = {"no room": [Fault(1, "an open end")], "no move left": [Fault(1, "reset")]}.get(why, [])
        settings = {"migration_limit": 1, "health_failure_threshold": 1000}
        replicas = [b] if why == "no replica" else [a, b] if a.faults else [b, a]
        async with behind_gateway(*replicas, **settings) as client:
            if why == "in doubt":
                a.health = 503
                await until(lambda: client.gateway._dispatcher.core.replicas[a.name].health.is_degraded)
            stream = asyncio.create_task(raw(client))
            if why == "no room":
                await until(lambda: a.running == 1)
                first, stream = stream, asyncio.create_task(raw(client))
            await until(lambda: not b.faults)
            n_calls = len(a.calls)
            await many_ticks()
            assert len(a.calls) == n_calls and not b.left.is_set()
            b.back.set()
            assert await stream == undisturbed(CHAT, BODY)
            assert len(a.calls) == n_calls
            if why == "no room":
                first.cancel()

    run(scenario())


def test_two_replicas_that_lose_their_engines_in_turn_pass_a_stream_to_and_fro(ticks):
    """So often and no more: then it stays with the one that has it."""

    async def scenario() -> None:
        a, b = TokenReplica(*[Fault(3, "a pause")] * 2), TokenReplica(*[Fault(1, "a pause")] * 2)
        body = json.dumps({"model": "m", "stream": True, "tokens": 20}).encode()
        async with behind_gateway(a, b, migration_limit=3) as client:
            stream = asyncio.create_task(raw(client, CHAT, body))
            await until(lambda: len(b.resumes) == 2)
            await many_ticks()
            assert [resume.moves for resume in (*b.resumes, *a.resumes)] == [1, 3, 2] and b.running == 1
            b.back.set()
            assert await stream == undisturbed(CHAT, body)
            assert len(a.resumes + b.resumes) == 3

    run(scenario())


@pytest.mark.parametrize("interval_s", [0.05, 1e6])
def test_a_stream_leaves_a_silent_replica_at_its_first_missed_check(interval_s, ticks, monkeypatch):
    """That comes before its time where the stream is quiet."""
    monkeypatch.setattr(traffic, "QUIET_S", 0.02)

    async def scenario() -> None:
        a, b = TokenReplica(Fault(3, "silence")), TokenReplica()
        async with behind_gateway(a, b, health_failure_threshold=1000, **SUSPICIOUS) as client:
            # Not from the start: on a busy machine the first check misses its time, and there would be no second one.
            force_setattr(client.gateway._config, "health_check_interval_secs", interval_s)
            assert await raw(client) == undisturbed(CHAT, BODY)
            assert len(b.resumes) == 1

    run(scenario())


@pytest.mark.parametrize("determinism_key", ["n", ""])
def test_what_is_no_stream_is_asked_for_again_where_its_replica_says_that_it_cannot_serve(determinism_key, ticks):
    """Of another vendor's server that may mean something else."""

    async def scenario() -> None:
        a, b = TokenReplica(determinism_key=determinism_key), TokenReplica()
        go_on = asyncio.Event()

        async def waits(call: Call) -> None:
            await go_on.wait()
            await call.whole(200, {"choices": [], "from": "a"})

        a.answer = waits
        async with behind_gateway(a, b, retry_max_retries=0, health_failure_threshold=1000) as client:
            answer = asyncio.create_task(client.ask())
            await until(lambda: a.running == 1)
            await many_ticks()
            assert not b.calls
            a.health = 503
            if determinism_key:
                assert (await answer)[0] == 200 and len(b.calls) == 1
                await until(lambda: not a.running)
            else:
                await until(lambda: client.gateway._dispatcher.core.replicas[a.name].health.is_degraded)
                await many_ticks()
                go_on.set()
                assert (await answer)[1]["from"] == "a" and not b.calls

    run(scenario())


def test_what_is_no_stream_moves_so_often_and_no_more(ticks):
    async def scenario() -> None:
        replicas = [TokenReplica() for _ in range(3)]
        go_on = asyncio.Event()

        async def waits(call: Call) -> None:
            await go_on.wait()
            await call.whole(200, {"choices": []})

        for one in replicas:
            one.answer = waits
        async with behind_gateway(*replicas, migration_limit=1, health_failure_threshold=1000) as client:
            answer = asyncio.create_task(client.ask())
            for one in replicas[:2]:
                await until(lambda one=one: one.running == 1)
                one.health = 503
            await many_ticks()
            assert replicas[1].running == 1 and not replicas[2].calls
            go_on.set()
            assert (await answer)[0] == 200

    run(scenario())


def test_an_answer_that_ends_just_before_it_moves_keeps_no_second_place(ticks, monkeypatch):
    async def scenario() -> None:
        a, b = TokenReplica(Fault(3, "a pause")), TokenReplica()
        async with behind_gateway(a, b) as client:
            monkeypatch.setattr(Attempt, "cut", lambda attempt, error: None)
            stream = asyncio.create_task(raw(client))
            dispatcher = client.gateway._dispatcher.core
            await until(lambda: dispatcher.replicas[b.name].in_flight == 1)
            await many_ticks()
            assert dispatcher.in_flight == 2  # one place, however often it is looked for
            a.back.set()
            assert await stream == undisturbed(CHAT, BODY) and not b.calls
            await until(lambda: dispatcher.in_flight == 0)

    run(scenario())


# Where there is no replica ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_while_all_are_down_a_client_is_kept_waiting(path, ticks, monkeypatch):
    monkeypatch.setattr(proxy, "KEEP_ALIVE_S", 0.02)

    async def scenario() -> None:
        a = TokenReplica(Fault(3, "death"))
        async with behind_gateway(a) as client:
            stream = asyncio.create_task(raw(client, path))
            port = a.port
            await until(lambda: waiting(client) == 1)
            await asyncio.sleep(0.1)
            await a.listen(port)
            sign = b" " if path == "/api/chat" else b": keep-alive\n\n"
            expected = undisturbed(path, BODY)
            answer = await stream
            assert answer.count(sign) > expected.count(sign)
            assert answer.replace(sign, b"") == expected.replace(sign, b"")

    run(scenario())


def test_a_wait_has_an_end_and_the_error_says_what_happened():
    async def scenario() -> None:
        a = TokenReplica(Fault(3, "death"))
        async with behind_gateway(a, queue_timeout_secs=0.3) as client:
            message = said(await raw(client))
            assert f"{a.name} broke off" in message and f"{a.name}: " in message.partition("No replica")[2]
            assert f'migrations_total{{outcome="failed",replica="{a.name}"}} 1.0' in await metrics(client)

    run(scenario())


def test_a_client_may_leave_while_its_stream_has_no_replica():
    async def scenario() -> None:
        a = TokenReplica(Fault(3, "death"))
        async with behind_gateway(a) as client:
            async with client.request("POST", CHAT, json.loads(BODY)) as response:
                await until(lambda: waiting(client) == 1)
                response.close()
            await until(lambda: waiting(client) == 0)
            while 'outcome="cancelled"' not in await metrics(client):
                await asyncio.sleep(0.01)
            requests = (await client.get("/health"))[1]["requests"]
            assert (requests["running"], requests["waiting"]) == (0, 0)

    run(scenario())


def test_the_end_of_the_gateway_ends_the_wait():
    async def scenario() -> None:
        a = TokenReplica(Fault(3, "death"))
        async with behind_gateway(a, shutdown_grace_period_secs=0.1) as client:
            stream = asyncio.create_task(raw(client))
            await until(lambda: waiting(client) == 1)
            client.gateway.stop()
            assert "shutting down" in said(await stream)

    run(scenario())


# What does not go on ---------------------------------------------------------------------------------------------


def test_a_request_that_breaks_replicas_is_carried_on_so_often_and_no_more():
    async def scenario() -> None:
        replicas = [TokenReplica(Fault(1, "reset")) for _ in range(4)]
        async with behind_gateway(*replicas, migration_limit=2) as client:
            message = said(await raw(client))
            broke = [replica for replica in replicas if replica.calls]
            assert len(broke) == 3 and all(f"{replica.name} broke off" in message for replica in broke)
            assert "--migration-limit 2" in message
            text = await metrics(client)
            assert sum(f'"failed",replica="{one.name}"}} 1.0' in text for one in broke) == 1
            assert sum(f'"continued",replica="{one.name}"}} 1.0' in text for one in broke) == 2
            assert "phalanx:gateway_stream_gap_seconds_count 2.0" in text

    run(scenario())


@pytest.mark.parametrize("status", [400, 404])
def test_a_replica_that_does_not_take_a_stream_is_not_asked_again(status):
    async def scenario() -> None:
        a, b, c = TokenReplica(Fault(2, "reset")), TokenReplica(), TokenReplica()
        b.refusal = status, "The prompt is too long here."
        async with behind_gateway(a, b, c) as client:
            assert await raw(client) == undisturbed(CHAT, BODY)
            assert len(b.calls) == 1 and len(c.resumes) == 1
            a.faults, c.refusal = [Fault(2, "reset")], (status, "Nor here.")
            a.refusal = (status, "Nor here.")
            while a.faults:
                answer = await raw(client)
            assert "The prompt is too long here." in said(answer) and "Nor here." in said(answer)
            assert f"{a.name} broke off" in said(answer)

    run(scenario())


@pytest.mark.parametrize("status", [429, 503])
def test_a_replica_that_is_busy_gets_the_stream_later(status):
    async def scenario() -> None:
        a, b = TokenReplica(Fault(2, "reset")), TokenReplica()
        b.refusal = status, "Later."
        async with behind_gateway(a, b) as client:
            a.refusal = b.refusal
            stream = asyncio.create_task(raw(client))
            await until(lambda: len(b.calls) > 1)
            a.refusal = b.refusal = None
            assert await stream == undisturbed(CHAT, BODY)

    run(scenario())


@pytest.mark.parametrize("settings", [{"migration_limit": 0}, {"worker_admin_key": None}, {"worker_admin_key": "bad"}])
def test_without_a_key_that_is_taken_a_stream_ends_with_its_replica(settings, caplog):
    async def scenario() -> None:
        a, b = TokenReplica(Fault(2, "reset")), TokenReplica(Fault(2, "reset"))
        async with behind_gateway(a, b, **settings) as client:
            answer = await raw(client)
            (name,) = [one.name for one in (a, b) if one.name in said(answer)]
            assert said(answer).startswith(f"The replica {name} broke off:") and answer.count(b"data: {") == 3
            asked = [call.headers.get(MIGRATION) for call in a.calls + b.calls]
            if settings.get("worker_admin_key") != "bad":
                assert asked == [None]
                return
            assert sorted(asked, key=str) == [None, "bad", "bad"]  # each is asked with it once
            assert caplog.text.count("refuses its admin key") == 2

    run(scenario())


def test_a_stream_that_has_become_too_long_ends_with_its_replica():
    async def scenario() -> None:
        a, b = TokenReplica(Fault(4, "reset")), TokenReplica()
        async with behind_gateway(a, b, migration_max_seq_len=3) as client:
            assert f"{a.name} broke off" in said(await raw(client)) and not b.calls

    run(scenario())


def test_a_foreign_server_gets_no_such_headers_and_no_such_streams():
    async def breaks(call: Call) -> None:
        await call.begin()
        await call.piece(event("a"))
        call.break_off()

    async def scenario() -> None:
        a, b = TokenReplica(Fault(2, "reset")), StubReplica(breaks)
        a.refusal = 400, "No."  # what it has lost it does not get back
        async with behind_gateway(a, b) as client:
            answers = [said(await raw(client)) for _ in range(2)]
            assert all(MIGRATION not in call.headers and RESUME not in call.headers for call in b.calls)
            assert len(b.calls) == 1 and sum(f"{b.name} broke off" in answer for answer in answers) == 1
            assert sum(f"{b.name}: cannot continue the stream" in answer for answer in answers) == 1

    run(scenario())


# The user --------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_removed_hands_its_streams_over(tmp_path):
    """However often: that is not the request's doing."""

    async def scenario() -> None:
        a, b = TokenReplica(pause_s=0.02), TokenReplica(pause_s=0.02)
        body = json.dumps({"model": "m", "stream": True, "tokens": 100}).encode()
        async with behind_gateway(a, b, admin_key="adm", migration_limit=1) as client:
            stream = asyncio.create_task(raw(client, CHAT, body))
            for _ in range(2):
                for one, other in ((a, b), (b, a)):
                    await until(lambda one=one: one.running == 1)
                    async with client.request(
                        "DELETE", f"/admin/replicas/{one.name}?timeout=0", Authorization="Bearer adm"
                    ) as response:
                        assert (await response.json())["in_flight"] == 0
                    await until(lambda other=other: other.running == 1)
                    added = {"name": one.name, "url": one.url, "admin_key": "adm"}
                    async with client.request("POST", "/admin/replicas", added, Authorization="Bearer adm") as response:
                        assert response.status == 200
                    await client.until_up(2)
            assert await stream == undisturbed(CHAT, body)

    run(scenario())


def test_a_stream_that_has_ended_goes_nowhere():
    """Its replica keeps the connection open, and is removed."""

    async def scenario() -> None:
        a, b = TokenReplica(Fault(5, "an open end")), TokenReplica()
        async with behind_gateway(a, b, admin_key="adm") as client:
            async with client.request("POST", CHAT, json.loads(BODY)) as response:
                answer = b""
                while b"[DONE]" not in answer:
                    answer += await response.content.readany()
                async with client.request(
                    "DELETE", f"/admin/replicas/{a.name}?timeout=0", Authorization="Bearer adm"
                ) as removed:
                    assert removed.status == 200
                answer += await response.read()
            assert answer == undisturbed(CHAT, a.calls[0].body) and not b.calls

    run(scenario())


def test_a_replica_that_leaves_the_file_hands_over_what_has_not_ended_in_time(tmp_path):
    file = tmp_path / "replicas.toml"

    async def scenario() -> None:
        a, b = TokenReplica(pause_s=0.02), TokenReplica()
        body = json.dumps({"model": "m", "stream": True, "tokens": 100}).encode()
        async with AsyncExitStack() as stack:
            for one in (a, b):
                await stack.enter_async_context(one)
            key = 'admin_key = "adm"\n'
            first, second = (f'[[replica]]\nname = "{i}"\nurl = "{one.url}"\n{key}' for i, one in enumerate((a, b)))
            file.write_text(first)
            client = await stack.enter_async_context(gateway(up=1, replicas=str(file), shutdown_grace_period_secs=0.1))
            stream = asyncio.create_task(raw(client, CHAT, body))
            await until(lambda: a.running == 1)
            file.write_text(second)
            client.gateway.reload()
            assert await stream == undisturbed(CHAT, body) and len(b.resumes) == 1

    run(scenario())
