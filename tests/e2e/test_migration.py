"""A stream that two real servers write in turn says what one of them says alone: greedy, seeded, with a schema, with
drafts on one of the two."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace
from support.migrating import KEY, Piece, pieces_of, request_of, resume_after, shown
from support.serving import CONFIG, running_server, sse

from phalanx.config import EngineConfig
from phalanx.demo import MODEL_DIR
from phalanx.http.stream_records import Resume
from phalanx.speculation_config import NgramSpeculation
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Count from one to ten, and again."}], "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "words": {"type": "array", "maxItems": 3}},
    "required": ["name", "age", "words"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[httpx.Client]]:
    """Clients of two servers; the second one drafts."""
    with ExitStack() as stack:
        clients = []
        for drafts in (None, NgramSpeculation(num_speculative_tokens=4, control="always")):
            engine = EngineConfig(model=str(MODEL_DIR), kv_cache_gb=0.25, prefix_cache_gb=0.05)
            engine = replace(engine, speculative_config=drafts)
            config = replace(CONFIG, engine=engine, admin_key=KEY)
            server = running_server(Tokenizer.load(MODEL_DIR), EngineProcess(engine), config)
            url = stack.enter_context(server).origin
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=120)))
        yield clients


def stream(client: httpx.Client, body: dict[str, Any], resume: Resume | None = None) -> list[Piece]:
    content, headers = request_of(body, resume)
    return pieces_of(client.post(PATH, content=content, headers=headers).raise_for_status().content, lines=False)


class Said(Struct):
    """What a choice says. Chunks have as many tokens as a step gave."""

    text: str = ""
    scored: list[str] = []  # tokens that came with their log-probabilities
    reason: str | None = None


def said(pieces: list[Piece]) -> dict[int, Said]:
    found: defaultdict[int, Said] = defaultdict(Said)
    for event in sse(shown(pieces).decode())[:-1]:
        for choice in event["choices"]:
            one = found[choice["index"]]
            one.text += choice["delta"].get("content", "")
            one.scored += [entry["token"] for entry in (choice["logprobs"] or {}).get("content", ())]
            one.reason = choice["finish_reason"]
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 1},
        {"temperature": 0.8, "seed": 4, "response_format": FORM},
    ],
    ids=["greedy", "seeded", "schema"],
)
def test_two_servers_say_together_what_one_says(servers: list[httpx.Client], fields: dict[str, Any]) -> None:
    body = {**ASK, **fields}
    determinism_key = [client.get("/health").json()["determinism_key"] for client in servers]
    assert determinism_key[0] == determinism_key[1]
    whole = stream(servers[0], body)
    pieces, moves = whole[:4], 0
    while not pieces[-1][0].endswith(b"[DONE]\n\n"):
        moves += 1
        pieces += stream(servers[moves % 2], body, resume_after(pieces, moves=moves))[:5]
    assert said(pieces) == said(whole) and moves > 1
    assert all(one.reason and (one.scored or not body.get("logprobs")) for one in said(whole).values())
    if "response_format" in fields:
        assert json.loads(said(pieces)[0].text).keys() == SCHEMA["properties"].keys()
