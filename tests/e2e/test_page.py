"""The page in a real browser: chats, keys, restarts, a gateway whose replica fails, keyboard, contrast, three sizes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from processes import SUSPICIOUS, Process, are_up, gateway, process, stub, wait_until
from support.gateways import running_gateway
from support.pages import VIEWS, Looked, ask, looking, saying
from support.scripted_model import tokenizer_of
from support.serving import CONFIG, fake_engine, make_tokenizer, running_server

AXE = Path(__file__).parents[2] / ".venv" / "axe" / "axe.min.js"
SMALL = ("--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1", "--log-level", "warning")
SIZES = {"desktop": (1440, 900), "tablet": (820, 1100), "phone": (390, 844)}
pytestmark = pytest.mark.full


@pytest.fixture
def look() -> Iterator[Callable[..., Looked]]:
    with looking() as look:
        yield look


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of("hermes", tmp_path_factory.mktemp("hermes"))


@contextmanager
def serving_demo(*arguments: str) -> Iterator[tuple[Process, str]]:
    """A server of the demo model as a process, and its origin."""
    port = () if "--port" in arguments else ("--port", "0")
    with process("-m", "phalanx", "serve", "demo", *SMALL, *port, *arguments) as server:
        yield server, server.first.split()[3].removesuffix("/v1")


# Try ----------------------------------------------------------------------------------------------------------------


def test_a_chat_is_typed_streamed_stopped_and_retried(look: Any, hermes: Any) -> None:
    answer = "# A title\n\nwith **strong** words and `code`:\n\n- one\n- two\n"
    with saying(hermes, answer, "la " * 400, "at last", step_s=0.002) as server:
        looked = look(server.origin)
        page = looked.page
        ask(looked, "hello <b>you</b>")
        looked.until_text(".message.model .prose h3", "A title")
        looked.until_text(".message.model .note", "token")
        assert page.inner_text(".message.user .plain") == "hello <b>you</b>"
        assert page.inner_text(".message.model .prose strong") == "strong"
        assert page.locator(".message.model .prose li").all_inner_texts() == ["one", "two"]
        ask(looked, "again")
        looked.until_text(".message.model:last-child .prose", "la la la")
        page.click("text=Stop")
        looked.until_text(".message.model:last-child .note", "Stopped.")
        page.click("text=Retry")
        looked.until_text(".message.model:last-child .prose", "at last")
        looked.until_text(".message.model:last-child .note", "token")
        assert page.locator(".message").count() == 4
        page.reload()
        assert page.locator(".message").count() == 4, "a conversation stays in the browser"
        page.click("text=New conversation")
        assert page.locator(".message").count() == 0


def test_reasoning_is_folded_and_the_life_of_an_answer_opens(look: Any, hermes: Any) -> None:
    with saying(hermes, "<think>first this</think>then that") as server:
        looked = look(server.origin)
        page = looked.page
        ask(looked, "why")
        looked.until_text(".message.model .note", "token")
        assert page.locator(".reasoning .prose").is_hidden()
        page.click(".reasoning summary")
        assert page.inner_text(".reasoning .prose").strip() == "first this"
        page.click("text=Why so long?")
        looked.until_text("#life .story", "prompt tokens were cached")
        page.keyboard.press("Escape")
        assert page.locator("#life").is_hidden()


def test_requests_are_opened_by_keyboard(look: Any, hermes: Any) -> None:
    with saying(hermes, "yes") as server:
        looked = look(server.origin)
        page = looked.page
        ask(looked, "hello")
        looked.until_text(".message.model .note", "token")
        page.goto(f"{server.origin}/#requests")
        looked.until_text("#view-requests", "finished")
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.dataset.life"):
                break
        page.keyboard.press("Enter")
        looked.until_text("#life .story", "prompt tokens were cached")


def test_a_wrong_key_and_then_the_right_one(look: Any, hermes: Any) -> None:
    with saying(hermes, "let in", api_key=("right-key",)) as server:
        looked = look(server.origin)
        page = looked.page
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong-key")
        page.press("#key", "Enter")
        looked.until_text("#key-wrong", "Incorrect API key")
        page.fill("#key", "right-key")
        page.press("#key", "Enter")
        looked.until_text("#state", "tiny")
        ask(looked, "hello")
        looked.until_text(".message.model .prose", "let in")
        assert page.evaluate("Object.keys(localStorage).every((name) => !localStorage[name].includes('right-key'))")


# What the machines do -----------------------------------------------------------------------------------------------


def test_a_restart_is_seen_and_the_stream_goes_on(look: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    engine = fake_engine(tokenizer, step_s=0.01)
    with running_server(tokenizer, engine) as server:
        looked = look(server.origin)
        looked.until_text("#state", "tiny")
        ask(looked, "hello")
        looked.until("() => document.querySelector('.message.model .prose')?.textContent.length > 5")
        server.call(lambda: engine.crash("rank 1 was killed by signal 9"))
        looked.until_text("#state", "restarting")
        server.call(engine.recover)
        looked.until("() => document.querySelector('#state').textContent === 'tiny'")
        looked.page.goto(f"{server.origin}/#events")
        looked.until_text(".events", "rank 1 was killed by signal 9")
        looked.until_text(".events", "started again and served after")
        looked.page.goto(f"{server.origin}/#requests")
        looked.until(
            "() => [...document.querySelectorAll('#view-requests td')].some((one) => one.textContent === '0, 1')"
        )


def test_a_gateway_whose_replica_fails_while_the_page_looks_on(look: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    config = replace(CONFIG, api_key=("inner-key",), admin_key="inner-admin")
    engines = [fake_engine(tokenizer, step_s=0.02) for _ in range(2)]
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(tokenizer, engine, config)) for engine in engines]
        origin = stack.enter_context(
            running_gateway(
                *(server.origin for server in servers), worker_key="inner-key", worker_admin_key="inner-admin"
            )
        )
        looked = look(origin)
        looked.until_text("#state", "gateway")
        ask(looked, "hello")
        looked.until("() => document.querySelector('.message.model .prose')?.textContent.length > 5")
        looked.page.evaluate("location.hash = 'requests'")
        looked.until_text("#view-requests tbody", "decode")
        broken = next(i for i, server in enumerate(servers) if server.call(lambda i=i: bool(engines[i]._rows)))
        servers[broken].call(lambda: engines[broken].crash("rank 0 was killed by signal 9"))
        name = servers[1 - broken].origin.removeprefix("http://")
        looked.until_text("#view-requests tbody tr td:nth-child(4)", name)
        looked.page.evaluate("location.hash = 'now'")
        looked.until_text("#view-now", "answers 503 to /health")
        length = looked.page.evaluate("document.querySelector('.message.model .prose').textContent.length")
        looked.until(
            "(length) => document.querySelector('.message.model .prose').textContent.length > length", arg=length
        )


def test_a_gateway_whose_replicas_process_is_killed_while_the_page_looks_on(look: Any) -> None:
    with ExitStack() as stack:
        stubs = [stack.enter_context(stub("0.05", "100000", module="support.token_replica")) for _ in range(2)]
        urls = ",".join(url for _, url in stubs)
        _, origin = stack.enter_context(gateway("--worker-urls", urls, "--worker-admin-key", "adm", *SUSPICIOUS))
        wait_until(lambda: are_up(origin, 2))
        looked = look(origin)
        page = looked.page
        looked.until_text("#state", "gateway")
        ask(looked, "hello")
        looked.until("() => document.querySelector('.message.model .prose')?.textContent.length > 5")
        page.evaluate("location.hash = 'requests'")
        looked.until_text("#view-requests tbody", "decode")
        had = page.inner_text("#view-requests tbody tr td:nth-child(4)")
        names = [url.removeprefix("http://") for _, url in stubs]
        other = names[1 - names.index(had)]
        stubs[names.index(had)][0].signal(signal.SIGKILL)
        looked.until_text("#view-requests tbody tr td:nth-child(4)", other)
        length = page.evaluate("document.querySelector('.message.model .prose').textContent.length")
        longer = "(length) => document.querySelector('.message.model .prose').textContent.length > length"
        looked.until(longer, arg=length)
        page.evaluate("location.hash = 'now'")
        looked.until_text("#view-now tbody tr:first-child", "cannot be reached")
        assert had in page.inner_text("#view-now tbody tr:first-child"), "the bad one comes first"
        page.evaluate("location.hash = 'events'")
        looked.until_text(".events", f"moved from {had} to {other}")
        looked.until_text(".events", "It went on after")
        looked.until_text(".events", f"The replica {had} cannot be reached")
        page.evaluate("location.hash = 'try'")
        page.click("text=Stop")
        looked.until_text(".message.model .note", "Stopped.")


def test_the_page_finds_a_server_again_whose_process_was_killed(look: Any) -> None:
    with ExitStack() as stack:
        server, origin = stack.enter_context(serving_demo())
        looked = look(origin)
        looked.until_text("#state", "demo")
        server.signal(signal.SIGKILL)
        looked.until_text("#state", "no connection")
        server.process.wait(120)
        stack.enter_context(serving_demo("--port", origin.rpartition(":")[2]))
        looked.until_text("#state", "demo")
        ask(looked, "What is phalanx?")
        looked.until_text(".message.model .note", "token")


def test_a_group_of_two_ranks_of_which_one_is_killed(look: Any, tmp_path: Path) -> None:
    with serving_demo("--tp", "2", "--prefix-cache-dir", str(tmp_path)) as (_, origin):
        looked = look(origin)
        page = looked.page
        ask(looked, "What is phalanx?")
        looked.until_text(".message.model .note", "token")
        page.evaluate("location.hash = 'now'")
        looked.until_text("#view-now", "2 ranks")
        looked.until_text("#view-now", "all-reduce of 1 MiB")
        looked.until_text("#view-now .legend", "Kept prefixes on disk")
        ranks = "#view-now .hosts tbody tr"
        assert page.locator(f"{ranks} td:first-child").all_inner_texts() == ["0", "1"]
        os.kill(int(page.inner_text(f"{ranks}:nth-child(2) td:last-child").replace(",", "")), signal.SIGKILL)
        page.evaluate("location.hash = 'events'")
        looked.until_text(".events", "rank 1")
        looked.until_text(".events", "started again and served after")
        looked.until("() => document.querySelector('#state').textContent === 'demo'")
        page.evaluate("location.hash = 'try'")
        ask(looked, "And what is a rank?")
        looked.until_text(".message.model:last-child .note", "token")


# For everybody ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nobody_is_kept_out_and_nothing_sticks_out(look: Any, hermes: Any, size: str, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not there: make rig, with npm")
    width, height = SIZES[size]
    answer = (
        "## A title\n\n1. one\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nprint('a long line' * 30)\n```\n"
    )
    with saying(hermes, f"<think>so</think>{answer}") as server:
        engine: Any = server.engine
        looked = look(server.origin, viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True)
        page = looked.page
        ask(looked, "show me")
        looked.until_text(".message.model .note", "token")
        server.call(lambda: engine.crash("rank 1 was killed by signal 9"))
        server.call(engine.recover)
        looked.until_text("#state", "tiny")
        for view in VIEWS:
            page.evaluate(f"location.hash = '{view}'")
            looked.until(f"() => document.querySelector('#view-{view}').textContent.length > 20")
            if view == "now":
                looked.until_text("#view-now", "Rows")  # known again after the restart
            page.evaluate(AXE.read_text())
            found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
            serious = [
                (one["id"], [node["html"] for node in one["nodes"]])
                for one in found["violations"]
                if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_the_first_paint_is_not_kept_waiting_by_anything_else(look: Any, hermes: Any) -> None:
    with saying(hermes, "yes") as server:
        looked = look(server.origin)
        looked.until("() => performance.getEntriesByName('first-contentful-paint').length")
        found = looked.page.evaluate(
            "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
        )
        assert all(path.startswith(("/page/", "/v1/")) for path in found)
