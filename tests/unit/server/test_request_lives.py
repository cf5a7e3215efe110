"""What `GET /v1/requests/{id}` tells, and whom; and the story of a request, event by event."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, fake_engine, serving

from phalanx.server.sequences.request_log import MAX_LIVES, RequestLife, RequestLog, message_at
from phalanx.server.sequences.request_story import life_json, row_json
from phalanx.supervision.fake_engine import replying
from phalanx.types import (
    Batch,
    Finished,
    Sampling,
    SequenceProgress,
    SequenceRequest,
    SequenceWork,
    StopRule,
    Timing,
    Tokens,
)


class Clock:
    """Stands still until a test moves it."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


KEYED = replace(CONFIG, api_key=("one", "two"), admin_key="admin-key")


def run(tokenizer, scenario, config=CONFIG, engine=None):
    async def main():
        fake = engine or fake_engine(tokenizer, replying([5, 0]))
        async with asyncio.timeout(60), serving(tokenizer, fake, config) as client:
            await scenario(client, fake)

    asyncio.run(main())


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_request_is_found_by_both_of_its_ids(tokenizer):
    async def scenario(client, engine):
        answer = await client.post("/v1/chat/completions", json=CHAT)
        for id in (answer.json()["id"], answer.headers["x-request-id"]):
            life = (await client.get(f"/v1/requests/{id}")).json()
            assert life["id"] == answer.json()["id"] and life["state"] == "finished"
            assert life["choices"][0]["output_tokens"] == 2 and life["choices"][0]["finish_reason"] == "stop"
            assert life["endpoint"] == "/v1/chat/completions" and life["model"] == "tiny"

    run(tokenizer, scenario)


def test_unknown_ids_are_told_so(tokenizer):
    async def scenario(client, engine):
        answer = await client.get("/v1/requests/chatcmpl-none")
        assert answer.status_code == 404 and "last 1000" in answer.json()["error"]["message"]

    run(tokenizer, scenario)


def test_only_the_owner_and_the_admin_key_see_a_request(tokenizer):
    async def scenario(client, engine):
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("one"))
        path = f"/v1/requests/{answer.json()['id']}"
        statuses = [(await client.get(path, headers=bearer(key))).status_code for key in ("one", "two", "admin-key")]
        assert statuses == [200, 404, 200]
        assert (await client.get(path)).status_code == 401

    run(tokenizer, scenario, KEYED)


def test_a_client_that_leaves_and_a_request_that_is_running(tokenizer):
    async def scenario(client, engine):
        async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            id = answer.headers["x-request-id"]
            while not engine.received:
                await asyncio.sleep(0.01)
            engine.step()
            assert (await client.get(f"/v1/requests/{id}")).json()["state"] == "decode"
        while (state := (await client.get(f"/v1/requests/{id}")).json()["state"]) == "decode":
            await asyncio.sleep(0.01)
        assert state == "client left"

    run(tokenizer, scenario, engine=fake_engine(tokenizer, replying([5]), manual=True))


def test_a_restart_is_a_pause(tokenizer):
    async def scenario(client, engine):
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        while not engine.received:
            await asyncio.sleep(0.01)
        engine.step()
        engine.crash("rank 1 was killed by signal 9")
        engine.recover()
        engine.step()
        life = (await client.get(f"/v1/requests/{(await task).json()['id']}")).json()
        (pause,) = life["pauses"]
        assert pause["reason"] == "rank 1 was killed by signal 9" and pause["seconds"] >= 0
        assert any("lost no token: rank 1 was killed" in line for line in life["story"])

    run(tokenizer, scenario, engine=fake_engine(tokenizer, replying([5, 0]), manual=True))


# The log alone ------------------------------------------------------------------------------------------------------


def life_of(id: str = "a", owner: str = "", **more) -> RequestLife:
    return RequestLife(
        id=id, request_id=f"req-{id}", owner=owner, model="m", endpoint="/v1/x", created=0, arrived=0.0, stream=True,
        **more,
    )  # fmt: skip


def sequence(id: str = "a/0", n: int = 600) -> SequenceRequest:
    return SequenceRequest(
        id=id, group=id, prompt=list(range(n)), sampling=Sampling(), stop=StopRule(max_tokens=9)
    )  # fmt: skip


def ended(**work) -> Finished:
    timing = Timing(queue_s=0.25, prefill_s=1.5, decode_s=2.0)
    done = {"id": "a/0", "reason": "stop", "n_tokens": 2, "timing": timing, "cached_tokens": work.get("left_at", 0)}
    return Finished(**done, drafted_tokens=4, accepted_tokens=3, work=SequenceWork(**work))


def told(log: RequestLog, clock: Clock, checks: int = 0) -> str:
    life = log.find("a", None)
    assert life is not None
    return " ".join(life_json(life, {}, clock(), checks)["story"])


