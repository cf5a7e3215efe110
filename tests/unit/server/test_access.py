"""Keys, names in the Host header, web pages of other origins, and what strangers may see."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, fake_engine, serving

from phalanx.errors import InvalidApiKey, WrongMediaType
from phalanx.http.allowed_hosts import AllowedHosts
from phalanx.http.api_keys import ApiKeys, owner_of
from phalanx.http.cross_origin import CrossOrigin
from phalanx.http.error_responses import without_paths
from phalanx.http.media_types import is_json, require_json
from phalanx.server.requests.parsed import shown_name
from phalanx.supervision.fake_engine import replying
from phalanx.types import KeepOwners, ResetPrefixCache

KEYED = replace(CONFIG, api_key=("one", "two"))
JSON = {"content-type": "application/json"}


def run(tokenizer, scenario, config=CONFIG, engine=None):
    async def main():
        fake = engine or fake_engine(tokenizer, replying([5, 0]))
        async with asyncio.timeout(60), serving(tokenizer, fake, config) as client:
            await scenario(client, fake)

    asyncio.run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"authorization": "bearer  two "},
        {"x-api-key": "two"},
        {"authorization": "Basic abc", "x-api-key": "one"},
        {"authorization": "Bearer none", "x-api-key": "one"},
    ],
)
def test_a_key_in_either_header_is_accepted(headers):
    keys = ApiKeys(("one", "two"))
    assert keys.owner(headers) in {ApiKeys((key,)).owner({"x-api-key": key}) for key in ("one", "two")}
    assert keys.may_see_details(headers)


@pytest.mark.parametrize(
    "headers",
    [{}, {"x-api-key": ""}, {"x-api-key": "on"}, {"authorization": "one"}, {"authorization": "Bearer"},
     {"x-api-key": "one two"}, {"x-api-key": "\xff"}],
)  # fmt: skip
def test_other_keys_are_not(headers):
    keys = ApiKeys(("one", "two"))
    with pytest.raises(InvalidApiKey):
        keys.owner(headers)
    assert not keys.may_see_details(headers)


def test_owners_differ_and_do_not_reveal_keys():
    keys = ApiKeys(("one", "two"))
    owners = {keys.owner({"x-api-key": key}) for key in ("one", "two")}
    assert len(owners) == 2 and not any("one" in owner or "two" in owner for owner in owners)
    assert ApiKeys(()).owner({}) == ""


@pytest.mark.parametrize(
    ("url", "method"),
    [("/v1/models", "GET"), ("/v1/chat/completions", "POST"), ("/v1/completions", "POST"), ("/tokenize", "POST"),
     ("/detokenize", "POST"), ("/reset_prefix_cache", "POST")],
)  # fmt: skip
def test_what_computes_or_changes_state_needs_a_key(tokenizer, url, method):
    async def scenario(client, engine):
        refused = await client.request(method, url, content=b"{}" if method == "POST" else None, headers=JSON)
        assert refused.status_code == 401
        assert not engine.received

    run(tokenizer, scenario, KEYED)


def test_strangers_learn_from_health_whether_it_is_well_and_no_more(tokenizer):
    async def scenario(client, engine):
        key = {"x-api-key": "two"}
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/health", headers={"x-api-key": "three"})).json() == {"status": "ok"}
        assert (await client.get("/health", headers=key)).json()["restarts"] == 0
        engine.crash("rank 1 (studio.lan, pid 77): no file /srv/ann/models/big/config.json")
        for url in ("/health", "/ping"):
            stranger = await client.get(url)
            assert (stranger.status_code, stranger.json()) == (503, {"status": "unavailable"})
        details = (await client.get("/health", headers=key)).json()
        assert details["reason"] == "rank 1 (studio.lan, pid 77): no file config.json"
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=key)
        assert refused.status_code == 503 and "/srv" not in refused.text

    run(tokenizer, scenario, KEYED)


# Names and paths -------------------------------------------------------------------------------------------------


def test_no_answer_has_the_path_of_the_model(tokenizer, tmp_path):
    path = tmp_path / "secret place" / "Qwen3-4B"
    path.mkdir(parents=True)
    config = replace(CONFIG, served_model_name=(), engine=replace(CONFIG.engine, model=str(path)))

    async def scenario(client, engine):
        for model in ("Qwen3-4B", str(path), None):
            answer = (await client.post("/v1/chat/completions", json={**CHAT, "model": model})).raise_for_status()
            assert answer.json()["model"] == "Qwen3-4B"
        refused = await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        assert refused.status_code == 404 and "Qwen3-4B" in refused.text
        seen = [await client.get(url) for url in ("/v1/models", "/v1/models/Qwen3-4B", "/metrics", "/health")]
        assert seen[0].json()["data"][0]["root"] == "Qwen3-4B"
        for response in (refused, *seen):
            assert "secret place" not in response.text

    run(tokenizer, scenario, config)


def test_names_that_were_given_are_the_only_ones(tokenizer):
    async def scenario(client, engine):
        refused = await client.post("/v1/chat/completions", json={**CHAT, "model": CONFIG.engine.model})
        assert refused.status_code == 404

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("mlx-community/Qwen3-0.6B-4bit", "mlx-community/Qwen3-0.6B-4bit"),
        ("/models/llama/", "llama"),
        ("~/llama", "llama"),
        ("a/b/c", "c"),
        ("./here", "here"),
    ],
)
def test_the_shown_name(model, name):
    assert shown_name(model) == name


def test_the_shown_name_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert shown_name("models/tiny") == "tiny"  # exists, so it is no hub id
    monkeypatch.chdir(tmp_path / "models" / "tiny")
    assert (shown_name("."), shown_name("..")) == ("tiny", "models")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /srv/ann/m/config.json.", "no file config.json."),
        ("see '/var/log/x' and (/etc/ssl/key.pem)", "see 'x' and (key.pem)"),
        ("ask http://127.0.0.1:8000/v1/models, 3 of 4 and/or more, owner/name, 1/2", None),
        ("~/models/big is missing", "big is missing"),
    ],
)
def test_paths_are_cut(text, shown):
    assert without_paths(text) == (shown or text)


# Browsers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("127.0.0.1:8000", True),
        ("10.1.2.3", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("studio.lan:8000", True),
        ("llm.example.com", True),
        ("a.inner.example.com:1", True),
        (socket.gethostname(), True),
        ("inner.example.com", False),
        ("evil.com", False),
        ("evil.com:8000", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.evil.com", False),
        ("evillocalhost", False),
        ("evil.com:80@localhost", False),
        ("[evil.com]", False),
        ("", False),
    ],
)
def test_names_of_the_server(header, accepted):
    hosts = AllowedHosts("studio.lan", ("llm.example.com", "*.inner.example.com"))
    assert hosts.accept(header) == accepted
    assert AllowedHosts("0.0.0.0", ("*",)).accept(header)


def test_a_foreign_name_is_refused_everywhere(tokenizer):
    async def scenario(client, engine):
        for method, url in [("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/x")]:
            refused = await client.request(method, url, headers={"host": "evil.com:8000"})
            assert refused.status_code == 403
            assert "'evil.com'" in refused.json()["error"]["message"] and "--allowed-hosts" in refused.text
        assert (await client.get("/health", headers={"host": "10.0.0.7:8000"})).status_code == 200

    run(tokenizer, scenario)


@pytest.mark.parametrize(
    ("sent", "is_let_in"),
    [
        ({}, True),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, True),
        ({"Content-Type": "application/problem+json", "Origin": "https://chat.example.com"}, True),
        ({"Content-Type": " "}, True),
        ({"Origin": "null"}, False),
        ({"Content-Type": "", "Origin": "https://evil.com"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Content-Type": "text/plain"}, False),
        ({"Content-Type": "application/x-www-form-urlencoded"}, True),  # curl -d
        ({"Content-Type": "application/x-www-form-urlencoded", "Origin": "null"}, False),
        ({"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "cross-site"}, False),
        ({"Content-Type": "multipart/form-data"}, False),
        ({"Content-Type": "text/plain; application/json"}, False),
        ({"Content-Type": "application/octet-stream"}, True),  # litellm's asynchronous client for Ollama
        ({"Content-Type": "application/octet-stream", "Origin": "https://evil.com"}, False),
        ({"Content-Type": "application/octet-stream", "Sec-Fetch-Site": "same-site"}, False),
        ({"Content-Type": "application/x-octet-stream"}, False),
    ],
)
def test_what_a_page_could_send_is_no_json(sent, is_let_in):
    headers = httpx.Headers(sent)
    assert is_json(headers) == is_let_in
    if is_let_in:
        require_json(headers)
    else:
        with pytest.raises(WrongMediaType, match="must be application/json"):
            require_json(headers)


def test_what_curl_sends_without_a_type_is_json_and_what_a_form_sends_is_not(tokenizer):
    form = {"content-type": "application/x-www-form-urlencoded"}

    async def scenario(client, engine):
        body = json.dumps(CHAT).encode()
        answered = await client.post("/v1/chat/completions", content=body, headers=form)
        assert answered.status_code == 200 and answered.json()["choices"]
        refused = await client.post("/v1/chat/completions", content=body, headers={**form, "origin": "null"})
        assert refused.status_code == 415
        refused = await client.post("/v1/chat/completions", data=CHAT)
        assert refused.status_code == 400 and "JSON" in refused.json()["error"]["message"]

    run(tokenizer, scenario)


def test_a_web_page_cannot_reset_the_prefix_cache(tokenizer):
    async def scenario(client, engine):
        for headers in ({"origin": "null"}, {"sec-fetch-site": "cross-site"}, {"content-type": "text/plain"}):
            assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == 415
        assert not engine.received
        for headers in (JSON, {}, {"content-type": "application/octet-stream"}):
            assert (await client.post("/reset_prefix_cache", headers=headers)).status_code == 200
        assert engine.received == [ResetPrefixCache()] * 3

    run(tokenizer, scenario)


def test_an_engine_with_prefixes_on_disk_is_told_whose_keys_are_accepted(tokenizer):
    kept = replace(CONFIG, engine=replace(CONFIG.engine, prefix_cache_dir="/cache"), api_key=("one", "two"))

    async def scenario(client, engine):
        assert engine.received[0] == KeepOwners([owner_of("one"), owner_of("two")])
        headers = {"authorization": "Bearer one"}
        assert (await client.get("/health", headers=headers)).json()["keeps_prefixes"] is True

    run(tokenizer, scenario, config=kept)
    assert ApiKeys(()).owners == [ApiKeys(()).owner({})]


PREFLIGHT = {
    "origin": "https://chat.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-mine",
}


def test_pages_of_other_origins_are_not_let_in_unless_asked_for(tokenizer):
    async def scenario(client, engine):
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await client.get("/v1/models", headers={"origin": "https://chat.example.com", "x-api-key": "one"})
        for response in (preflight, answer):
            assert not [name for name in response.headers if name.startswith("access-control")]
        assert preflight.status_code == 400
        assert "--allowed-origins https://chat.example.com lets them in" in preflight.text
        assert (await client.options("/v1/models")).status_code == 405  # no pre-flight

    run(tokenizer, scenario, KEYED)


def test_allowed_origins(tokenizer):
    async def scenario(client, engine):
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)  # without a key
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-mine"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        origin = {"origin": "https://chat.example.com"}
        assert (await client.get("/v1/models", headers=origin)).status_code == 401
        answer = await client.get("/v1/models", headers={**origin, "x-api-key": "one"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        evil = await client.options("/v1/models", headers={**PREFLIGHT, "origin": "https://evil.com"})
        assert "access-control-allow-origin" not in evil.headers
        assert evil.status_code == 400 and "--allowed-origins https://evil.com lets them in" in evil.text

    run(tokenizer, scenario, replace(KEYED, allowed_origins=("https://chat.example.com",)))


@pytest.mark.parametrize(
    ("pattern", "let_in", "refused"),
    [
        ("chrome-extension://*", "chrome-extension://abcdefgh", "moz-extension://abcdefgh"),
        ("chrome-extension://*", "chrome-extension://a", "https://chrome-extension"),
        ("https://*.example.com", "https://a.b.example.com", "https://example.com"),
        ("https://*.example.com", "https://a.example.com", "https://a.example.com.evil.com"),
        ("https://*.example.com", "https://a.example.com", "https://axexample.com"),
        ("http://localhost:*", "http://localhost:3000", "http://localhost"),
        ("https://chat.example.com", "https://chat.example.com", "https://chatxexample.com"),
        ("null", "null", "https://null"),
    ],
)
def test_a_star_in_an_origin(pattern, let_in, refused):
    origins = CrossOrigin((pattern, "https://other.example"))
    assert origins.headers({"origin": let_in})["Access-Control-Allow-Origin"] == let_in
    for origin in (refused, "https://evil.com", "*", ""):
        assert "Access-Control-Allow-Origin" not in origins.headers({"origin": origin})


def test_no_page_loads_anything_from_outside(tokenizer):
    async def scenario(client, engine):
        for url in ("/docs", "/redoc"):
            assert (await client.get(url)).status_code == 404
        assert (await client.get("/")).headers["content-type"].startswith("text/plain")
        assert (await client.get("/openapi.json")).status_code == 200

    run(tokenizer, scenario)
