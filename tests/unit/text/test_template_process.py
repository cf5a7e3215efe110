"""Templates that take too long, too much memory, or fail: each ends with words, and the next one is rendered."""

from __future__ import annotations

import psutil
import pytest

from phalanx.text.limited_process import LARGE
from phalanx.text.template_process import RenderLimits, TemplateLimit, TemplateRefused, TemplateRenderer

GROWS = {
    "repeated": "{{ 'x' * 10**10 }}",
    "centred": "{{ 'x'.center(10**10) }}",
    "filter": "{{ 'x' | center(10**10) }}",
    "indented": "{{ 'x\ny' | indent(10**10) }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "json": "{{ {'a': 1} | tojson(indent=10**10) }}",
    "list": "{{ [0] * 10**10 }}",
    "shifted": "{{ (2 ** (10**10)) | string }}",
    "replaced": "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "joined": "{{ ('y' * 10**6).join('x' * 10**6) }}",
    "tabs": "{{ '\t'.expandtabs(2**31 - 1) * 8 }}",
    "doubled": "{% set n = namespace(x='xx') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "appended": "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "piece by piece": "{% for i in range(99999) %}{% for j in range(999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
}  # fmt: skip

LOOPS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one operation": "{{ 3 ** (10**8) }}",
    "recursion": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
}

FAILS = {
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "broken": "{% if %}",
    "half a character": "{{ '\\ud800' }}",
}


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(RenderLimits(seconds=0.5))


def render(renderer: TemplateRenderer, template: str, content: str = "hello") -> str:
    return renderer.render(
        template,
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )


@pytest.mark.parametrize("template", GROWS.values(), ids=GROWS)
def test_a_template_that_grows_is_ended_and_the_next_one_is_rendered(renderer, template):
    before = psutil.Process().memory_info().rss
    with pytest.raises(TemplateLimit, match=r"MiB of memory|characters, more than|processor time"):
        render(renderer, template)
    assert psutil.Process().memory_info().rss < before + (64 << 20)
    assert render(renderer, "{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_computes_for_ever_is_ended_and_the_next_one_is_rendered(renderer, template):
    with pytest.raises(TemplateLimit, match=r"more than 0\.5 s of processor time"):
        render(renderer, template)
    assert render(renderer, "{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize("template", FAILS.values(), ids=FAILS)
def test_a_template_that_fails_says_how_and_its_process_serves_the_next_one(renderer, template):
    render(renderer, "x")
    (process,) = renderer._processes._idle
    with pytest.raises(TemplateRefused, match=r"\w"):
        render(renderer, template)
    assert list(renderer._processes._idle) == [process]


def test_a_process_too_large_is_ended_where_the_system_sets_no_limit(monkeypatch):
    monkeypatch.setattr(RenderLimits, "memory_for", lambda self, size: 1 << 20)
    with pytest.raises(TemplateLimit, match="more than 1 MiB of memory"):
        render(TemplateRenderer(RenderLimits(seconds=60.0)), LOOPS["loops"])


def test_a_process_that_got_no_more_memory_is_not_used_again(renderer):
    render(renderer, "x")
    (process,) = renderer._processes._idle
    with pytest.raises(TemplateLimit, match="more than 256 MiB of memory"):
        render(renderer, GROWS["list"])
    assert not process.runs and not renderer._processes._idle


def test_a_process_that_died_is_replaced(renderer):
    render(renderer, "x")
    child = psutil.Process(renderer._processes._idle[-1]._child.pid)
    child.kill()
    child.wait()
    assert render(renderer, "{{ messages[0].content }}") == "hello"


def test_long_conversations_are_rendered_and_leave_no_large_process(renderer):
    assert render(renderer, "{{ messages[0].content }}", "é" * LARGE) == "é" * LARGE
    assert not renderer._processes._idle


def test_a_template_gets_no_variable_of_the_servers_environment(renderer, monkeypatch):
    monkeypatch.setenv("PHALANX_API_KEY", "secret")
    fresh = TemplateRenderer()
    render(fresh, "x")
    assert set(psutil.Process(fresh._processes._idle[-1]._child.pid).environ()) <= {"PYTHONPATH", "LC_CTYPE"}


def test_a_process_ends_with_its_renderer():
    own = TemplateRenderer()
    render(own, "x")
    child = psutil.Process(own._processes._idle[-1]._child.pid)
    del own
    assert child.wait(120) is not None or not child.is_running()


def test_a_refusal_does_not_quote_a_whole_conversation(renderer):
    quotes = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(TemplateRefused) as raised:
        render(renderer, quotes, "x" * 10**6)
    assert len(str(raised.value)) < 2000
