"""Odd, broken and hostile requests in every dialect over HTTP: never a 500, never a hang, and the server stays right.

Bodies of clients are changed at random places, damaged as bytes, sent with odd headers and in odd pieces, and left in
mid-stream. Every answer is one that the dialect's clients understand; an error names the field.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from support.dialects import QUESTION, REPLY, SPOKEN, Spoken
from support.examples import SOAK
from support.gateways import running_gateway
from support.mutations import Sent, damaged, dressed, mutated, to_bytes
from support.scripted_model import tokenizer_of
from support.serving import CONFIG, Running, fake_engine, running_server

from phalanx.demo import MODEL_DIR
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import SequenceRequest

N = 2000 if SOAK else 100
N_REAL = 500 if SOAK else 40
EVERY = 50  # requests after which the plain question is asked
KINDS = {"changed": 60, "broken": 12, "elsewhere": 5, "left": 13, "odd_http": 10}
"""What is sent -> how often, in percent; see the methods of `Fuzz`."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
SAID = [
    "It rains.",
    "<think>\nHm.\n</think>\n\nIt rains, STOP and so on.",
    f"<think>Hm.</think>I ask.\n\n{CALL}",
    f"{CALL}\n{CALL}",
    CALL.replace("get_weather", "Bash"),
    CALL[:-30],
    '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call> so it goes',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "\\ud800", "days": 1e999}}\n</tool_call>',
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** x"}}\n</tool_call>',
    "<think>Hm, " + "and so on " * 30,
    "</think></think>\u2028\x85 🏳️‍🌈 \x00",
    "\n\n",
    "",
]
"""What the model says: texts, reasoning, calls that are whole, and such as are none."""


class Talker:
    """Says one of the texts, chosen by chance, and the plain answer to the plain question."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._last = ("", list[int]())

    def __call__(self, request: SequenceRequest, position: int) -> int:
        if self._last[0] != request.id:
            asked = self._tokenizer.decode(request.prompt, skip_special_tokens=False)
            said = REPLY if QUESTION in asked else self._rng.choice(SAID)
            if request.sampling.choice:
                said = SAID[request.sampling.choice % len(SAID)]
            self._last = (request.id, self._tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False))
        said_ids = self._last[1]
        return said_ids[position] if position < len(said_ids) else min(self._tokenizer.eos_ids)


@contextmanager
def talking(folder: Path) -> Iterator[Running]:
    """A server whose model writes reasoning and calls, on the fake engine."""
    tokenizer = tokenizer_of("hermes", folder)
    engine = fake_engine(tokenizer, Talker(tokenizer, random.Random(1)), info={"max_model_len": 1 << 15})
    with running_server(tokenizer, engine) as running:
        yield running


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with talking(tmp_path_factory.mktemp("hermes")) as running:
        yield running


@pytest.fixture(scope="module")
def before_talker(talker: Running) -> Iterator[str]:
    """A gateway before that server."""
    with running_gateway(talker.origin) as origin:
        yield origin


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    """The bundled model, with a short context: it may go on to the context's end."""
    small = {"kv_cache_gb": 0.25, "prefix_cache_gb": 0.05, "memory_guard_gb": 0.5, "max_model_len": 512}
    engine = replace(CONFIG.engine, model=str(MODEL_DIR), **small)
    with running_server(Tokenizer.load(MODEL_DIR), EngineProcess(engine), replace(CONFIG, engine=engine)) as running:
        yield running


