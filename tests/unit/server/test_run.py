"""The server as a process: binding, the ready line, draining, failing to start."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, fake_engine, running_server, sse

from phalanx.errors import ConfigError, ExitCode, ModelError, ModelUnsupported
from phalanx.server.defaults import read_defaults
from phalanx.server.parsed import GenerationDefaults
from phalanx.server.run import base_url
from phalanx.server.start import bind, serve
from phalanx.supervision.client import FakeEngine, replying


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_the_socket_has_the_tcp_protocol_number():
    """Else asyncio leaves Nagle's algorithm on for its connections (seen: 40 ms per chunk)."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_wrong_host_is_named():
    with pytest.raises(ConfigError, match="--host no such host"):
        bind("no such host", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("studio.local", "http://studio.local:8000/v1"),
    ],
)
def test_base_url(host, url):
    assert base_url(host, 8000) == url


def test_ready_line(tokenizer, capfd):
    with running_server(tokenizer, fake_engine(tokenizer)) as running:
        pass
    assert capfd.readouterr().out == f"phalanx is ready: {running.base_url} (model tiny)\n"


def test_draining_lets_running_requests_end_and_takes_no_new_ones(tokenizer):
    engine = fake_engine(tokenizer, replying([5, 5, 5, 0]), manual=True)
    with running_server(tokenizer, engine) as running, httpx.Client(base_url=running.origin, timeout=60) as client:
        answer: list[httpx.Response] = []
        request = threading.Thread(
            target=lambda: answer.append(httpx.post(f"{running.base_url}/chat/completions", json=CHAT))
        )
        request.start()
        while not running.call(lambda: engine.received):
            pass
        running.server.drain()
        while (refused := client.post("/v1/chat/completions", json=CHAT)).status_code != 503:
            pytest.fail(refused.text)
        assert "shutting down" in refused.json()["error"]["message"]
        for _ in range(4):
            running.call(engine.step)
        request.join(60)
    assert answer[0].status_code == 200
    assert answer[0].json()["usage"]["completion_tokens"] == 4


def test_requests_that_outlast_the_drain_get_an_error(tokenizer):
    engine = fake_engine(tokenizer, manual=True)
    config = replace(CONFIG, drain_seconds=0.05)
    with (
        running_server(tokenizer, engine, config) as running,
        httpx.stream("POST", f"{running.base_url}/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        chunks = response.iter_text()
        next(chunks)
        running.server.drain()
        *_, error, done = sse("".join(chunks))
    assert done == "[DONE]" and "shutting down" in error["error"]["message"]
    assert engine.state.phase == "stopped"


class Broken(FakeEngine):
    """Cannot start: raises, or dies for good before it was ready."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(autostart=False)
        self._error = error

    async def start(self) -> None:
        await super().start()
        if self._error is not None:
            raise self._error
        self._state = replace(self._state, phase="failed", reason="too big", exit_code=ExitCode.MEMORY)
        self.emit_down("too big", will_restart=False)


def test_an_engine_that_cannot_start_ends_the_server(tokenizer, capfd):
    assert serve(CONFIG, Broken(None), lambda: tokenizer) == ExitCode.MEMORY
    assert "phalanx could not start: too big" in capfd.readouterr().err
    for error in (ModelUnsupported("mamba"), ZeroDivisionError("a bug")):
        with pytest.raises(type(error)):
            serve(CONFIG, Broken(error), lambda: tokenizer)


def test_generation_defaults(tmp_path):
    assert read_defaults(tmp_path) == GenerationDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps({"temperature": 0.7, "top_k": None, "top_p": 0.8, "do_sample": True, "eos_token_id": [1]})
    )
    assert read_defaults(tmp_path) == GenerationDefaults(temperature=0.7, top_p=0.8)
    for broken in ("{", '{"temperature": "hot"}'):
        file.write_text(broken)
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            read_defaults(tmp_path)


def test_the_fake_engine_stops_in_order(tokenizer):
    engine = fake_engine(tokenizer)
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    assert engine.state.phase == "stopped"
