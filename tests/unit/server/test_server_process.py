"""The server as a process: binding, the ready line, draining, failing to start."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import socket
import struct
import sys
import termios
import threading
from contextlib import ExitStack

import httpx
import pytest
from msgspec.structs import replace
from support.serving import CHAT, CONFIG, fake_engine, running_server, sse

from phalanx.errors import ConfigError, ExitCode, ModelError, ModelUnsupported
from phalanx.http import listening
from phalanx.http.connection_table import Deadlines
from phalanx.http.listening import base_url, bind
from phalanx.server.requests.generation_defaults import read_defaults
from phalanx.server.requests.parsed import GenerationDefaults
from phalanx.server.start import serve
from phalanx.supervision.fake_engine import FakeEngine, replying


def test_a_taken_port_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_a_taken_second_port_is_named(tokenizer):
    with bind("127.0.0.1", 0) as taken:
        config = replace(CONFIG, ollama_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {config.ollama_port}.*--ollama-port"):
            serve(config, fake_engine(tokenizer), lambda: tokenizer)


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
        ("0.0.0.0", "http://10.0.0.7:8000/v1"),
        ("::", "http://10.0.0.7:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("studio.local", "http://studio.local:8000/v1"),
    ],
)
def test_base_url(host, url, monkeypatch):
    monkeypatch.setattr(listening, "own_address", lambda: "10.0.0.7")
    assert base_url(host, 8000) == url


def test_the_address_for_other_machines_is_one_of_this_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((listening.own_address(), 0))


def test_a_host_that_is_another_machines_is_refused_as_that():
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.9 is not an address of this machine"):
        bind("192.0.2.9", 0)


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("0.0.0.0:8001", "Use --host 0.0.0.0 --port 8001."),
        ("http://127.0.0.1:8001/v1", "Use --host 127.0.0.1 --port 8001."),
        ("http://127.0.0.1", "Use --host 127.0.0.1."),
        ("no such host", "Use 127.0.0.1 or 0.0.0.0."),
    ],
)
def test_a_url_or_a_port_in_host_is_answered_with_the_flags(host, remedy):
    with pytest.raises(ConfigError, match="is not an address") as refused:
        bind(host, 0)
    assert refused.value.remedy == remedy


def test_a_certificate_without_its_key_is_answered_with_the_flag(tmp_path):
    (tmp_path / "server.pem").write_text("no key is in here")
    with pytest.raises(ConfigError) as refused:
        listening.server_context(tmp_path / "server.pem", None)
    assert refused.value.remedy.endswith("A key in a file of its own goes with --ssl-keyfile.")


def test_the_ready_line_is_the_last(tokenizer, capfd, caplog):
    caplog.set_level("INFO")
    with running_server(tokenizer, fake_engine(tokenizer)) as running:
        pass
    ready = f"phalanx is ready: {running.base_url} (model tiny)\n"
    assert capfd.readouterr().out == ready
    assert "tool calls: none, reasoning: none" in caplog.text


def test_a_second_port_serves_the_same_within_the_same_limits(tokenizer, capfd):
    config = replace(CONFIG, ollama_port=0, api_key=("secret",), max_connections=3, max_connections_per_address=3)
    patient = Deadlines(header_s=600.0)
    with running_server(tokenizer, fake_engine(tokenizer), config, deadlines=patient) as running, ExitStack() as stack:
        (port,) = running.server.further_ports
        second = f"http://127.0.0.1:{port}"
        for origin in (running.origin, second):
            assert httpx.get(f"{origin}/v1/models", timeout=60).status_code == 401
            models = httpx.get(f"{origin}/api/tags", headers={"x-api-key": "secret"}, timeout=60)
            assert [model["name"] for model in models.json()["models"]] == ["tiny"]

        def wait_for(n_held):
            while running.call(lambda: running.server.service.table.held) != n_held:
                pass

        idle = []
        wait_for(0)  # the clients above have left
        for at, n_held in ((running.server.port, 1), (port, 2), (port, 3), (running.server.port, 3), (port, 3)):
            idle.append(stack.enter_context(socket.create_connection(("127.0.0.1", at), timeout=60)))
            if len(idle) > 3:
                assert idle[len(idle) - 4].recv(1) == b"", "the oldest makes way, whichever port it is at"
            wait_for(n_held)
    said = capfd.readouterr().out.splitlines()
    assert said[-2:] == [f"for Ollama's clients: {second}", f"phalanx is ready: {running.base_url} (model tiny)"]
    for at in (running.server.port, port):
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", at), timeout=60)


def test_the_log_says_who_sent_a_wrong_admin_key_and_not_who_the_sender_says_he_is(tokenizer, caplog):
    config = replace(CONFIG, admin_key="a long admin key")
    headers = {"X-Forwarded-For": "192.0.2.6", "X-Phalanx-Migration": "wrong"}
    with running_server(tokenizer, fake_engine(tokenizer), config) as running:
        answer = httpx.post(f"{running.base_url}/chat/completions", json=CHAT, headers=headers, timeout=60)
    assert answer.status_code == 403
    assert "A wrong admin key came from 127.0.0.1" in caplog.text and "192.0.2.6" not in caplog.text


def test_draining_lets_running_requests_end_and_takes_no_new_ones(tokenizer, caplog):
    caplog.set_level("INFO")
    engine = fake_engine(tokenizer, replying([5, 5, 5, 0]), manual=True)
    with running_server(tokenizer, engine) as running, httpx.Client(base_url=running.origin, timeout=60) as client:
        answer: list[httpx.Response] = []
        request = threading.Thread(
            target=lambda: answer.append(httpx.post(f"{running.base_url}/chat/completions", json=CHAT, timeout=60))
        )
        request.start()
        while not running.call(lambda: engine.received):
            pass
        running.server.drain()
        while (refused := client.post("/v1/chat/completions", json=CHAT)).status_code != 503:
            pytest.fail(refused.text)
        assert "shutting down" in refused.json()["error"]["message"] and refused.headers["connection"] == "close"
        assert "draining 1 requests" in caplog.text and "a second Ctrl-C or SIGTERM ends them at once" in caplog.text
        for _ in range(4):
            running.call(engine.step)
        request.join(60)
    assert answer[0].status_code == 200
    assert answer[0].json()["usage"]["completion_tokens"] == 4


def test_draining_after_the_end_does_nothing(tokenizer):
    with running_server(tokenizer, fake_engine(tokenizer)) as running:
        running.server.drain()
        assert running.server._loop is not None
        while not running.server._loop.is_closed():
            pass
        running.server.drain()


def test_requests_that_outlast_the_drain_get_an_error(tokenizer):
    engine = fake_engine(tokenizer, manual=True)
    config = replace(CONFIG, drain_seconds=0.05)
    with (
        running_server(tokenizer, engine, config) as running,
        httpx.Client(base_url=running.base_url, timeout=60) as client,
        client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        chunks = response.iter_text()
        next(chunks)
        running.server.drain()
        *_, error, done = sse("".join(chunks))
    assert done == "[DONE]" and "shutting down" in error["error"]["message"]
    assert engine.state.phase == "stopped"


class Broken(FakeEngine):
    """Cannot start: raises, or dies for good before it was ready."""

    def __init__(self, error: Exception | None, reason: str = "too big") -> None:
        super().__init__(autostart=False)
        self._error = error
        self._reason = reason

    async def start(self) -> None:
        await super().start()
        if self._error is not None:
            raise self._error
        self._state = replace(self._state, phase="failed", reason=self._reason, exit_code=ExitCode.MEMORY)
        self.emit_down(self._reason, will_restart=False)


def test_an_engine_that_cannot_start_ends_the_server(tokenizer, capfd, caplog):
    assert serve(CONFIG, Broken(None), lambda: tokenizer) == ExitCode.MEMORY
    assert "phalanx could not start: too big" in capfd.readouterr().err
    assert serve(CONFIG, Broken(None, "tensor \x1b[2J\nforged"), lambda: tokenizer) == ExitCode.MEMORY
    assert "phalanx could not start: tensor \\x1b[2J\n  forged\n" in capfd.readouterr().err
    for error in (ModelUnsupported("mamba"), ZeroDivisionError("a bug")):
        with pytest.raises(type(error)):
            serve(CONFIG, Broken(error), lambda: tokenizer)
    assert "mamba" not in caplog.text, "the command reports it"
    assert "a bug" in caplog.text


def test_why_an_engine_could_not_start_cuts_no_word_on_a_terminal(tokenizer, monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert serve(CONFIG, Broken(None, "too big for the memory of this machine, " * 3), lambda: tokenizer)
        shown = os.read(ours, 1 << 16).decode().replace("\r", "")
    os.close(ours)
    first, second, third = shown.strip().splitlines()
    assert first == "phalanx could not start: too big for the memory of this"
    assert second == "  machine, too big for the memory of this machine, too big" and third.startswith("  for the")


class Doomed(FakeEngine):
    """Serves, and then fails for a cause that cannot change."""

    async def start(self) -> None:
        await super().start()
        self._state = replace(self._state, phase="failed", reason="the model is gone", exit_code=ExitCode.CONFIG)
        self.emit_down("the model is gone", will_restart=False)


def test_an_engine_that_fails_for_good_ends_the_server_with_its_code(tokenizer):
    """Else it would answer 503 until a person comes, and its supervisor would see nothing."""
    assert serve(CONFIG, Doomed(), lambda: tokenizer) == ExitCode.CONFIG


def test_generation_defaults(tmp_path):
    assert read_defaults(tmp_path) == GenerationDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps({"temperature": 0.7, "top_k": None, "top_p": 0.8, "do_sample": True, "eos_token_id": [1]})
    )
    assert read_defaults(tmp_path) == GenerationDefaults(temperature=0.7, top_p=0.8)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"temperature": "hot"}', "temperature"),
        ('{"temperature": true}', "temperature"),
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": -0.1}', "temperature"),
        ('{"temperature": 100.1}', "temperature"),
        ('{"top_p": 1.5}', "top_p"),
        ('{"top_p": -1}', "top_p"),
        ('{"top_k": 1.5}', "top_k"),
        ('{"top_k": -2}', "top_k"),
        ('{"top_k": 1e30}', "top_k"),
        ('{"min_p": 2}', "min_p"),
        ('{"repetition_penalty": 0}', "repetition_penalty"),
        ('{"repetition_penalty": Infinity}', "repetition_penalty"),
        ('{"repetition_penalty": [1]}', "repetition_penalty"),
    ],
)
def test_generation_defaults_that_no_request_may_have_are_refused_by_name(text, field, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{field}"):
        read_defaults(tmp_path)


EXTREMES = [
    ("temperature", 0, 100), ("top_p", 0, 1), ("top_k", -1, 1 << 31), ("min_p", 0, 1),
    ("repetition_penalty", 0.01, 100),
]  # fmt: skip


def test_generation_defaults_have_the_ranges_of_a_requests_fields(tokenizer, tmp_path):
    with (
        running_server(tokenizer, fake_engine(tokenizer)) as running,
        httpx.Client(base_url=running.base_url, timeout=60) as client,
    ):
        for field, least, most in EXTREMES:
            for value in (least, most):
                (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
                assert getattr(read_defaults(tmp_path), field) == value
                assert client.post("/chat/completions", json={**CHAT, field: value}).status_code == 200
            for value in (least - 1, most * 2):
                assert client.post("/chat/completions", json={**CHAT, field: value}).status_code == 400


def test_the_fake_engine_stops_in_order(tokenizer):
    engine = fake_engine(tokenizer)
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    assert engine.state.phase == "stopped"
