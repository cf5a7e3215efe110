"""Chat templates as people have them: each gets messages in its form, and no message is lost in silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_of_each_kind import byte_level

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.template_files import read_templates
from phalanx.text.template_forms import Message, Render, in_parts, missing_message, roles_in_parts
from phalanx.text.template_process import TemplateRefused, TemplateRenderer
from phalanx.text.tokenizer import Tokenizer

PART = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + PART + "{% endif %}"


def turns(content: str, before: str = "", role: str = "{{ m.role }}") -> str:
    """A template that shows every message."""
    return before + "{% for m in messages %}<" + role + ">" + content + "{% endfor %}<assistant>"


ALL = {"user", "system", "assistant"}
FORMS: dict[str, tuple[str, set[str], set[str]]] = {
    "texts": (turns("{{ m.content }}"), set(), ALL),
    "trimmed texts": (turns("{{ m['content'] | trim }}"), set(), ALL),
    "parts": (turns(PART), ALL, ALL),
    "the first part": (turns("{{ m.content[0].text }}"), ALL, ALL),
    "selected parts": (
        turns("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"),
        ALL, ALL,
    ),
    "either": (turns(BOTH), set(), ALL),
    "parts of users, texts of others": (
        turns("{% if m.role == 'user' %}" + PART + "{% else %}{{ m.content }}{% endif %}"),
        {"user"}, ALL,
    ),
    "concatenated, which fails on parts": (turns("{{ ': ' + m.content }}"), set(), ALL),
    "no system role": (
        turns("{% if m.role == 'system' %}{{ raise_exception('not supported') }}{% endif %}{{ m.content }}"),
        set(), {"user", "assistant"},
    ),
    "a system role in silence": (
        turns("{% if m.role != 'system' %}{{ m.content }}{% endif %}"), set(), {"user", "assistant"}
    ),
    "roles must alternate": (
        turns("{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
              "{{ m.content }}"), set(), {"user", "assistant"},
    ),
    "in capitals": (turns("{{ m.content | upper }}"), set(), ALL),
    "as JSON": ("{{ messages | tojson }}", set(), ALL),
    "nothing": ("hello", set(), set()),
    "refuses all": ("{{ raise_exception('no') }}", set(), set()),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer()


def renders(renderer: TemplateRenderer, template: str) -> Render:
    def render(messages: list[Message]) -> str | None:
        try:
            return renderer.render(
                template, messages, add_generation_prompt=True, continue_final_message=False, variables={}
            )
        except TemplateRefused:
            return None

    return render


@pytest.mark.parametrize(("template", "parts", "shown"), FORMS.values(), ids=FORMS)
def test_the_form_that_a_template_takes_is_found(
    template: str, parts: set[str], shown: set[str], renderer: TemplateRenderer
) -> None:
    assert roles_in_parts(renders(renderer, template)) == (parts, shown)


# -- messages that are lost ------------------------------------------------------------------------------------------

TALK: list[Message] = [
    {"role": "system", "content": "  Be brief. /no_think\n"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>Greet them.</think>\n\nHello!"},
    {"role": "user", "content": "Hi\r\nagain, <b>friend</b> "},
]
SHOWS_ALL = {
    "as it is": turns("{{ m.content }}"),
    "trimmed": turns("{{ m.content | trim }}"),
    "without earlier reasoning": turns("{{ m.content.split('</think>')[-1].lstrip('\n') }}"),
    "without the switch in the system message": turns("{{ m.content | replace('/no_think', '') }}"),
    "with the system message behind": turns(
        "{% if m.role == 'user' and loop.last %}{{ messages[0].content }}\n\n{% endif %}"
        "{% if m.role != 'system' %}{{ m.content }}{% endif %}"
    ),
    "with the system message in the user's": turns(
        "{% if m.role != 'system' %}{{ (messages[0].content | trim ~ '\n\n') if loop.index0 == 1 }}"
        "{{ m.content }}{% endif %}"
    ),
    "as JSON": turns("{{ m.content | tojson }}"),
    "escaped": turns("{{ m.content | e }}"),
    "in small letters": turns("{{ m.content | lower }}"),
    "its words": turns("{{ m.content.split() | join(' ') }}"),
    "cut": turns("{{ m.content[:12] }}"),
    "as parts or a text": turns(BOTH),
    "marked for training": turns("{% generation %}{{ m.content }}{% endgeneration %}"),
}  # fmt: skip


@pytest.mark.parametrize("template", SHOWS_ALL.values(), ids=SHOWS_ALL)
def test_a_right_rendering_is_never_refused(template: str, renderer: TemplateRenderer) -> None:
    render = renders(renderer, template)
    text = render(TALK)
    assert text is not None and missing_message(TALK, text, render) is None


LOSES: dict[str, tuple[str, int]] = {
    "a system message": (turns("{% if m.role != 'system' %}{{ m.content }}{% endif %}"), 0),
    "a message but the last": (turns("{% if loop.index0 != 1 %}{{ m.content }}{% endif %}").replace("Hi", ""), 1),
    "an answer": (turns("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"), 2),
    "the last message": (turns("{% if not loop.last %}{{ m.content }}{% endif %}"), 3),
    "all in the wrong form": (turns(PART), 0),
}


@pytest.mark.parametrize(("template", "index"), LOSES.values(), ids=LOSES)
def test_a_message_that_is_lost_is_found(template: str, index: int, renderer: TemplateRenderer) -> None:
    talk = [dict(message, content=f"{i}: {message['content']}") for i, message in enumerate(TALK)]
    render = renders(renderer, template)
    text = render(talk)
    assert text is not None and missing_message(talk, text, render) == index


@pytest.mark.parametrize("lost", [None, 150])
def test_of_many_rewritten_messages_only_a_lost_one_is_found(lost: int | None, renderer: TemplateRenderer) -> None:
    render = renders(
        renderer, turns("{% if loop.index0 != " + str(lost or -1) + " %}{{ m.content | tojson }}{% endif %}")
    )
    talk: list[Message] = [{"role": "user", "content": f'"{i}"'} for i in range(200)]
    text = render(talk)
    assert text is not None and missing_message(talk, text, render) == lost


def test_a_message_without_text_is_not_missed(renderer: TemplateRenderer) -> None:
    render = renders(renderer, turns("{% if m.role == 'user' %}{{ m.content }}{% endif %}"))
    talk: list[Message] = [*TALK[1:2], {"role": "assistant", "content": " "}, {"role": "assistant"}, *TALK[3:]]
    assert missing_message(talk, render(talk) or "", render) is None


def test_only_texts_become_parts() -> None:
    messages: list[Message] = [{"role": "user", "content": [1]}, {"role": "user"}, *TALK[:2]]
    assert in_parts(messages, {"user"})[:3] == messages[:3]
    assert in_parts(messages, {"user"})[3]["content"] == [{"type": "text", "text": "Hi"}]


# -- a directory's tokenizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_a_template_that_wants_parts_gets_the_users_words(given: bool, tmp_path: Path) -> None:
    template = turns(PART)
    path = byte_level(tmp_path, chat_template=None if given else template)
    tokenizer = Tokenizer.load(path, chat_template=template if given else None)
    tokenizer.start_rendering()
    assert tokenizer.render_chat(TALK[1:2], template_kwargs={}) == "<user>Hi<assistant>"
    more = tokenizer.render_chat(
        [*TALK[1:2], {"role": "assistant", "content": "Well, "}], continue_final_message=True, template_kwargs={}
    )
    assert more == "<user>Hi<assistant>Well, "


def test_a_lost_message_is_the_requests_error(tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template=turns("{% if m.role != 'system' %}{{ m.content }}{% endif %}"))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.render_chat(TALK[1:2], template_kwargs={}) == "<user>Hi<assistant>"
    with pytest.raises(
        InvalidRequest, match=r"own chat template leaves out .* messages\[0\], whose role is system"
    ) as error:
        tokenizer.render_chat(TALK, template_kwargs={})
    assert error.value.param == "messages[0].content"


@pytest.mark.parametrize("broken", ["{% if %}", "{{ messages | no_such_filter }}", "{% for m in messages %}"])
def test_a_template_that_is_no_jinja_ends_the_start(broken: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"own chat template is broken in line 2: .*--chat-template"):
        Tokenizer.load(byte_level(tmp_path, chat_template="\n" + broken)).start_rendering()


def test_a_template_that_shows_nothing_is_said_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, chat_template="{{ bos_token + '' }}"))
    with caplog.at_level(logging.WARNING, "phalanx"):
        tokenizer.start_rendering()
    assert "own chat template does not show users' messages" in caplog.text
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        tokenizer.render_chat(TALK[1:2], template_kwargs={})


# -- where templates are ---------------------------------------------------------------------------------------------

Edit = Callable[[Path], object]


def settings(**entries: Any) -> Edit:
    return lambda path: (path / "tokenizer_config.json").write_text(json.dumps(entries))


def write(file: str, content: str | bytes) -> Edit:
    def edit(path: Path) -> None:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


JINJA, OLD, MORE = "chat_template.jinja", "chat_template.json", "additional_chat_templates/rag.jinja"
NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
PLACES: dict[str, tuple[list[Edit], dict[str, str]]] = {
    "nowhere": ([settings()], {}),
    "no settings": ([], {}),
    "in the settings": ([settings(chat_template="a")], {"default": "a"}),
    "null": ([settings(chat_template=None)], {}),
    "empty": ([settings(chat_template="")], {}),
    "only spaces": ([write(JINJA, " \n")], {}),
    "several by name": ([settings(chat_template=NAMED)], {"default": "a", "tool_use": "b"}),
    "an object of several": ([settings(chat_template={"default": "a", "rag": "c"})], {"default": "a", "rag": "c"}),
    "a file": ([write(JINJA, "f")], {"default": "f"}),
    "a file, and another in the settings": ([settings(chat_template="a"), write(JINJA, "f")], {"default": "f"}),
    "a file, and several in the settings": ([settings(chat_template=NAMED), write(JINJA, "f")], {"default": "f"}),
    "files": ([write(JINJA, "f"), write(MORE, "r")], {"default": "f", "rag": "r"}),
    "one more in a file": ([settings(chat_template="a"), write(MORE, "r")], {"default": "a", "rag": "r"}),
    "what macOS adds": ([write(JINJA, "f"), write(MORE.replace("rag", "._rag"), b"\xb0")], {"default": "f"}),
    "a processor's": ([settings(), write(OLD, '{"chat_template": "p"}')], {"default": "p"}),
    "a processor's, and another": (
        [settings(chat_template="a"), write(OLD, '{"chat_template": "p"}')],
        {"default": "a"},
    ),
    "a file with a byte order mark": ([write(JINJA, b"\xef\xbb\xbff")], {"default": "f"}),
    "a file of Windows": ([write(JINJA, "f\r\ng")], {"default": "f\r\ng"}),
}


@pytest.mark.parametrize(("edits", "found"), PLACES.values(), ids=PLACES)
def test_templates_are_found_where_they_are(edits: list[Edit], found: dict[str, str], tmp_path: Path) -> None:
    for edit in edits:
        edit(tmp_path)
    assert read_templates(tmp_path) == found


WRONG: dict[str, tuple[Edit, str]] = {
    "numbers": (settings(chat_template=[1]), "tokenizer_config.json: chat_template is neither"),
    "objects without a name": (settings(chat_template=[{"template": "a"}]), "chat_template is neither"),
    "UTF-16": (write(JINJA, "f".encode("utf-16")), "chat_template.jinja is not UTF-8"),
    "Latin-1": (write(JINJA, "é".encode("latin-1")), "chat_template.jinja is not UTF-8"),
    "a pointer of Git LFS": (write(JINJA, "version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
}


@pytest.mark.parametrize(("edit", "match"), WRONG.values(), ids=WRONG)
def test_a_template_that_cannot_be_read_is_named(edit: Edit, match: str, tmp_path: Path) -> None:
    edit(tmp_path)
    with pytest.raises(ModelUnsupported, match=match):
        read_templates(tmp_path)


def test_line_ends_of_windows_do_not_reach_the_model(renderer: TemplateRenderer) -> None:
    assert renders(renderer, "{% if true %}\r\na\r\nb{% endif %}")(TALK) == "a\nb"
