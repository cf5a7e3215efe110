"""The library `tokenizers` alone against transformers on the same files: same ids, texts and prompts. No model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import CHAT_TEMPLATE
from support.tokenizers_of_each_kind import KINDS, SAMPLES, SPECIAL, byte_level, qwen
from tokenizers import Tokenizer as Fast
from transformers.models.auto import tokenization_auto
from transformers.models.qwen2 import tokenization_qwen2

from phalanx.demo import MODEL_DIR
from phalanx.errors import ModelUnsupported
from phalanx.text import chat_template, fast_backend, qwen2_rules, transformers_backend
from phalanx.text.chat_template import FAILURES
from phalanx.text.fast_backend import FastBackend, read
from phalanx.text.tokenizer import Tokenizer
from phalanx.text.transformers_backend import TransformersBackend

TEXTS = [
    *SAMPLES,
    "<s>hello</s> <unk><tool> é and <|end|><|user|>hi",
    "<s >  </ s>",
    "Ⅷ ﬁ Å é e\u0301 \u00a0 \u200b \x00 \r\n tab\t",
    "0123456789 3.14159 1,000,000",
    "def f(x):\n    return x  # comment\n\n\n",
    "中文字符，标点。",
    "مرحبا بالعالم ",
    " " * 20 + "a" * 50,
    "don't we'll I'D they'RE",
]


def fast(path: Path) -> FastBackend:
    found = read(path, trust_remote_code=False)
    assert found is not None, "declined"
    return found


def slow(path: Path) -> TransformersBackend:
    return transformers_backend.load(path, trust_remote_code=False, chat_template=None)


def assert_same_vocabulary(mine: FastBackend, theirs: TransformersBackend) -> None:
    assert mine.vocab_size == theirs.vocab_size
    assert (mine.bos_id, mine.eos_ids, mine.special) == (theirs.bos_id, theirs.eos_ids, theirs.special)
    assert (mine.byte_level, mine.has_chat_template) == (theirs.byte_level, theirs.has_chat_template)
    assert (mine.named, mine.chat_template) == (theirs.named, theirs.chat_template)
    names = range(mine.vocab_size + 1)
    assert [mine.name_of(token) for token in names] == [theirs.name_of(token) for token in names]


def assert_same_texts(mine: FastBackend, theirs: TransformersBackend, texts: list[str]) -> None:
    for text in texts:
        for special in (True, False):
            ids = mine.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert mine.decode(ids) == theirs.decode(ids), text


# -- vocabularies and texts ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[FastBackend, TransformersBackend]]:
    root = tmp_path_factory.mktemp("pairs")
    paths = {kind: make(root / kind) for kind, make in KINDS.items()} | {"demo": MODEL_DIR}
    return {kind: (fast(path), slow(path)) for kind, path in paths.items()}


@pytest.mark.parametrize("kind", [*KINDS, "demo"])
def test_a_tokenizer_is_read_as_transformers_does(
    kind: str, pairs: dict[str, tuple[FastBackend, TransformersBackend]]
) -> None:
    mine, theirs = pairs[kind]
    assert_same_vocabulary(mine, theirs)
    assert_same_texts(mine, theirs, TEXTS)


@examples(60, soak=200)
@given(text=st.text(max_size=60), kind=st.sampled_from([*KINDS, "demo"]))
def test_any_text_has_the_same_ids(
    text: str, kind: str, pairs: dict[str, tuple[FastBackend, TransformersBackend]]
) -> None:
    assert_same_texts(*pairs[kind], [text])


@examples(60, soak=200)
@given(data=st.data(), kind=st.sampled_from([*KINDS, "demo"]))
def test_any_ids_have_the_same_text(
    data: st.DataObject, kind: str, pairs: dict[str, tuple[FastBackend, TransformersBackend]]
) -> None:
    mine, theirs = pairs[kind]
    ids = data.draw(st.lists(st.integers(0, mine.vocab_size - 1), max_size=30))
    assert mine.decode(ids) == theirs.decode(ids)


ADDED = {"content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "bos and eos to be added": {"add_bos_token": True, "add_eos_token": True},
    "objects": {"eos_token": {"__type": "AddedToken", **ADDED}, "bos_token": {"__type": "AddedToken", **ADDED}},
    "no bos": {"bos_token": None, "pad_token": "</s>", "unk_token": "<unk>"},
    "clean up": {"clean_up_tokenization_spaces": True, "model_max_length": 4},
    "prefix space": {"add_prefix_space": True, "legacy": False, "sp_model_kwargs": {}, "use_fast": True},
    "added tokens": {"added_tokens_decoder": {"2": {**ADDED, "special": True}}},
    "special tokens": {"additional_special_tokens": ["<unk>"], "extra_special_tokens": ["</s>"]},
    "saved by transformers": {"backend": "tokenizers", "is_local": True, "model_input_names": ["input_ids"]},
    "any class": {"tokenizer_class": "TokenizersBackend", "padding_side": "left", "truncation_side": "right"},
    "Llama 2's class for a file of Llama 3": {"tokenizer_class": "LlamaTokenizerFast"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_the_effect_they_have_in_transformers(name: str, tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template=CHAT_TEMPLATE, **SETTINGS[name])
    mine, theirs = fast(path), slow(path)
    assert_same_vocabulary(mine, theirs)
    assert_same_texts(mine, theirs, TEXTS)
    assert rendered(mine, USER) == rendered(theirs, USER)


@pytest.mark.parametrize("processor", ["bos", "none"])
def test_what_starts_a_text_is_the_files_matter(processor: str, tmp_path: Path) -> None:
    path = byte_level(tmp_path, add_bos_token=processor == "none")
    file = path / "tokenizer.json"
    saved = json.loads(file.read_text())
    if processor == "bos":
        saved["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        }
    file.write_text(json.dumps(saved))
    mine = fast(path)
    assert_same_texts(mine, slow(path), TEXTS)
    assert (mine.encode("hello", add_special_tokens=True)[0] == 1) == (processor == "bos")


@pytest.mark.parametrize("model_type", sorted(fast_backend.GENERAL_MODELS))
def test_some_model_types_take_the_general_class(model_type: str) -> None:
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    assert names[model_type] == "TokenizersBackend" or "mistral" in model_type or "mixtral" in model_type


def test_other_model_types_never_take_the_general_class() -> None:
    incorrect = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    assert {kind for kind in incorrect if names[kind] != "TokenizersBackend"} == fast_backend.OWN_CLASS


# -- Qwen 2 and 3 ----------------------------------------------------------------------------------------------------


def edit(path: Path, file: str, **values: Any) -> None:
    content = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**content, **values}))


OTHER = {**ADDED, "special": True, "lstrip": True}
CONFIG, SAVED, MODEL = "tokenizer_config.json", "tokenizer.json", "config.json"

QWEN: dict[str, dict[str, Any]] = {
    "all tokens named": {"pad_token": "<|endoftext|>", "unk_token": None},
    "defaults": {"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    "another class, forced": {"tokenizer_class": "PreTrainedTokenizerFast"},
}


@pytest.mark.parametrize("name", QWEN)
def test_qwens_class_builds_what_its_file_says(name: str, tmp_path: Path) -> None:
    path = qwen(tmp_path, chat_template="{{ enable_thinking }}{{ bos_token }}{{ pad_token }}", **QWEN[name])
    if "forced" in name:
        edit(path, MODEL, model_type="qwen2")
    mine, theirs = fast(path), slow(path)
    assert type(theirs.hf).__name__ == "Qwen2Tokenizer"
    assert_same_vocabulary(mine, theirs)
    special = ["<|im_start|>user\nhé <think>x</think><|im_end|>\n", "<|endoftext|>", "e\u0301 \u212b"]
    assert_same_texts(mine, theirs, [*TEXTS, *special])
    assert rendered(mine, USER) == rendered(theirs, USER)


def test_qwens_model_types_take_qwens_class() -> None:
    assert {tokenization_auto.TOKENIZER_MAPPING_NAMES[kind] for kind in qwen2_rules.MODELS} == {"Qwen2Tokenizer"}
    assert qwen2_rules.WORDS == tokenization_qwen2.PRETOKENIZE_REGEX


def edit_model(path: Path, **values: Any) -> None:
    edit(path, SAVED, model={**json.loads((path / SAVED).read_text())["model"], **values})


QWEN_DECLINED: dict[str, Callable[[Path], object]] = {
    "another normalizer": lambda path: edit(path, SAVED, normalizer=None),
    "another split": lambda path: edit(path, SAVED, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False}),
    "another decoder": lambda path: edit(path, SAVED, decoder=None),
    "another model": lambda path: edit_model(path, ignore_merges=True),
    "a number that is not the next": lambda path: edit(path, SAVED, added_tokens=[{**ADDED, "id": 999}]),
    "a token that only the file has": lambda path: edit(path, CONFIG, added_tokens_decoder={}),
    "a space in front": lambda path: edit(path, CONFIG, add_prefix_space=True),
    "another model type": lambda path: edit(path, MODEL, model_type="qwen3_5"),
}


@pytest.mark.parametrize("name", QWEN_DECLINED)
def test_another_file_of_qwens_class_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    path = qwen(tmp_path)
    fast(path)
    QWEN_DECLINED[name](path)
    assert read(path, trust_remote_code=False) is None


# -- what is left to transformers ------------------------------------------------------------------------------------

DECLINED: dict[str, Callable[[Path], object]] = {
    "no settings": lambda path: (path / CONFIG).unlink(),
    "no tokenizer.json": lambda path: (path / SAVED).unlink(),
    "no model": lambda path: (path / MODEL).unlink(),
    "a class of its own": lambda path: edit(path, CONFIG, tokenizer_class="GPT2Tokenizer"),
    "a class of its own code": lambda path: edit(path, CONFIG, auto_map={"AutoTokenizer": ["a.B", None]}),
    "a class that the model type decides": lambda path: edit(path, MODEL, model_type="qwen2"),
    "an eos that is not there": lambda path: edit(path, CONFIG, eos_token="<other>"),
    "a token that is an unknown object": lambda path: edit(path, CONFIG, eos_token={"content": "</s>"}),
    "an added token that is not there": lambda path: edit(path, CONFIG, added_tokens_decoder={"9": {"content": "x"}}),
    "an added token of another kind": lambda path: edit(path, CONFIG, added_tokens_decoder={"2": OTHER}),
    "a special token that is not there": lambda path: edit(path, CONFIG, additional_special_tokens=["<x>"]),
    "named special tokens": lambda path: edit(path, CONFIG, extra_special_tokens={"image_token": "<unk>"}),
    "a special token of the model's": lambda path: edit(path, CONFIG, image_token="<unk>"),
    "split special tokens": lambda path: edit(path, CONFIG, split_special_tokens=True),
    "a template in Python": lambda path: edit(path, CONFIG, chat_template_type="deepseek_v32"),
    "a tool parser": lambda path: edit(path, CONFIG, tool_parser_type="json_tools"),
    "a regex to be mended": lambda path: edit(path, CONFIG, fix_mistral_regex=True),
    "an unknown setting": lambda path: edit(path, CONFIG, something=1),
    "another map of special tokens": lambda path: edit(path, "special_tokens_map.json", bos_token="</s>"),
    "added tokens in a file": lambda path: edit(path, "added_tokens.json", x=7),
    "Mistral's file": lambda path: (path / "tekken.json").write_text("{}"),
    "padding": lambda path: edit(path, SAVED, padding={"strategy": "BatchLongest", "direction": "Right"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_what_transformers_might_read_otherwise_is_left_to_it(name: str, tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    fast(path)
    DECLINED[name](path)
    assert read(path, trust_remote_code=False) is None


def test_a_model_with_code_is_left_to_transformers_once_it_is_trusted(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    edit(path, MODEL, auto_map={"AutoConfig": "own.Config"})
    assert read(path, trust_remote_code=False) is not None
    assert read(path, trust_remote_code=True) is None


def test_a_file_that_the_library_cannot_read_is_named(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    edit(path, SAVED, model={"type": "novel"})
    with pytest.raises(ModelUnsupported, match="cannot be loaded"):
        Tokenizer.load(path)


# -- chat templates --------------------------------------------------------------------------------------------------

USER: list[dict[str, Any]] = [{"role": "user", "content": "hello ünïcode 東京 <b>&'\"</b>"}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    *USER,
    {"role": "assistant", "content": "well ", "reasoning": "hm", "name": None},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "assistant", "content": [{"type": "text", "text": "the answer "}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "ä<>&", "parameters": {"b": 1, "a": [1.5, None]}}}
]
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "bos": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}",
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(sort_keys=True) }}{{ documents }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n{%- for m in messages %}\n {{ m.role }}\n{% endfor %}\n",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{{ f(m.content) }}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys('a') }}{{ dict.mro is defined }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.name is defined }}{% endfor %}"
    "{{ messages[-1].reasoning }}",
    "thinking": "{{ enable_thinking }}{{ mood }}{{ add_generation_prompt }}{{ messages[-1].content }}",
    "strip": "{% for m in messages %}{{ m.content | string | trim }}\n{% endfor %}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{{ unk_token is defined }}{{ pad_token }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "refusing": "{{ raise_exception('roles must alternate') }}",
    "wrong": "{{ 1 + messages[0].content }}",
    "escaping": "{{ messages.__class__.__mro__ }}",
    "storing": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "mutating": "{{ messages.append(1) }}",
    "broken": "{% if %}",
    "deep": "{{ x.y.z }}",
}


def rendered(backend: FastBackend | TransformersBackend, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text, or the error's words. transformers' own rendering says the same as this backend's."""
    steering = {"add_generation_prompt": True, "continue_final_message": False, "chat_template": None}
    steering |= {"variables": {}, **options}
    text = said(lambda: backend.render(messages, **steering))
    if isinstance(backend, TransformersBackend):
        steering |= steering.pop("variables")
        assert text == said(lambda: backend._wrapper.apply_chat_template(messages, tokenize=False, **steering))
    return text


