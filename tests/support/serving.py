"""Servers for tests: a tiny real tokenizer, a server on the fake engine in the event loop of a test, or in a thread.

For `unit/server` and `e2e`. The fake engine is the package's own; everything above it is real.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from phalanx.config import EngineConfig
from phalanx.http.connection_table import ConnectionLimits
from phalanx.http.listening import base_url, bind
from phalanx.http.service import HttpService
from phalanx.server.server_app import ServerApp, create_app
from phalanx.server.server_process import ServerProcess
from phalanx.server.settings.server_settings import ServerConfig
from phalanx.supervision.client import EngineClient
from phalanx.supervision.fake_engine import FAKE_INFO, FakeEngine, Script
from phalanx.text.tokenizer import Tokenizer
from phalanx.tls.trust import trust_only

MODEL = "tiny"
EOS = "<eos>"
CONFIG = ServerConfig(
    engine=EngineConfig(model="/models/tiny", max_num_seqs=16), port=0, served_model_name=(MODEL,), queue=32
)
SETTINGS: dict[str, Any] = {"memory_guard_gb": 0.2, "kv_cache_gb": 0.1, "prefix_cache_gb": 0.01}
"""Of a small `phalanx.LLM`."""
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(path: Path) -> Tokenizer:
    """A byte-level BPE of 300 tokens, which encodes every text and may split characters, with a chat template."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(EOS, special=True)],
        show_progress=False,
    )
    fast.train_from_iterator(["hello world, the quick brown fox says hello to the world"] * 4, trainer)
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    return Tokenizer.load(path)


def fake_engine(tokenizer: Tokenizer, script: Script | None = None, **options: Any) -> FakeEngine:
    """A fake engine with the tokenizer's vocabulary."""
    info = replace(FAKE_INFO, vocab_size=tokenizer.vocab_size, **options.pop("info", {}))
    return FakeEngine(info, script=script, **options)


class LoopClient(httpx.AsyncClient):
    """A client of a server in the same event loop."""

    def __init__(self, app: ServerApp, port: int, **more: Any) -> None:
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=60, **more)
        self.app = app
        self.port = port


@asynccontextmanager
async def served(
    app: ServerApp, *, limits: ConnectionLimits = ConnectionLimits(1024, 1024), send_buffer: int | None = None
) -> AsyncIterator[LoopClient]:
    """A client of this server, which is served in this event loop until the end.

    Args:
        send_buffer: bytes that the kernel takes for a client that does not read; None: as many as it likes.
    """
    async with app.running():
        await asyncio.sleep(0)  # lets the engine's start task run
        with bind("127.0.0.1", 0) as listener:
            if send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            service = HttpService(app.application.handle, [listener], limits)
            service.start()
            async with LoopClient(app, listener.getsockname()[1]) as client:
                yield client
            await service.stop()


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer, engine: EngineClient, config: ServerConfig = CONFIG, **options: Any
) -> AsyncIterator[LoopClient]:
    """A server on this engine in this event loop, and an HTTP client."""
    async with served(create_app(config, engine, tokenizer, **options)) as client:
        yield client


class Running:
    """A server in a thread: its address, event loop and engine."""

    def __init__(self, server: ServerProcess, engine: EngineClient) -> None:
        self.server = server
        self.engine = engine
        self.origin = base_url("127.0.0.1", server.port, tls=server.tls).removesuffix("/v1")
        self.base_url = f"{self.origin}/v1"

    def call(self, work: Any) -> Any:
        """Run a callable on the server's event loop and return its result."""

        async def run() -> Any:
            return work()

        return self.wait_for(run())

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's event loop and return its result."""
        assert self.server._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self.server._loop).result(120)


@contextmanager
def running_server(
    tokenizer: Tokenizer, engine: EngineClient, config: ServerConfig = CONFIG, **options: Any
) -> Iterator[Running]:
    """A server in a thread on a free port, drained at the end."""
    n_ports = 1 if config.ollama_port is None else 2
    listeners = [bind("127.0.0.1", 0) for _ in range(n_ports)]
    server = ServerProcess(config, engine, tokenizer, listeners, **options)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_ended()), daemon=True)
    with ExitStack() as sockets:
        for listener in listeners:
            sockets.enter_context(listener)
        thread.start()
        running = Running(server, engine)
        verify = True if config.ssl_certfile is None else trust_only(Path(config.ssl_certfile))
        with httpx.Client(base_url=running.origin, timeout=60, verify=verify) as client:
            while not _is_healthy(client):
                assert thread.is_alive()
                time.sleep(0.05)  # polling without a pause would take a core from the starting ranks
        try:
            yield running
        finally:
            server.drain()
            thread.join(120)
            assert not thread.is_alive(), "the server did not stop"


def _is_healthy(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):  # a busy machine may let the connection miss a short deadline
        return client.get("/health").status_code == 200
    return False


def sse(text: str) -> list[Any]:
    """The events of a stream: parsed JSON, or the string "[DONE]"; comments are left out."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