def test_the_story_says_where_the_prompt_left_what_was_kept():
    clock = Clock()
    log = RequestLog(clock)
    log.begin(life_of(roles=("system", "user", "user")), [sequence()])
    log.on_batch(Batch(1, [Tokens("a/0", 0, [1, 2]), ended(left_at=512, nearest_tokens=700, chunks=2, steps=1)]))
    life = log.find("a", None)
    assert life is not None
    life.left_in = 2
    story = told(log, clock, checks=30)
    assert "512 of 600 prompt tokens were cached in memory: the nearest kept prefix has 700 tokens" in story
    assert "differs from token 512 on, in message 3 of 3 (user)" in story
    assert "prefilled in 2 chunks in 1.50 s" in story and "3 of 4 drafted tokens were accepted" in story
    assert life_json(life, {}, clock(), 0)["prefix"]["disk_tokens"] == 0
    assert "waited 0.25 s for a row" in story and "90 all-reduces of it were verified" in story


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({}, "nothing was kept that begins as this prompt does"),
        ({"left_at": 500, "nearest_tokens": 500}, "all that was kept of it"),
        ({"left_at": 599, "nearest_tokens": 900}, "all that was kept of it"),
    ],
)
def test_the_story_of_prompts_that_did_not_differ(work, said):
    clock = Clock()
    differing = []
    log = RequestLog(clock, lambda life, common: differing.append(common))
    log.begin(life_of(), [sequence()])
    log.on_batch(Batch(1, [Tokens("a/0", 0, [1]), ended(**work)]))
    assert said in told(log, clock) and differing == []


def test_the_tokens_in_common_are_handed_on_to_find_the_message():
    differing = []
    log = RequestLog(Clock(), lambda life, common: differing.append(common))
    log.begin(life_of(), [sequence()])
    log.on_batch(Batch(1, [ended(left_at=40, nearest_tokens=700)]))
    assert differing == [list(range(40))]


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("<s>be brief<u>hel", 1),
        ("<s>be brief<u>hello<a>h", 2),
        ("<s>b", 0),
        ("<s>be brief<u>hello<a>hi<u>", None),
    ],
)
def test_the_message_in_which_a_prompt_differs(text, index):
    assert message_at(text, ["be brief ", "hello", "hi"]) == index


def test_the_last_thousand_are_remembered():
    log = RequestLog(Clock())
    for number in range(MAX_LIVES + 1):
        log.begin(life_of(str(number)), [sequence(f"{number}/0", 1)])
    assert log.find("0", None) is None and log.find("1", None) is not None
    log.on_batch(Batch(1, [Tokens("0/0", 0, [1])]))  # of one that is forgotten


def test_what_was_cached_on_disk_is_told_while_the_request_runs_and_after():
    clock = Clock()
    log = RequestLog(clock)
    log.begin(life_of(), [sequence()])
    life = log.find("a", None)
    assert life is not None
    work = SequenceWork(left_at=512, nearest_tokens=512)
    runs = SequenceProgress(id="a/0", computed=512, known=600, cached_tokens=512, disk_tokens=512, work=work)
    assert row_json(life, {"a/0": runs}, clock())["disk_tokens"] == 512
    assert "512 of 600 prompt tokens were cached on disk: all" in life_json(life, {"a/0": runs}, 0, 0)["story"][-1]
    over = replace(ended(left_at=512, nearest_tokens=512), disk_tokens=512)
    log.on_batch(Batch(1, [Tokens("a/0", 0, [1, 2]), over]))
    assert row_json(life, {}, clock())["disk_tokens"] == 512
    assert life_json(life, {}, clock(), 0)["prefix"]["disk_tokens"] == 512
    assert "512 of 600 prompt tokens were cached on disk: all" in told(log, clock)


def test_rows_of_the_table():
    clock = Clock()
    log = RequestLog(clock)
    log.begin(life_of("a"), [sequence()])
    log.begin(life_of("b", owner="other"), [sequence("b/0")])
    life = log.find("a", "")
    assert life is not None and log.find("b", "") is None
    assert row_json(life, {}, clock())["state"] == "queued"
    progress = {"a/0": SequenceProgress(id="a/0", computed=300, known=600, cached_tokens=100)}
    row = row_json(life, progress, clock())
    assert (row["state"], row["prefilled"], row["cached_tokens"]) == ("prefill", 0.5, 100)
    log.on_batch(Batch(1, [Tokens("a/0", 0, [1])]))
    clock.now += 2.0
    log.on_batch(Batch(2, [Tokens("a/0", 1, [1, 1, 1, 1])]))
    row = row_json(life, progress, clock())
    assert (row["state"], row["output_tokens"], row["tokens_per_second"]) == ("decode", 5, 2.0)
    log.on_down("it is gone", True)
    assert row_json(life, {}, clock())["state"] == "paused"
    assert [life.id for life in log.latest(5, None)] == ["b", "a"] and [life.id for life in log.latest(0, "")] == ["a"]
