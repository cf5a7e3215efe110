"""What a server's page sees: whose requests, hosts and memory, faults with their remedies; and who gets the page."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, fake_engine, serving

from phalanx.server.endpoints.engine_health import EngineHealth
from phalanx.supervision.fake_engine import replying
from phalanx.types import EngineStats, LinkStats, RankStats

KEYED = replace(CONFIG, api_key=("one", "two"), admin_key="admin-key")


def run(tokenizer, scenario, config=CONFIG, **engine):
    async def main():
        fake = fake_engine(tokenizer, replying([5, 0]), **engine)
        async with asyncio.timeout(120), serving(tokenizer, fake, config) as client:
            await scenario(client, fake)

    asyncio.run(main())


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def parts(client, wanted=lambda parts: True, **options):
    """What the stream has told, as soon as it is what is wanted."""
    found = {}
    async with client.stream("GET", "/v1/overview/events", **options) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        event = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                said = json.loads(line.removeprefix("data: "))
                found = said if event == "snapshot" else {**found, **said["set"]}
                for name in () if event == "snapshot" else said["drop"]:
                    found.pop(name)
                if wanted(found):
                    return found
    raise AssertionError("the stream has ended")


def requests_in(found):
    return {name: part for name, part in found.items() if name.startswith("requests/")}


def test_the_server_and_a_request_while_it_runs_and_after(tokenizer):
    async def scenario(client, engine):
        found = await parts(client)
        assert found["server"]["models"] == ["tiny"] and found["server"]["phase"] == "ready"
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        found = await parts(client, requests_in)
        (row,) = requests_in(found).values()
        assert row["state"] in ("queued", "prefill")
        engine.step()
        found = await parts(client, lambda found: [row["state"] for row in requests_in(found).values()] == ["decode"])
        engine.step()
        id = (await asking).json()["id"]
        name = f"requests/{id}"
        found = await parts(client, lambda found: found[name]["state"] == "finished")
        assert found[name]["output_tokens"] == 2

    run(tokenizer, scenario, manual=True)


@pytest.mark.parametrize(("directory", "blocks"), [("/somewhere", 3), (None, None)])
def test_the_leaders_host_has_its_memory_and_how_much_is_on_disk(tokenizer, directory, blocks):
    async def scenario(client, engine):
        ranks = [RankStats(rank=0, host="a", pid=7), RankStats(rank=1, host="b", pid=8)]
        engine._stats = EngineStats(ranks=ranks, prefix_bytes=9, disk_blocks=3)
        found = await parts(client, lambda found: "hosts/a" in found)
        memory = found["hosts/a"]["memory"]
        assert (memory["prefixes"], memory["disk_blocks"]) == (9, blocks)
        assert "memory" not in found["hosts/b"]

    run(tokenizer, scenario, replace(CONFIG, engine=replace(CONFIG.engine, prefix_cache_dir=directory)))


@pytest.mark.parametrize(
    ("layers", "hosts", "held"),
    [
        ((None, None), "aa", 2.0),
        ((None, None), "ab", 1.0),
        (((15, 29), (0, 14)), "aa", 1.0),
        (((24, 29), (0, 23)), "ab", 0.2),
    ],
)
def test_ranks_of_stages_hold_the_rows_of_their_own_layers(tokenizer, layers, hosts, held):
    async def scenario(client, engine):
        ranks = [
            RankStats(rank=number, host=host, pid=7, layers=own)
            for number, (host, own) in enumerate(zip(hosts, layers, strict=True))
        ]
        engine._stats = EngineStats(ranks=ranks, kv_bytes=1000, prefix_bytes=500)
        found = await parts(client, lambda found: "hosts/a" in found)
        memory = found["hosts/a"]["memory"]
        assert (memory["rows"], memory["prefixes"]) == (1000 * held, 500 * held)

    run(tokenizer, scenario)


def test_links_are_shown_a_bad_one_first(tokenizer):
    async def scenario(client, engine):
        ranks = [
            RankStats(rank=number, host=host, pid=7, links=[LinkStats(peer=1 - number, carries="plans")])
            for number, host in enumerate("ab")
        ]
        engine._stats = EngineStats(ranks=ranks)
        found = await parts(client, lambda found: "links" in found)
        assert [row["carries"] for row in found["links"]] == ["all-reduces", "plans"]
        engine.crash("rank 1 (b, pid 7) has given no sign of life for 2.1 s, says /var/lib/secret/place")
        engine.recover()
        engine._stats = EngineStats(ranks=ranks)
        found = await parts(client, lambda found: "links" in found and "problem" in found["links"][0])
        assert found["links"][0]["carries"] == "plans" and "cable" in found["links"][0]["remedy"]
        assert "/var/lib" not in json.dumps(found)

    run(tokenizer, scenario)


def test_a_server_shows_its_speed_as_health_does(tokenizer, monkeypatch):
    speeds = {"predicted": {"tokens_per_second": 30.0}, "measured": {"tokens_per_second": 24.5}}
    monkeypatch.setattr(EngineHealth, "speeds", lambda self: speeds)

    async def scenario(client, engine):
        found = await parts(client, lambda found: "measured" in found["server"])
        assert {name: found["server"][name] for name in speeds} == speeds

    run(tokenizer, scenario)


def test_a_key_sees_its_own_requests_and_the_admin_key_all(tokenizer):
    async def scenario(client, engine):
        for key in ("one", "two"):
            await client.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
        seen = {key: len(requests_in(await parts(client, headers=bearer(key)))) for key in ("one", "two", "admin-key")}
        assert seen == {"one": 1, "two": 1, "admin-key": 2}
        assert (await client.get("/v1/overview/events")).status_code == 401

    run(tokenizer, scenario, KEYED)


def test_a_fault_is_told_with_what_was_done_and_what_helps(tokenizer):
    async def scenario(client, engine):
        engine.crash("rank 1 (b, pid 7) crashed: MemoryShortage: not enough memory in /var/lib/secret/place")
        found = await parts(client, lambda found: "events/1" in found)
        assert "being started again" in found["events/1"]["did"] and found["server"]["phase"] == "restarting"
        engine.recover()
        found = await parts(client, lambda found: found["events/1"]["gap_seconds"] is not None)
        assert "started again and served after" in found["events/1"]["did"]
        assert "rank 1 (b, pid 7)" in found["events/1"]["what"]
        assert "/var/lib" not in json.dumps(found)

    run(tokenizer, scenario)


@pytest.mark.parametrize("known", ["rank 0: CollectiveFault: step 12: the sum of layer 3 cannot be right on rank 1"])
def test_a_known_fault_has_its_remedy(tokenizer, known):
    async def scenario(client, engine):
        engine.crash(known)
        found = await parts(client, lambda found: "events/1" in found)
        assert "phalanx net test" in found["events/1"]["remedy"] and found["events/1"]["cause"]

    run(tokenizer, scenario)


def test_browsers_get_the_page_and_programs_the_line(tokenizer):
    async def scenario(client, engine):
        page = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.headers["content-type"] == "text/html; charset=utf-8" and "Accept" in page.headers["vary"]
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert (await client.get("/")).text.startswith("phalanx is running")
        script = await client.get("/page/main.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert script.headers["x-content-type-options"] == "nosniff"
        for path in ("/page/none.js", "/page/../web_page.py", "/page/%2e%2e/web_page.py"):
            assert (await client.get(path)).status_code == 404

    run(tokenizer, scenario, KEYED)