def said(render: Callable[[], str]) -> str:
    try:
        return render()
    except FAILURES as error:
        advice = (
            "Please either pass a chat template or the name of the template you wish to use to the `chat_template` "
        )
        return f"refused: {error or type(error).__name__}".replace(advice + "argument. ", "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_does(name: str, tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template=TEMPLATES[name])
    mine, theirs = fast(path), slow(path)
    for messages in (USER, TALK, TALK[:3], TALK[:1], []):
        for variables in ({}, {"tools": TOOLS, "mood": "calm", "documents": [{"title": "t", "text": "é"}]},
                          {"enable_thinking": False, "bos_token": "B", "x": {"y": {"z": [1, 2]}}}):  # fmt: skip
            for options in ({}, {"add_generation_prompt": False},
                            {"add_generation_prompt": False, "continue_final_message": True}):  # fmt: skip
                got = rendered(mine, messages, variables=variables, **options)
                assert got == rendered(theirs, messages, variables=variables, **options)


def test_the_clients_messages_are_not_changed(tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    before = json.dumps(TALK)
    rendered(fast(path), TALK, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(TALK) == before


NAMED = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ tools }}"},
]


@pytest.mark.parametrize("templates", [NAMED, NAMED[:1], NAMED[1:]], ids=["both", "default", "tool_use"])
def test_named_templates_are_chosen_as_transformers_does(templates: list[dict[str, str]], tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template=templates)
    mine, theirs = fast(path), slow(path)
    for variables in ({}, {"tools": TOOLS}, {"tools": []}, {"tools": None}):
        for chosen in (None, "tool_use", "{{ messages[0].role }}"):
            ours, others = (rendered(b, USER, variables=variables, chat_template=chosen) for b in (mine, theirs))
            refused = "refused: This model has multiple chat templates with no default specified!"
            assert ours == others or (ours.startswith(refused) and others.startswith(refused))


