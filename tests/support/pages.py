"""Pages in a real browser, and what went wrong in them. Needs chromium, which `make rig` installs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from support.scripted_model import ScriptedEngine
from support.serving import CONFIG, Running, running_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 60_000  # for what takes milliseconds on a machine that is not busy
VIEWS = ("try", "now", "requests", "events")


class Looked:
    """A page, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # a 401 is no fault of the page
            self.wrong.append(message.text)

    def until(self, condition: str, arg: Any = None) -> None:
        """Wait until a function of JavaScript says yes."""
        self.page.wait_for_function(condition, arg=arg)

    def until_text(self, selector: str, text: str) -> None:
        """Wait until an element has this text in it."""
        found = "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)"
        self.until(found, [selector, text])


@contextmanager
def looking() -> Iterator[Callable[..., Looked]]:
    """Opens pages, none of which may have an error at the end. Skips the test where there is no browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make venv")
    binary = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if binary is None:
        pytest.skip("there is no chromium: make rig")
    opened: list[Looked] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])

        def look(url: str, **options: Any) -> Looked:
            looked = Looked(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}).new_page())
            looked.page.goto(url)
            opened.append(looked)
            return looked

        yield look
        browser.close()
    assert [wrong for looked in opened for wrong in looked.wrong] == []


@contextmanager
def saying(tokenizer: Any, *answers: str, step_s: float = 0.0, **settings: Any) -> Iterator[Running]:
    """A server that gives these answers, one after the other."""
    engine = ScriptedEngine(tokenizer, [f"{answer}<|im_end|>" for answer in answers], step_s=step_s)
    with running_server(tokenizer, engine, replace(CONFIG, **settings)) as running:
        yield running


def ask(looked: Looked, text: str) -> None:
    """Type a message and send it."""
    looked.page.fill("#question", text)
    looked.page.press("#question", "Enter")


def stand_in(page: Any, parts: Callable[[], dict[str, Any]], answer: Callable[[], str]) -> None:
    """Answer the page's requests in the server's place."""
    life = lambda text: {"id": text, "story": [text], "state": text, "model": text, "endpoint": text}  # noqa: E731

    def handle(route: Any) -> None:
        url, text = route.request.url, answer()
        if "/overview/events" in url:
            route.fulfill(content_type="text/event-stream", body=f"event: snapshot\ndata: {json.dumps(parts())}\n\n")
        elif url.endswith("/v1/models"):
            route.fulfill(json={"data": [{"id": text}]})
        elif "/v1/requests/" in url:
            route.fulfill(json=life(text))
        else:
            pieces = [
                {"choices": [{"delta": {"reasoning_content": text}}]},
                {"choices": [{"delta": {"content": text}}]},
                {"error": {"message": text}},
            ]
            body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
            route.fulfill(content_type="text/event-stream", headers={"x-request-id": "req_1"}, body=body)

    page.route("**/v1/**", handle)
