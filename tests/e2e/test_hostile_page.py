"""Hostile texts in every field that a client, a model or a replica controls: the page shows them, as texts."""

from __future__ import annotations

from typing import Any

import pytest
from support.pages import VIEWS, ask, saying, stand_in

pytestmark = pytest.mark.full
ALLOWED = set(
    "SECTION DIV P SPAN H2 H3 H4 H5 H6 UL OL LI DL DT DD B STRONG TABLE THEAD TBODY TR TH TD ARTICLE BUTTON FORM LABEL "
    "TEXTAREA DETAILS SUMMARY SELECT OPTION INPUT TIME CODE PRE EM DEL A HR BR BLOCKQUOTE NOSCRIPT".split()
)
"""Elements that the page makes."""


SEEDS = (
    "<script>hit()</script>", "<img src=x onerror=hit()>", "<svg onload=hit()>", "<iframe srcdoc='<script>hit()'>",
    "\"><script>hit()</script>", "'-hit()-'", "javascript:hit()", "[x](javascript:hit())", "![x](http://evil.test/x.png)",
    "[x](data:text/html,<script>hit()</script>)", "[x](vbscript:hit)", "<a href=javascript:hit()>x</a>",
    "</textarea><script>hit()",
    "{{hit()}}", "${hit()}", "__proto__", "constructor", "<style>*{display:none}</style>", "<base href=//evil.test>",
    "<meta http-equiv=refresh content=0;url=//evil.test>", "`<img src=x onerror=hit()>`",
    "```\n</code></pre><script>hit()\n```",
    "| a | <script>hit()</script> |\n|---|---|\n| b | c |", "# <img src=x onerror=hit()>", "\u202edesrever",
    "\x00\x1b[31m", "\ufffd" * 9,
    "a" * 5000, "**" * 3000, "`" * 3000, "[" * 3000, "> " * 500 + "x", "- " * 500 + "x", "|" * 3000,
    "http://" + "a" * 3000,
    "&lt;script&gt;", "%3Cscript%3E", "\\u003cscript\\u003e", "<math><mtext><script>hit()", "🏴‍☠️" * 50,
)  # fmt: skip
WRAPS = ("{}", "x {} y", "**{}**", "\n\n{}\n\n", "[{}](http://ok.test/)")
HOSTILE = [wrap.format(seed) for seed in SEEDS for wrap in WRAPS]


def snapshot(text: str, kind: str) -> dict[str, Any]:
    """An overview with this text in every field that a client, a model or a replica controls."""
    row = {
        "id": text, "number": 1, "model": text, "endpoint": text, "state": text, "replica": text, "prompt_tokens": 5,
        "cached_tokens": 1, "output_tokens": 2, "moves": 1, "pauses": 1, "seconds": 1.5, "first_text_seconds": 0.5,
        "drafted_tokens": 4, "accepted_tokens": 2, "total_tokens": 7, "created": 0,
    }  # fmt: skip
    server = {
        "kind": kind, "version": text, "models": [text], "phase": text, "reason": text, "restarts": 1, "limit": 16,
        "running": 1, "waiting": 0, "policy": text, "model_type": text, "dtype": text, "quantization": text,
        "kernels": text, "context": 9, "ranks": 2, "stages": 2, "backend": text, "drafts": text,
        "progress": {"phase": text, "done": 1, "total": 2},
        "measured": {"tokens_per_second": text, "ttft_seconds": 0.5, "requests": text},
        "predicted": {"tokens_per_second": 5.0, "ttft_seconds": text},
    }  # fmt: skip
    ranks = [
        {
            "rank": 0,
            "stage": 0,
            "layers": [0, 3],
            "pid": 1,
            "mismatches": 2,
            "checked_sums": 3,
            "active": 1,
            "resident": 2,
        }
    ]
    link = {
        "name": text, "carries": text, "latency_us": 5.0, "gb_per_s": 1.0, "messages": 3, "bytes": 4, "segments": 5,
        "waited_seconds": 0.5, "resent": 6, "faults": 7, "problem": text, "remedy": f"{text} `{text}`",
    }  # fmt: skip
    replica = {"name": text, "state": text, "reason": text, "models": [text], "in_flight": 1, "others": 1, "limit": 2}
    return {
        "server": server,
        f"hosts/{text}": {"ranks": ranks},
        f"replicas/{text}": replica,
        "links": [link, {"name": text, "carries": text, "faults": 0}],
        "self_test": [{"name": text, "latency_us": 5.0}],
        f"requests/{text}": row,
        "events/1": {"at": 1.0, "what": text, "cause": text, "did": text, "remedy": f"{text} `{text}`"},
    }


@pytest.mark.parametrize("kind", ["server", "gateway"])
def test_hostile_texts_are_texts_in_every_field(look: Any, hermes: Any, kind: str) -> None:
    assert len(HOSTILE) == 200
    with saying(hermes, "yes") as server:
        looked = look(f"{server.origin}/?first")
        page = looked.page
        now = [HOSTILE[0]]
        stand_in(page, lambda: snapshot(now[0], kind), lambda: now[0])
        page.evaluate("window.hits = 0; window.hit = () => { hits += 1; }")
        page.goto(f"{server.origin}/?second")
        page.evaluate(
            "window.hits = 0; window.hit = () => { hits += 1; };"
            "addEventListener('securitypolicyviolation', () => { hits += 1; })"
        )
        for text in HOSTILE:
            now[0] = text
            before = page.locator(".message").count()
            ask(looked, text[:1000] or "x")
            looked.until(f"() => document.querySelectorAll('.message.model .note.wrong').length > {before // 2}")
            if page.locator(".message").count() > 8:
                page.click("text=New conversation")
            for view in VIEWS[1:]:
                page.evaluate(f"location.hash = '{view}'")
            page.evaluate("location.hash = 'try'")
        made = page.evaluate("[...new Set([...document.querySelectorAll('main *')].map((one) => one.tagName))]")
        assert set(made) <= ALLOWED
        links = page.evaluate("[...document.querySelectorAll('main a')].map((one) => [one.href, one.rel])")
        assert all(href.startswith(("http://", "https://")) and "noopener" in rel for href, rel in links)
        assert page.evaluate("hits") == 0


def test_a_hostile_overview_is_drawn_as_text(look: Any, hermes: Any) -> None:
    text = "<img src=x onerror=hit()>"
    with saying(hermes, "yes") as server:
        looked = look(f"{server.origin}/?first")
        stand_in(looked.page, lambda: snapshot(text, "server"), lambda: text)
        for view in VIEWS[1:]:
            looked.page.goto(f"{server.origin}/?{view}#{view}")
            looked.until_text(f"#view-{view}", text)
        looked.page.goto(f"{server.origin}/?gateway#now")
        assert looked.page.locator("main img").count() == 0
