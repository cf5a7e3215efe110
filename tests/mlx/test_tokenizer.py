"""Streams of every kind of tokenizer against its decode; chat templates; threads. No model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import CHAT_TEMPLATE
from support.tokenizers_of_each_kind import BYTE_KINDS, KINDS, SAMPLES, SPECIAL, byte_level
from tokenizers import Tokenizer as Fast

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.fast_backend import read
from phalanx.text.text_stream import WindowStream
from phalanx.text.tokenizer import Tokenizer
from phalanx.text.transformers_backend import TransformersBackend, load


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer.load(make(root / kind)) for kind, make in KINDS.items()}


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.add(token) for token in ids), stream.finish()]


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_adds_up_to_decode_and_shows_whole_characters(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        if kind in BYTE_KINDS:
            assert "".join(pieces) == text
            assert all("\ufffd" not in piece for piece in pieces[:-1]) or "\ufffd" in text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), data=st.data())
def test_any_text_streams_back(text: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(BYTE_KINDS))]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_stream_as_they_decode(data: st.DataObject, skip: bool, tokenizers: dict[str, Tokenizer]) -> None:
    """Also invalid UTF-8, specials in the middle, ids beyond the vocabulary."""
    tokenizer = tokenizers[data.draw(st.sampled_from(["byte_level", "wordpiece", "unigram"]))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=25))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["llama2", "gemma"]))
def test_byte_tokens_that_are_no_text(kind: str, data: st.DataObject, tokenizers: dict[str, Tokenizer]) -> None:
    """Such a decoder turns a whole run of bytes into replacement characters for one wrong byte at its end; a stream
    has shown the characters before by then. All else is the same."""
    tokenizer = tokenizers[kind]
    some_bytes = st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98]), max_size=8)
    words = tokenizer.encode("hello the fox", add_special_tokens=False)
    ids: list[int] = []
    for run in data.draw(st.lists(some_bytes, max_size=3)):
        ids += [len(SPECIAL) + byte for byte in run] + words
    stream, whole = "".join(streamed(tokenizer, ids)), tokenizer.decode(ids)
    between = zip(stream.split("hello the fox"), whole.split("hello the fox"), strict=True)
    assert all(shown == decoded or "\ufffd" in decoded for shown, decoded in between)


def test_a_character_split_over_tokens_comes_at_once(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in BYTE_KINDS:
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("a😀b", add_special_tokens=False)
        assert len(ids) >= 6
        shown = streamed(tokenizer, ids)
        assert shown[-3:] == ["😀", "b", ""]
        assert streamed(tokenizer, ids[:-2])[-1] in ("\ufffd", "\ufffd" * 3)


def test_special_tokens_are_skipped_unless_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        hello = tokenizer.encode("hello", add_special_tokens=False)
        ids = [1, *hello, 2, 1, *hello]
        assert "<s>" not in "".join(streamed(tokenizer, ids))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode([*hello, *hello])
        shown = "".join(streamed(tokenizer, ids, skip_special_tokens=False))
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)
        assert shown.count("<s>") == 2


def test_a_long_stream_of_wrong_bytes_is_neither_held_back_nor_slow(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in BYTE_KINDS:
        stream = tokenizers[kind].stream()
        lone = next(t for t in range(tokenizers[kind].vocab_size) if tokenizers[kind].token_bytes(t) == b"\x80")
        shown = [len(stream.add(lone)) for _ in range(300)]
        assert sum(shown) >= 297


def test_a_decoder_that_changes_its_mind_shows_nothing_twice() -> None:
    """Whatever a model's own tokenizer does with its neighbours: what was shown stays, what is new is added."""
    texts = {1: "ab", 2: "c\ufffd", 3: "d"}

    def decode(ids: Sequence[int]) -> str:
        text = "".join(texts[token] for token in ids)
        return text.upper() if 3 in ids else text

    stream = WindowStream(decode, frozenset())
    assert [stream.add(1), stream.add(2), stream.add(3), stream.finish()] == ["ab", "c", "\ufffdD", ""]


# -- names of tokens -------------------------------------------------------------------------------------------------


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in BYTE_KINDS:
        tokenizer = tokenizers[kind]
        for text in SAMPLES:
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
            assert whole.removeprefix(" " if kind == "llama2" else "") == text


def test_a_token_reads_as_it_does_inside_a_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, whole in (("llama2", " hello the fox"), ("gemma", "hello the fox"), ("byte_level", "hello the fox"),
                        ("wordpiece", " hello the fox"), ("unigram", " hello the fox")):  # fmt: skip
        tokenizer = tokenizers[kind]
        names = [tokenizer.token_text(token) for token in tokenizer.encode("hello the fox", add_special_tokens=False)]
        assert len(names) > 1
        assert "".join(names) == whole, kind
    assert tokenizers["byte_level"].token_text(10**6) == ""
    assert tokenizers["byte_level"].token_text(2) == "</s>"


# -- loading ---------------------------------------------------------------------------------------------------------


