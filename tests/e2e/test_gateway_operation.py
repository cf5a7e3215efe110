"""What an operator does to a gateway at work: replicas and keys come and go, and it is ended."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import pytest
from support.gateways import CHAT, errors, gateway, run, text_of
from support.openapi_check import check_openapi
from support.stub_replica import WORDS, Call, StubReplica, begins, hangs, refuses, streaming

from phalanx.http.stream_records import MIGRATION


def test_a_replica_is_added_drained_and_removed_while_requests_run(caplog):
    async def scenario() -> None:
        go = asyncio.Event()
        waits = streaming(1, go_on=go)
        async with StubReplica(waits) as a, StubReplica(streaming(5)) as b, gateway(a.url, admin_key="adm") as client:

            async def admin(method: str, path: str = "", body: Any = None, key: str = "adm") -> tuple[int, Any]:
                async with client.request(
                    method, f"/admin/replicas{path}", body, Authorization=f"Bearer {key}"
                ) as response:
                    return response.status, await response.json()

            assert (await admin("GET", key="wrong"))[0] == 401
            assert "A wrong admin key came from 127.0.0.1" in caplog.text
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            for wrong in ({"wieght": 1}, {"weight": 0}, {"weight": 101}, {"max_in_flight": 0}, {"key": " "}):
                assert (await admin("POST", body={"name": "b", "url": b.url, **wrong}))[0] == 400
            assert (await admin("POST", body={"name": "b", "url": b.url}))[0] == 200
            assert (await admin("POST", body={"name": "b", "url": b.url}))[0] == 400
            await client.until_up(2)
            status, said = await admin("POST", f"/{a.name}/drain?timeout=0.05")
            assert (status, said["state"], said["in_flight"]) == (200, "draining", 1)
            for _ in range(3):
                assert text_of(await client.stream()) == WORDS
            draining = asyncio.create_task(admin("POST", f"/{a.name}/drain"))
            removing = asyncio.create_task(admin("DELETE", f"/{a.name}"))
            await asyncio.sleep(0.05)
            assert not draining.done() and not removing.done() and not stream.done()
            go.set()
            assert text_of(await stream) == "0 "
            assert (await draining)[1]["in_flight"] == 0
            assert (await removing)[1] == {"name": a.name, "in_flight": 0, "removed": True}
            assert [one["name"] for one in (await admin("GET"))[1]["replicas"]] == ["b"]
            assert (await admin("DELETE", "/nobody"))[0] == 404

    run(scenario())


def test_an_idle_connection_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("phalanx.http.service.FLUSH_S", 600.0)

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a:
            async with gateway(a.url) as client:
                source, out = await asyncio.open_connection("127.0.0.1", client.gateway.port)
                out.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await source.readuntil(b"}")
            assert await source.read() == b""
            out.close()

    run(scenario())


def test_the_description_names_what_the_gateway_answers():
    async def scenario() -> None:
        async with StubReplica(streaming(1)) as a, gateway(a.url, admin_key="adm") as client:
            status, document = await client.get("/openapi.json")
            named = check_openapi(document)
            assert (
                status == 200 and {("POST", CHAT), ("POST", "/api/chat"), ("DELETE", "/admin/replicas/{name}")} <= named
            )
            for method, path in named - {("GET", "/v1/overview/events")}:  # a stream that does not end
                path = path.format(name="nobody", id="nobody", file="nobody")
                asked = client.request(method, path, {"model": "m"}, Authorization="Bearer adm")
                async with asked as response:
                    said = await response.text()
                assert response.status == 200 or "nobody" in said or "does not describe a replica" in said, (path, said)
            for key in ({}, {"Authorization": "Bearer wrong"}):
                async with client.request("GET", "/admin/openapi.json", **key) as response:
                    assert response.status == 401

    run(scenario())


def test_a_replica_that_the_admin_api_adds_gets_its_own_keys_or_none():
    """Not those of flags, and not the clients' own, which without an --api-key are for the replicas of flags."""

    async def scenario() -> None:
        settings = {"admin_key": "adm", "worker_key": "shared", "worker_admin_key": "shared-admin"}
        async with StubReplica(streaming(1)) as a, StubReplica(streaming(1)) as b, StubReplica(streaming(1)) as c:
            for one in (a, b, c):
                one.determinism_key = "n"
            async with gateway(a.url, **settings) as client:

                async def asked(one: StubReplica, **fields: Any) -> dict[str, str]:
                    """The headers of a request to the replica, which is added, if that is not done."""
                    added = {"name": one.name, "url": one.url, **fields}
                    others = [other.name for other in (a, b, c) if other is not one]
                    admin = {"Authorization": "Bearer adm"}
                    if one is not a:
                        async with client.request("POST", "/admin/replicas", added, **admin) as response:
                            assert (await response.json())["has_key"] == ("key" in fields)
                        await client.until_up(1)
                    for name in others:
                        async with client.request("POST", f"/admin/replicas/{name}/drain", **admin) as response:
                            await response.read()
                    async with client.request(
                        "POST", CHAT, {"model": "m", "stream": True}, Authorization="Bearer client", x_api_key="client"
                    ) as response:
                        assert response.status == 200, await response.text()
                        await response.read()
                    return one.calls[-1].headers

                headers = await asked(a)
                assert (headers["authorization"], headers[MIGRATION]) == ("Bearer shared", "shared-admin")
                headers = await asked(b)
                assert not {"authorization", "x-api-key", MIGRATION} & set(headers)
                headers = await asked(c, key="own", admin_key="own-admin")
                assert (headers["authorization"], headers[MIGRATION]) == ("Bearer own", "own-admin")

    run(scenario())