def test_a_template_file_comes_before_the_settings(tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template="from the settings")
    (path / "chat_template.jinja").write_text("from the file {{ messages[0].content }}")
    assert rendered(fast(path), USER) == rendered(slow(path), USER) == "from the file " + USER[0]["content"]


@pytest.mark.parametrize("tokens", [*fast_backend.THINKING, ("<think>",)], ids=" ".join)
def test_models_that_think_are_known_by_their_tokens(tokens: tuple[str, ...], tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template="{{ enable_thinking }}")
    saved = Fast.from_file(str(path / SAVED))
    saved.add_tokens(list(tokens))
    saved.save(str(path / SAVED))
    mine = rendered(fast(path), USER)
    assert mine == rendered(slow(path), USER) == str(tokens != ("<think>",))


def test_what_steers_the_rendering_is_what_transformers_says(tmp_path: Path) -> None:
    assert slow(byte_level(tmp_path)).reserved == chat_template.STEERING


def test_the_date_is_todays(tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template="{{ strftime_now('%Y') }}")
    assert rendered(fast(path), USER) in (str(datetime.now().year), str(datetime.now().year - 1))


# -- the way to it ---------------------------------------------------------------------------------------------------


def test_the_demo_and_models_like_it_need_no_transformers(tmp_path: Path) -> None:
    shutil.copytree(MODEL_DIR, tmp_path / "copy")
    assert isinstance(Tokenizer.load(MODEL_DIR)._backend, FastBackend)
    assert isinstance(Tokenizer.load(tmp_path / "copy")._backend, FastBackend)
    assert SPECIAL  # the tiny ones are read so as well
    edit(tmp_path / "copy", CONFIG, something=1)
    assert isinstance(Tokenizer.load(tmp_path / "copy")._backend, TransformersBackend)