def test_the_end_of_sequence_ids_are_the_models(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert Tokenizer.load(tmp_path).eos_ids == {2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 40}}))
    assert Tokenizer.load(tmp_path).eos_ids == {2, 40}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 50}))
    assert Tokenizer.load(tmp_path).eos_ids == {2, 50}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert Tokenizer.load(tmp_path).eos_ids == {2, 7, 8}
    assert Tokenizer.load(tmp_path).bos_id == 1


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelUnsupported, match=f"{tmp_path} has no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelUnsupported, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


def test_a_directory_without_a_model_is_not_asked_for_a_tokenizer_alone(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"has no tokenizer and no config\.json") as refused:
        Tokenizer.load(tmp_path)
    assert refused.value.remedy.startswith("Name the directory that holds a model")


def test_a_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    byte_level(tmp_path)
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox jumps over"
    tokenizer = Tokenizer.load(tmp_path)
    backend: Any = tokenizer._backend
    assert backend.hf.backend_tokenizer.truncation is None, "would be changed by the first call, while others run"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizers_with_an_encode_of_their_own(tmp_path: Path) -> None:
    """Kimi's knows no `add_special_tokens` (B6)."""
    plain = load(byte_level(tmp_path), trust_remote_code=False, chat_template=None)

    class Own:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __len__(self) -> int:
            return len(self.inner)

        def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
            return list(self.inner.encode(text, add_special_tokens=False))

    wrapper = SimpleNamespace(_tokenizer=Own(plain.hf), has_chat_template=False, eos_token_ids={2}, _chat_template=None)
    own = Tokenizer(TransformersBackend(wrapper, {}), frozenset({2}))
    for special in (True, False):
        assert own.encode("hello", add_special_tokens=special) == plain.encode("hello", add_special_tokens=False)
    assert "".join(streamed(own, own.encode("hé 😀"))) == "hé 😀"


# -- chat templates --------------------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "hello"}]


def test_a_conversation_is_rendered_and_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, chat_template=CHAT_TEMPLATE))
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat(USER, template_kwargs={})
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user: hello</s><s>assistant: "
    assert ids[0] == 1
    closed = tokenizer.encode_chat(USER, add_generation_prompt=False, template_kwargs={})
    assert closed == ids[: len(closed)]
    open_end = tokenizer.encode_chat(
        [*USER, {"role": "assistant", "content": "well"}], continue_final_message=True, template_kwargs={}
    )
    assert tokenizer.decode(open_end, skip_special_tokens=False).endswith("assistant: well")


def test_a_template_given_replaces_the_models_and_gets_the_variables(tmp_path: Path) -> None:
    byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    template = "{{ messages[0].content }}|{{ mood }}|{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tokenizer = Tokenizer.load(tmp_path, chat_template=template)
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    ids = tokenizer.encode_chat(USER, template_kwargs={"mood": "calm", "tools": tools})
    assert tokenizer.decode(ids) == "hello|calm|look"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ 1 + messages[0].content }}", "{{ x.y.z }}", "{% if %}",
     "{{ 1 // 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ messages.pop() }}"],
)  # fmt: skip
def test_a_template_that_fails_is_the_clients_error(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path), chat_template=template)
    with pytest.raises(InvalidRequest, match="chat template refuses") as raised:
        tokenizer.encode_chat(USER, template_kwargs={})
    assert raised.value.param == "messages"
    assert "raise_exception" not in template or "roles must alternate" in str(raised.value)


@pytest.mark.parametrize("library", [read, load])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_template_that_takes_all_memory_is_ended_and_named(replaced: bool, library: Any, tmp_path: Path) -> None:
    greedy = "{{ messages[0].content * (10**10 if messages[0].content == 'hello' else 1) }}"
    path = byte_level(tmp_path, chat_template=None if replaced else greedy)
    options = {"chat_template": None} if library is load else {}
    backend = library(path, trust_remote_code=False, **options)
    tokenizer = Tokenizer(backend, frozenset({2}), chat_template=greedy if replaced else None)
    name = "template of --chat-template" if replaced else "model's own chat template"
    with pytest.raises(InvalidRequest, match=f"The {name} was ended on these messages: it took more than 256 MiB"):
        tokenizer.encode_chat(USER, template_kwargs={})
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}], template_kwargs={})


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_dict", "conversation", "max_length"])
def test_what_steers_the_rendering_is_not_the_clients(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path, chat_template=CHAT_TEMPLATE))
    with pytest.raises(InvalidRequest, match=name):
        tokenizer.encode_chat(USER, template_kwargs={name: "{{ 7 * 7 }}"})


def test_no_template_is_said_so(tokenizers: dict[str, Tokenizer]) -> None:
    assert not tokenizers["byte_level"].has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizers["byte_level"].encode_chat(USER, template_kwargs={})


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_disturb_each_other(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    texts = [" ".join(["hello the fox", "lazy dog jumps"] * (1 + i % 40)) for i in range(160)]
    alone = [tokenizer.encode(text) for text in texts]

    def work(i: int) -> tuple[list[int], str]:
        ids = tokenizer.encode(texts[i], add_special_tokens=bool(i % 2))
        return ids, "".join(streamed(tokenizer, ids[:50]))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(len(texts))))
    assert [ids for ids, _ in results] == alone
    assert [text for _, text in results] == [tokenizer.decode(ids[:50]) for ids in alone]