@pytest.mark.parametrize("host", ["169.254.169.254", "[fd00:ec2::254]", "[::ffff:169.254.1.1]", "0.0.0.0", "[fe80::1]"])
def test_the_admin_api_adds_no_replica_at_an_address_of_metadata(host):
    async def scenario() -> None:
        async with gateway("http://127.0.0.1:1", up=0, admin_key="adm") as client:
            body = {"name": "x", "url": f"http://{host}:80"}
            async with client.request("POST", "/admin/replicas", body, Authorization="Bearer adm") as response:
                said = (await response.json())["error"]["message"]
                assert response.status == 400 and body["url"] in said and "only --replicas or --worker-urls" in said

    run(scenario())


@pytest.mark.parametrize("host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "metadata.example"])
def test_a_replica_whose_name_stands_for_such_an_address_is_down(host, monkeypatch):
    """What its name stands for may change at any time: so the address is judged that is connected to."""
    resolve = socket.getaddrinfo

    def resolved(name: Any, *more: Any, **options: Any) -> Any:
        return resolve("169.254.169.254" if name == "metadata.example" else name, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)

    async def scenario() -> None:
        async with gateway("http://127.0.0.1:1", up=0, admin_key="adm") as client:
            admin, body = {"Authorization": "Bearer adm"}, {"name": "x", "url": f"http://{host}:80"}
            async with client.request("POST", "/admin/replicas", body, **admin) as response:
                assert response.status == 200, await response.text()
            state, reason = "unknown", ""
            while state == "unknown":
                async with client.request("GET", "/admin/replicas", **admin) as response:
                    (one,) = [one for one in (await response.json())["replicas"] if one["name"] == "x"]
                state, reason = one["state"], one["reason"]
                await asyncio.sleep(0.01)
            assert state == "down" and re.search("link-local|not a canonical|not an address", reason), reason

    run(scenario())


def test_a_replicas_redirect_is_not_followed():
    """Its key would go where the replica says."""

    async def scenario() -> None:
        async with StubReplica(streaming(1)) as other, StubReplica(streaming(1)) as a:

            async def redirects(call: Call) -> None:
                await call.whole(307, {}, Location=other.url + call.path)

            a.answer = redirects
            async with gateway(a.url, worker_key="shared") as client:
                async with client.request("POST", CHAT, {"model": "m"}) as response:
                    assert response.status == 307 and "Location" not in response.headers
                assert a.calls[0].headers["authorization"] == "Bearer shared" and not other.calls

    run(scenario())


def test_a_replica_that_comes_back_under_its_name_gets_the_request_that_its_removal_ended():
    """While the only other replica is busy."""

    async def scenario() -> None:
        async with (
            StubReplica(hangs, limit=1) as a,
            StubReplica(hangs, limit=1) as b,
            gateway(a.url, b.url, admin_key="adm") as client,
        ):

            async def admin(method: str, path: str = "", body: Any = None) -> int:
                async with client.request(
                    method, f"/admin/replicas{path}", body, Authorization="Bearer adm"
                ) as response:
                    return response.status

            streams = [asyncio.create_task(client.stream()) for _ in range(2)]
            while not (a.running and b.running):
                await asyncio.sleep(0.01)
            a.answer = streaming(1)
            assert await admin("DELETE", f"/{a.name}?timeout=0") == 200
            assert await admin("POST", body={"name": a.name, "url": a.url}) == 200
            done, _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
            assert [text_of(stream.result()) for stream in done] == ["0 "]
            for stream in streams:
                stream.cancel()

    run(scenario())


def test_a_request_outlasts_any_number_of_removals():
    """What an operator takes away has failed nothing."""

    async def scenario() -> None:
        async with (
            StubReplica(hangs) as a,
            StubReplica(hangs) as b,
            gateway(a.url, b.url, admin_key="adm", retry_max_retries=1) as client,
        ):

            async def admin(method: str, path: str = "", body: Any = None) -> None:
                async with client.request(
                    method, f"/admin/replicas{path}", body, Authorization="Bearer adm"
                ) as response:
                    assert response.status == 200

            answer = asyncio.create_task(client.ask())
            for last in (False, False, False, True):
                while not (a.running or b.running):
                    assert not answer.done(), answer.result()
                    await asyncio.sleep(0.01)
                used, other = (a, b) if a.running else (b, a)
                other.answer = streaming(1) if last else hangs
                await admin("DELETE", f"/{used.name}?timeout=0")
                while used.running:
                    await asyncio.sleep(0.01)
                await admin("POST", body={"name": used.name, "url": used.url})
                await client.until_up(2)
            assert (await answer)[0] == 200

    run(scenario())


def test_a_reload_in_mid_stream_loses_nothing(tmp_path):
    file, keys = tmp_path / "replicas.toml", tmp_path / "keys.toml"

    async def scenario() -> None:
        go = asyncio.Event()
        async with StubReplica(streaming(2, go_on=go)) as a, StubReplica(streaming(5)) as b:
            file.write_text(f'[[replica]]\nname = "a"\nurl = "{a.url}"\n')
            keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\nmax_in_flight = 1\n')
            settings = {"replicas": str(file), "keys": str(keys), "admin_key": "adm"}
            async with gateway(up=1, key="key-of-ci", **settings) as client:
                stream = asyncio.create_task(client.stream())
                while not a.running:
                    await asyncio.sleep(0.01)
                assert (await client.ask())[0] == 429  # one at once
                file.write_text(f'[[replica]]\nname = "b"\nurl = "{b.url}"\nwieght = 1\n')
                client.gateway.reload()  # refused whole
                assert (await client.get("/health"))[1]["replicas"] == {"a": "ok"}
                file.write_text(f'[[replica]]\nname = "b"\nurl = "{b.url}"\n')
                keys.write_text('[[key]]\nname = "ci"\nkey = "key-of-ci"\nmax_in_flight = 2\n')
                client.gateway.reload()
                await client.until_up(1)
                assert (await client.get("/health"))[1]["replicas"] == {"b": "ok"}
                assert text_of(await client.stream()) == WORDS
                go.set()
                assert text_of(await stream) == "0 1 "

    run(scenario())


def test_the_gateway_drains_and_then_cuts_off_with_an_error():
    async def scenario() -> None:
        async with StubReplica(begins) as a, gateway(a.url, shutdown_grace_period_secs=600.0) as client:
            stream = asyncio.create_task(client.stream())
            while not a.running:
                await asyncio.sleep(0.01)
            client.gateway.stop()
            while (await client.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
            status, health = await client.get("/health")
            assert (status, health["status"]) == (503, "closing")
            status, body = await client.ask()
            assert status == 503 and "shutting down" in body["error"]["message"]
            assert not stream.done()
            client.gateway.stop()  # at once
            assert errors(await stream) == ["The gateway is shutting down."]
        async with StubReplica(hangs, limit=1) as a, gateway(a.url, shutdown_grace_period_secs=0.1) as client:
            asked = [asyncio.create_task(client.ask()) for _ in range(2)]  # one waits for the replica, one for a place
            while not (a.running and client.gateway._dispatcher.core.queue):
                await asyncio.sleep(0.01)
            client.gateway.stop()
            assert [(await task)[0] for task in asked] == [503, 503]

    run(scenario())


def test_a_request_that_backs_off_is_not_sent_again_once_the_gateway_ends():
    async def scenario() -> None:
        settings = {"retry_initial_backoff_ms": 500.0, "retry_max_retries": 100}
        async with StubReplica(refuses) as a, gateway(a.url, **settings) as client:
            asked = asyncio.create_task(client.ask())
            while not a.calls:
                await asyncio.sleep(0.01)
            for _ in range(2):  # at once
                client.gateway.stop()
            status, body = await asked
            assert status == 503 and body["error"]["message"] == "The gateway is shutting down."

    run(scenario())


def test_the_end_of_the_gateway_cuts_a_pause_between_two_attempts():
    """It slept on, so that the client's connection was cut without an answer."""

    async def scenario() -> None:
        hour = {"retry_initial_backoff_ms": 3_600_000.0, "retry_max_backoff_ms": 3_600_000.0}
        settings = {**hour, "request_timeout_secs": 36_000.0, "retry_max_retries": 100}
        async with StubReplica(refuses) as a, gateway(a.url, **settings) as client:
            asked = asyncio.create_task(client.ask())
            text = ""
            while f'phalanx:gateway_retries_total{{replica="{a.name}"}} 1.0' not in text:
                async with client.request("GET", "/metrics") as response:
                    text = await response.text()
            for _ in range(2):  # at once
                client.gateway.stop()
            status, body = await asked
            assert status == 503 and body["error"]["message"] == "The gateway is shutting down."

    run(scenario())
