"""Open WebUI's back end as a process, asked as its page asks: a chat with the bundled model, which has no tools.

The back end offers its own tools with every chat. Its pins leave out what it starts without (torch).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from clients.conftest import CLIENT_S, SETTINGS
from clients.demo_server import KEY, SERVED, demo_server, post
from clients.environments import variables
from support.serving import Running

from phalanx.dist.ports import free_ports

QUESTION = {"role": "user", "content": "What is phalanx?"}
PARAMETERS = {"temperature": 0, "function_calling": "native"}  # native: tools in the request, not in the prompt's text
HISTORY = {
    "messages": {
        "question": {"id": "question", "parentId": None, "childrenIds": ["answer"], **QUESTION},
        "answer": {"id": "answer", "parentId": "question", "childrenIds": [], "role": "assistant", "content": ""},
    },
    "currentId": "answer",
}


@pytest.fixture(scope="module")
def toolless() -> Iterator[Running]:
    """The bundled model as `phalanx serve demo` serves it."""
    with demo_server(tools="drop") as running:
        yield running


@pytest.fixture(scope="module")
def page(toolless, client_folder, tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of the back end's own API, signed in. Its models are the server's."""
    folder, disk, (port,) = client_folder("open-webui"), tmp_path_factory.mktemp("open-webui"), free_ports(1)
    own = {
        "HOME": str(disk),
        "DATA_DIR": str(disk),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": KEY,
        "OFFLINE_MODE": "true",
        "OPENAI_API_BASE_URL": toolless.base_url,
        "OPENAI_API_KEY": KEY,
        "ENABLE_OLLAMA_API": "False",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it loads a model of its own
    }
    words = [str(folder / "bin" / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = disk / "log"
    with log.open("wb") as output:
        environment = {**variables(folder), **SETTINGS, **own}
        process = subprocess.Popen(words, cwd=disk, env=environment, stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            eventually(lambda: is_up(client) or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-3000:]
            token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
    finally:
        process.terminate()
        process.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def eventually(look: Callable[[], Any]) -> Any:
    """What `look` returns once it returns something."""
    ends = time.monotonic() + CLIENT_S
    while not (found := look()):
        assert time.monotonic() < ends
        time.sleep(0.2)
    return found


def test_the_model_is_listed(page):
    assert [model["id"] for model in page.get("/api/models").json()["data"]] == [SERVED]


def test_a_chat_with_tools_offered(page, toolless, caplog):
    caplog.set_level("INFO", "phalanx")
    chat = {"title": "A chat", "models": [SERVED], "history": HISTORY, "messages": []}
    id = page.post("/api/v1/chats/new", json={"chat": chat}).json()["id"]
    asked = {
        "model": SERVED,
        "stream": True,
        "messages": [QUESTION],
        "params": PARAMETERS,
        "features": {"memory": True},
        "chat_id": id,
        "id": "answer",
        "session_id": "a page's",
        "background_tasks": {},
    }
    assert page.post("/api/chat/completions", json=asked).json()["status"]
    answer = eventually(lambda: answered(page, id))
    direct = post(toolless, "chat/completions", messages=[QUESTION], temperature=0)["choices"][0]["message"]["content"]
    assert (answer["content"], answer.get("error")) == (direct, None)
    assert "demo cannot call tools: those of requests are left out" in caplog.text


def answered(page: httpx.Client, id: str) -> dict[str, Any] | None:
    """The answer's message once it is done."""
    message: dict[str, Any] = page.get(f"/api/v1/chats/{id}").json()["chat"]["history"]["messages"]["answer"]
    return message if message.get("done") or message.get("error") else None
