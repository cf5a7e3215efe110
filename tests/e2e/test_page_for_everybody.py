"""The page for everybody, in a browser: axe-core finds nothing, by keyboard, for screen readers, in three sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pages import VIEWS, ask, saying

AXE = Path(__file__).parents[2] / ".venv" / "axe" / "axe.min.js"
SIZES = {"desktop": (1440, 900), "tablet": (820, 1100), "phone": (390, 844)}
pytestmark = pytest.mark.full


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
            faulty = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]
            assert faulty == [], view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def test_every_action_is_reached_by_keyboard(look: Any, hermes: Any) -> None:
    names = "(one) => one.id || one.dataset.life || one.textContent.trim() || one.getAttribute('aria-label')"
    wanted = f"""[...document.querySelectorAll('a[href], button, input, select, textarea, summary')]
        .filter((one) => one.checkVisibility() && !one.disabled).map({names})"""
    with saying(hermes, "yes") as server:
        looked = look(server.origin)
        page = looked.page
        ask(looked, "hello")
        looked.until_text(".message.model .note", "token")
        for view in VIEWS:
            page.evaluate(f"location.hash = '{view}'")
            looked.until(f"() => document.querySelector('#view-{view}').textContent.length > 20")
            page.evaluate("document.activeElement.blur()")
            expected, reached = set(page.evaluate(wanted)), set()
            for _ in range(40):
                page.keyboard.press("Tab")
                reached.add(page.evaluate(f"({names})(document.activeElement)"))
            assert expected and expected <= reached, view


def test_the_focus_stays_with_the_button_that_takes_the_others_place(look: Any, hermes: Any) -> None:
    with saying(hermes, "la " * 400, step_s=0.01) as server:
        looked = look(server.origin)
        page = looked.page
        page.fill("#question", "hello")
        page.focus("text=Send")
        page.keyboard.press("Enter")
        looked.until("() => document.activeElement.textContent === 'Stop'")
        page.keyboard.press("Enter")
        looked.until_text(".message.model .note", "Stopped.")
        assert page.evaluate("document.activeElement.textContent") == "Send"


def test_screen_readers_are_told_an_answer_once_and_an_error(look: Any, hermes: Any) -> None:
    with saying(hermes, "first this then that") as server:
        looked = look(server.origin)
        page = looked.page
        assert page.get_attribute("#said", "role") == "status"
        page.evaluate(
            "window.told = []; new MutationObserver(() => told.push(document.querySelector('#said').textContent))"
            ".observe(document.querySelector('#said'), { childList: true })"
        )
        ask(looked, "hello")
        looked.until_text("#said", "The model says: first this then that")
        assert page.evaluate("told.length") == 1
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, json={"error": "it is broken"}))
        ask(looked, "again")
        looked.until_text("#said", "it is broken")


def test_the_first_paint_is_not_kept_waiting_by_anything_else(look: Any, hermes: Any) -> None:
    with saying(hermes, "yes") as server:
        looked = look(server.origin)
        looked.until("() => performance.getEntriesByName('first-contentful-paint').length")
        found = looked.page.evaluate(
            "performance.getEntriesByType('resource').map((one) => new URL(one.name).pathname)"
        )
        assert all(path.startswith(("/page/", "/v1/")) for path in found)