class Fuzz:
    """Sends requests of one dialect to one server or gateway, and judges the answers."""

    def __init__(self, origin: str, spoken: Spoken, seed: int) -> None:
        self._spoken = spoken
        self._rng = random.Random(seed)
        self._origin = httpx.URL(origin)
        self._client = httpx.Client(base_url=origin, timeout=60)
        self.statuses: dict[int, int] = {}
        self.faults: list[str] = []
        self.plain = ""

    def __enter__(self) -> Fuzz:
        self._client.__enter__()
        self.plain = self._ask()
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def run(self, n: int, kinds: dict[str, int]) -> None:
        """Send so many requests.

        Args:
            kinds: what to send -> how often, in proportion.
        """
        for i in range(1, n + 1):
            (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
            getattr(self, f"_{kind}")()
            if i % EVERY == 0 or i == n:
                self._is_well()
        assert not self.faults, "\n\n".join(self.faults[:20])

    def _ask(self) -> str:
        path, body, read = self._spoken.plain
        return str(read(self._client.post(path, json=body).raise_for_status().json()))

    def samples(self) -> None:
        """What clients send is answered."""
        for path, body in self._spoken.samples:
            response = self._client.post(path, json=body)
            assert response.status_code == 200, response.text
            self._spoken.check(path.partition("?")[0], response)

    def _is_well(self) -> None:
        """The plain question has its answer, and nothing is left of the requests before."""
        assert self._ask() == self.plain
        for _ in range(600):
            health = self._client.get("/health").raise_for_status().json()
            if health["requests"]["running"] == health["requests"]["waiting"] == 0:
                return
            time.sleep(0.05)
        pytest.fail(f"requests are left: {health}")

    # Requests ------------------------------------------------------------------------------------------------------

    def _near(self) -> tuple[str, bytes]:
        """A path, and a body near one that clients send there."""
        path, body = self._rng.choice(self._spoken.samples)
        return path, to_bytes(self._rng, mutated(self._rng, body))

    def _changed(self) -> None:
        path, content = self._near()
        self._judged(path, dressed(self._rng, content, {}))

    def _broken(self) -> None:
        path, content = self._near()
        self._judged(path, dressed(self._rng, damaged(self._rng, content), {}))

    def _elsewhere(self) -> None:
        """At a path or with a method that there is not, or that takes another body."""
        path, content = self._near()
        bare = path.partition("?")[0]
        path = self._rng.choice((f"{bare}/", f"{bare}/x", f"{bare}?a=%ff&a=", f"{bare}//", self._samples_path()))
        method = self._rng.choice(("POST", "POST", "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"))
        response = self._client.request(method, path, content=content, headers={"content-type": "application/json"})
        self._count(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400 and method != "HEAD":
            self._spoken.error(response.json())

    def _samples_path(self) -> str:
        return self._rng.choice(self._spoken.samples)[0]

    def _judged(self, path: str, sent: Sent) -> None:
        headers = {name: value.encode("latin-1") for name, value in sent.headers.items()}
        content = iter(sent.pieces) if sent.pieces else sent.content
        try:
            response = self._client.post(path, content=content, headers=headers)
        except httpx.WriteError:  # refused before all of it was read
            return
        self._count(response.status_code)
        try:
            self._spoken.check(path.partition("?")[0], response)
        except (AssertionError, KeyError, ValueError) as error:
            asked = f"{path} {sent.headers} {sent.content[:3000]!r}"
            self.faults.append(f"{asked}\n{response.status_code} {response.text[:1000]}\n{error!r}")

    # Clients that leave --------------------------------------------------------------------------------------------

    def _left(self) -> None:
        """The client closes its connection, in the middle of the body or of the answer."""
        path, body = self._rng.choice(self._spoken.samples)
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        with self._connection() as connection:
            if self._rng.random() < 0.4:
                connection.sendall(data[: self._rng.randrange(len(data))])
            else:
                connection.sendall(data)
                connection.recv(self._rng.choice((1, 200, 1000)))
            if self._rng.random() < 0.5:  # with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    def _odd_http(self) -> None:
        """What no client's library sends. It is answered, or the connection is closed."""
        path, content = self._near()
        rng, size = self._rng, len(content)
        chunk = f"{size:x}\r\n".encode() + content + b"\r\n"
        framing, body = rng.choice(
            (
                (f"Content-Length: {size + 5}", content),
                (f"Content-Length: {max(0, size - 5)}", content),
                (f"Content-Length: {size}, {size}", content),
                ("Content-Length: -1", content),
                ("Content-Length: 9999999999999999999999", content),
                (f"Content-Length: {size}\r\nTransfer-Encoding: chunked", chunk + b"0\r\n\r\n"),
                ("Transfer-Encoding: chunked", chunk + b"0\r\n\r\n"),
                ("Transfer-Encoding: chunked", b"0\r\n\r\n"),
                ("Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n" + content),
                ("Transfer-Encoding: chunked", b"xyz\r\n" + content),
                ("Transfer-Encoding: chunked", chunk + b"0\r\nTrailer: x\r\n\r\n"),
                ("Transfer-Encoding: gzip, chunked", chunk + b"0\r\n\r\n"),
                ("Transfer-Encoding: chunked", chunk.replace(b"\r\n", b";ext=1\r\n", 1) + b"0\r\n\r\n"),
                ("Expect: 100-continue\r\nContent-Length: 3", b"{}\n"),
                ("X: \x00", content),
                ("Content-Type: text/plain\r\nContent-Length: 2", b"{}"),
            )
        )
        version = rng.choice(("1.1", "1.1", "1.1", "1.0", "2.0", "9"))
        head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        with self._connection() as connection:
            try:
                connection.sendall(head.encode() + body)
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                while data := connection.recv(1 << 16):
                    answer += data
            except (ConnectionResetError, BrokenPipeError):
                return
        if answer:
            status = int(answer.split(b" ", 2)[1])
            self._count(status)
            assert status < 500, (head, body[:1000], answer)

    def _connection(self) -> socket.socket:
        return socket.create_connection((self._origin.host, self._origin.port), timeout=60)

    def _count(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


@pytest.mark.grows
@pytest.mark.parametrize("name", SPOKEN)
def test_a_model_that_calls_and_reasons(talker: Running, name: str) -> None:
    with Fuzz(talker.origin, SPOKEN[name], seed=11) as fuzz:
        assert fuzz.plain == REPLY
        fuzz.samples()
        fuzz.run(N, KINDS)
    print(f"{name}: {dict(sorted(fuzz.statuses.items()))}")
    assert fuzz.statuses[200] > N / 10 and fuzz.statuses[400] > N / 10


@pytest.mark.grows
@pytest.mark.parametrize("name", SPOKEN)
def test_through_a_gateway(before_talker: str, name: str) -> None:
    with Fuzz(before_talker, SPOKEN[name], seed=13) as fuzz:
        assert fuzz.plain == REPLY
        fuzz.samples()
        fuzz.run(N // 2, KINDS)


@pytest.mark.grows
@pytest.mark.parametrize("name", SPOKEN)
def test_the_bundled_model(demo: Running, name: str) -> None:
    with Fuzz(demo.origin, SPOKEN[name], seed=12) as fuzz:
        fuzz.run(N_REAL, KINDS)
