"""Real servers: on a free port, on the package's fake engine or on a real engine process with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.models import make_model
from support.pages import Looked, looking
from support.scripted_model import tokenizer_of
from support.serving import CONFIG, SETTINGS, Running, fake_engine, make_tokenizer, running_server

from phalanx import LLM
from phalanx.supervision.process import EngineProcess
from phalanx.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """On the fake engine: for what asks much of the server and nothing of a model."""
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with running_server(tokenizer, fake_engine(tokenizer, step_s=0.001)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny llama on disk."""
    path = tmp_path_factory.mktemp("model") / "llama"
    make_model("llama", path)
    return path


def real(path: Path) -> AbstractContextManager[Running]:
    """A server on an engine process of its own: 16 rows, 32 waiting."""
    engine = replace(CONFIG.engine, model=str(path), kv_cache_gb=0.25, prefix_cache_gb=0.05)
    return running_server(Tokenizer.load(path), EngineProcess(engine), replace(CONFIG, engine=engine))


@pytest.fixture(scope="session")
def real_server(tiny_model: Path) -> Iterator[Running]:
    """On an engine process with a random tiny llama."""
    with real(tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def frail_server(tiny_model: Path) -> Iterator[Running]:
    """As `real_server`, for tests that kill its engine."""
    with real(tiny_model) as running:
        yield running


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """Four rows."""
    with LLM(tiny_model, max_num_seqs=4, **SETTINGS) as found:
        yield found


@pytest.fixture(params=["fake", "real"])
def server(request: pytest.FixtureRequest) -> Running:
    """Both, one after the other."""
    running: Running = request.getfixturevalue(f"{request.param}_server")
    return running


@pytest.fixture
def look() -> Iterator[Callable[..., Looked]]:
    """Opens pages in a real browser."""
    with looking() as look:
        yield look


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that reasons, and calls tools in JSON between marks."""
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))
