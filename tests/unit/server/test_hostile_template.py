"""A chat template that takes everything costs its own request only."""

from __future__ import annotations

import threading

import httpx
import psutil
from support.serving import CHAT, fake_engine, running_server

from phalanx.text.template_process import RenderLimits, TemplateRenderer
from phalanx.text.tokenizer import Tokenizer

TEMPLATE = """
{%- if messages[0].content == 'memory' %}{{ 'x' * 10**10 }}
{%- elif messages[0].content == 'time' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- else %}{{ messages[0].content }}{% endif %}"""


def test_it_is_a_400_that_names_the_template_and_other_requests_are_served_meanwhile(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer._backend, "renderer", TemplateRenderer(RenderLimits(seconds=1.0)))
    hostile = Tokenizer(tokenizer._backend, tokenizer.eos_ids, TEMPLATE)

    def ask(content: str) -> httpx.Response:
        return client.post("/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": content}]})

    with (
        running_server(hostile, fake_engine(hostile)) as running,
        httpx.Client(base_url=running.base_url, timeout=60) as client,
    ):
        before = psutil.Process().memory_info().rss
        refused: list[httpx.Response] = []
        attack = threading.Thread(target=lambda: refused.append(ask("time")))
        attack.start()
        assert [ask("hello").status_code for _ in range(5)] == [200] * 5
        attack.join(60)
        refused.append(ask("memory"))
        assert ask("hello").status_code == 200
        assert psutil.Process().memory_info().rss < before + (64 << 20)
    words = [response.json()["error"]["message"] for response in refused]
    assert [response.status_code for response in refused] == [400, 400]
    assert all("The template of --chat-template was ended" in said for said in words)
    assert "1 s of processor time" in words[0] and "MiB of memory" in words[1]
