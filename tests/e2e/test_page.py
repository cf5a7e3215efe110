"""The page in a real browser: chats, keys, restarts, a gateway whose replica fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from processes import SUSPICIOUS, Process, are_up, gateway, process, stub, wait_until
from support.gateways import running_gateway
from support.pages import ask, saying, stand_in
from support.serving import CONFIG, fake_engine, make_tokenizer, running_server

SMALL = ("--memory-guard-gb", "0.2", "--kv-cache-gb", "0.1", "--log-level", "warning")
pytestmark = pytest.mark.full


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


def test_a_key_that_changes_while_the_page_looks_on_is_asked_for_again(look: Any) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        _, origin = first.enter_context(serving_demo("--api-key", "old-key"))
        looked = look(origin)
        page = looked.page
        page.fill("#key", "old-key")
        page.press("#key", "Enter")
        looked.until_text("#state", "demo")
        first.close()
        looked.until_text("#state", "no connection")
        stack.enter_context(serving_demo("--port", origin.rpartition(":")[2], "--api-key", "new-key"))
        page.wait_for_selector("#key-dialog[open]")
        looked.until_text("#key-wrong", "Incorrect API key")
        page.fill("#key", "new-key")
        page.press("#key", "Enter")
        looked.until_text("#state", "demo")
        ask(looked, "What is phalanx?")
        looked.until_text(".message.model .note", "token")


def test_a_page_that_may_not_watch_says_why(look: Any, hermes: Any) -> None:
    full = {"error": {"message": "64 pages watch already."}}
    with saying(hermes, "yes") as server:
        looked = look(f"{server.origin}/?first")
        looked.page.route("**/v1/overview/events", lambda route: route.fulfill(status=429, json=full))
        looked.page.goto(f"{server.origin}/?second")
        looked.until_text("#state", "64 pages watch already.")
        ask(looked, "hello")
        looked.until_text(".message.model .prose", "yes")


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
        looked.until_text("#view-now .links", "ranks 0, 1all-reducesgood")
        looked.until_text("#view-now .links", "ranks 0, 1plansgood")
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


def overview(**server: Any) -> dict[str, Any]:
    """A group of two stages on two hosts, of which one link is bad."""
    problem = "rank 0: FrameLost: rank 1 on b to rank 0 on a: the connection broke: Connection reset by peer."
    return {
        "server": {
            "kind": "server", "version": "0", "models": ["tiny"], "phase": "ready", "reason": "", "restarts": 1,
            "limit": 16, "running": 0, "waiting": 0, "ranks": 2, "stages": 2, "backend": "none", **server,
        },
        "links": [
            {
                "name": "rank 0 on a, rank 1 on b", "carries": "hidden states", "messages": 40, "bytes": 5 << 20,
                "waited_seconds": 1.5, "faults": 1, "problem": problem, "remedy": "Run `phalanx net test`.",
            },
            {
                "name": "rank 0 on a, rank 1 on b", "carries": "plans", "latency_us": 212, "resent": 3,
                "segments": 9000, "faults": 0,
            },
        ],
    }  # fmt: skip


def test_a_bad_link_is_first_with_its_remedy_and_what_is_not_measured_is_left_out(look: Any, hermes: Any) -> None:
    with saying(hermes, "yes") as server:
        looked = look(f"{server.origin}/?first")
        stand_in(looked.page, overview, lambda: "yes")
        looked.page.goto(f"{server.origin}/?second#now")
        looked.until_text("#view-now .links .events", "the connection broke")
        assert looked.page.inner_text("#view-now .links .remedy code") == "phalanx net test"
        head = looked.page.locator("#view-now .links th").all_inner_texts()
        assert head == ["Between", "Carries", "State", "Time", "Messages", "Received", "Waited", "Sent again", "Faults"]
        bad, good = (
            row.locator("td").all_inner_texts() for row in looked.page.locator("#view-now .links tbody tr").all()
        )
        assert bad[1:] == ["hidden states", "faulty", "–", "40", "5.0 MiB", "1.5 s", "–", "1"]
        assert good[1:] == ["plans", "good", "212 µs", "–", "–", "–", "3 of 9,000", "0"]


@pytest.mark.parametrize(
    ("server", "shown"),
    [
        ({}, None),
        ({"predicted": {"tokens_per_second": 30.0, "ttft_seconds": 0.4}}, "30.0 predicted"),
        ({"measured": {"tokens_per_second": 24.55, "ttft_seconds": 0.5}}, "24.6 measured"),
        (
            {
                "measured": {"tokens_per_second": 24.55, "ttft_seconds": 0.5},
                "predicted": {"tokens_per_second": 30.0, "ttft_seconds": 0.4},
            },
            "24.6 measured, 30.0 predicted",
        ),
    ],
)
def test_what_a_plan_predicted_stands_beside_what_was_measured(
    look: Any, hermes: Any, server: dict[str, Any], shown: str | None
) -> None:
    with saying(hermes, "yes") as running:
        looked = look(f"{running.origin}/?first")
        stand_in(looked.page, lambda: overview(**server), lambda: "yes")
        looked.page.goto(f"{running.origin}/?second#now")
        looked.until_text("#view-now", "Rows")
        facts = dict(fact.split("\n", 1) for fact in looked.page.locator("#view-now .facts .fact").all_inner_texts())
        assert facts.get("Tokens/s of a request") == shown
        assert ("First token after" in facts) == (shown is not None)
