"""Tokenizers as people have them: the same ids and texts whatever the files look like, or one clear line."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from support.tokenizers_of_each_kind import TEXT, byte_level

from phalanx.errors import InvalidRequest, ModelUnsupported
from phalanx.text.tokenizer import Tokenizer

SETTINGS, SAVED, MODEL = "tokenizer_config.json", "tokenizer.json", "config.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98304\n"
SAMPLE = "the quick brown fox, naïve café — 你好 😀\n  x = 1</s>"
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
LLAMA_2 = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
UNKNOWN = {"something": 1}
"""A setting that leaves a tokenizer to transformers."""

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(scope="module")
def ids(whole: Path) -> list[int]:
    return Tokenizer.load(whole).encode(SAMPLE)


def read(path: Path, file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / file).read_text())
    return found


def put(file: str, **entries: Any) -> Edit:
    """Entries to add to a JSON file."""
    return lambda path: write(file, json.dumps({**(read(path, file) if (path / file).exists() else {}), **entries}))(
        path
    )


def write(file: str, content: str | bytes) -> Edit:
    return lambda path: (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def without(*files: str) -> Edit:
    return lambda path: [(path / file).unlink() for file in files]


def both(*edits: Edit) -> Edit:
    return lambda path: [edit(path) for edit in edits]


def with_byte_order_mark(file: str) -> Edit:
    return lambda path: write(file, b"\xef\xbb\xbf" + (path / file).read_bytes())(path)


def merges(change: Callable[[list[Any]], list[Any]]) -> Edit:
    def edit(path: Path) -> None:
        model = read(path, SAVED)["model"]
        put(SAVED, model={**model, "merges": change(model["merges"])})(path)

    return edit


def as_vocabulary_and_merges(path: Path) -> None:
    saved = read(path, SAVED)
    (path / "vocab.json").write_text(json.dumps(saved["model"]["vocab"]))
    pairs = [" ".join(pair) for pair in saved["model"]["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]))
    added = {token["content"]: token["id"] for token in saved["added_tokens"]}
    (path / "added_tokens.json").write_text(json.dumps(added))
    (path / SAVED).unlink()


SERVED: dict[str, Edit] = {
    "as it is": lambda path: None,
    "SentencePiece's decoder": put(SAVED, decoder=METASPACE),
    "Llama 2's decoder": put(SAVED, decoder=LLAMA_2),
    "no decoder": put(SAVED, decoder=None),
    "SentencePiece's decoder, left to transformers": both(put(SAVED, decoder=METASPACE), put(SETTINGS, **UNKNOWN)),
    "Llama 2's class": put(SETTINGS, tokenizer_class="LlamaTokenizer"),
    "Llama 2's class, left to transformers": put(SETTINGS, tokenizer_class="LlamaTokenizerFast", **UNKNOWN),
    "Gemma's class": put(SETTINGS, tokenizer_class="GemmaTokenizer"),
    "Code Llama's class": put(SETTINGS, tokenizer_class="CodeLlamaTokenizer"),
    "a class that cannot load it": put(SETTINGS, tokenizer_class="XLMRobertaTokenizer"),
    "a class that nobody knows": put(SETTINGS, tokenizer_class="NovelTokenizer"),
    "no class": put(SETTINGS, tokenizer_class=None),
    "no class, of a family with one": both(put(SETTINGS, tokenizer_class=None), put(MODEL, model_type="gemma2")),
    "an unknown model type": put(MODEL, model_type="brand_new"),
    "an unknown model type, left to transformers": both(put(MODEL, model_type="brand_new"), put(SETTINGS, **UNKNOWN)),
    "no model type": write(MODEL, "{}"),
    "no config.json": without(MODEL),
    "a config.json that transformers refuses": both(put(MODEL, hidden_size=None), put(SETTINGS, **UNKNOWN)),
    "eos as an object": put(SETTINGS, eos_token={"content": "</s>", "lstrip": False}),
    "eos as an object with its type": put(SETTINGS, eos_token={"__type": "AddedToken", "content": "</s>"}),
    "a map of special tokens": put("special_tokens_map.json", eos_token={"content": "</s>", "lstrip": False}),
    "extra special tokens by name": put(SETTINGS, extra_special_tokens={"image_token": "<unk>"}),
    "extra special tokens as a list": put(SETTINGS, extra_special_tokens=["<unk>"]),
    "a length of 1e30": put(SETTINGS, model_max_length=1e30),
    "an integer of 1e30": put(SETTINGS, model_max_length=10**30),
    "no length": put(SETTINGS, model_max_length=None),
    "clean-up of spaces": put(SETTINGS, clean_up_tokenization_spaces=True, **UNKNOWN),
    "merges as texts": merges(lambda pairs: [" ".join(pair) for pair in pairs]),
    "padding and truncation": put(
        SAVED, truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    ),
    "Mistral's file beside": both(put(MODEL, model_type="mistral"), write("tekken.json", "{}")),
    "the former files": both(as_vocabulary_and_merges, put(SETTINGS, tokenizer_class="GPT2Tokenizer")),
    "an image processor": both(write("preprocessor_config.json", "{"), write("processor_config.json", "{}")),
    "code that is not needed": put(SETTINGS, auto_map={"AutoTokenizer": ["tokenization_novel.Novel", None]}),
}  # fmt: skip


@pytest.mark.parametrize("edit", SERVED.values(), ids=SERVED)
def test_the_same_text_has_the_same_tokens(edit: Edit, model: Path, ids: list[int]) -> None:
    edit(model)
    tokenizer = Tokenizer.load(model)
    assert tokenizer.encode(SAMPLE) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == SAMPLE
    stream = tokenizer.stream()
    assert "".join([*map(stream.add, ids), stream.finish()]) == SAMPLE.removesuffix("</s>")
    assert tokenizer.eos_ids == {2}


REFUSED: dict[str, tuple[Edit, str]] = {
    "rules for words that lose spaces": (
        put(SAVED, decoder=METASPACE, pre_tokenizer=METASPACE), r"is damaged: 'Hello, world! .* once it is encoded",
    ),
    "no vocabulary": (without(SAVED), "Copy the model's tokenizer.json there"),
    "nothing": (without(SAVED, SETTINGS), "has no tokenizer"),
    "an empty vocabulary": (write(SAVED, ""), r"tokenizer\.json cannot be loaded"),
    "a vocabulary that is cut short": (
        lambda path: write(SAVED, (path / SAVED).read_text()[:-50])(path), r"tokenizer\.json cannot be loaded: .*EOF",
    ),
    "a vocabulary with a byte order mark": (with_byte_order_mark(SAVED), r"tokenizer\.json cannot be loaded"),
    "a vocabulary of a later format": (put(SAVED, model={"type": "Novel"}), r"tokenizer\.json cannot be loaded"),
    "a merge of unknown tokens": (
        merges(lambda pairs: [*pairs, ["zz", "qq"]]),
        r"tokenizer\.json cannot be loaded: .*`zz` out of vocabulary",
    ),
    "a pointer of Git LFS": (write(SAVED, POINTER), r"tokenizer\.json is a pointer of Git LFS.*git lfs pull"),
    "SentencePiece's file as a pointer": (write("tokenizer.model", POINTER), r"tokenizer\.model is a pointer"),
    "a damaged file of SentencePiece": (
        both(without(SAVED), write("tokenizer.model", b"xx"), put(SETTINGS, tokenizer_class="LlamaTokenizer")),
        "is damaged: .* is '' once|cannot be loaded",
    ),
    "eos as a list": (put(SETTINGS, eos_token=["</s>"]), r"tokenizer_config\.json: eos_token is \['</s>'\]"),
    "eos as a number": (put(SETTINGS, eos_token=2), r"tokenizer_config\.json: eos_token is 2; it must be a token"),
    "settings with a byte order mark": (with_byte_order_mark(SETTINGS), r"tokenizer_config\.json is not JSON: .*BOM"),
    "settings as a list": (write(SETTINGS, "[]"), r"tokenizer_config\.json is not a JSON object"),
    "a map as a list": (write("special_tokens_map.json", "[]"), r"special_tokens_map\.json is not a JSON object"),
    "a renderer that nobody knows": (put(SETTINGS, chat_template_type="novel"), "No module named .*novel"),
    "a vocabulary of tiktoken": (
        both(without(SAVED), write("qwen.tiktoken", "IQ== 0\n"), put(SETTINGS, tokenizer_class="QWenTokenizer")),
        "Copy the model's tokenizer.json there",
    ),
    "tokens that only another file has": (
        both(put("added_tokens.json", **{"<|new|>": 400}), put(SETTINGS, tokenizer_class="GemmaTokenizer")),
        "is damaged|cannot be loaded",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "match"), REFUSED.values(), ids=REFUSED)
def test_a_tokenizer_that_spoils_text_is_refused_in_one_line(edit: Edit, match: str, model: Path) -> None:
    edit(model)
    with pytest.raises(ModelUnsupported, match=match) as raised:
        Tokenizer.load(model)
    assert str(model) in str(raised.value) and raised.value.remedy
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


# -- other formats ---------------------------------------------------------------------------------------------------


def test_a_model_of_sentencepiece_is_read(model: Path) -> None:
    (model / SAVED).unlink()
    (model / "text").write_text("\n".join(TEXT * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(model / "text"), model_prefix=str(model / "tokenizer"), vocab_size=330, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    put(SETTINGS, tokenizer_class="LlamaTokenizer")(model)
    tokenizer = Tokenizer.load(model)
    text = SAMPLE.removesuffix("</s>")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_model_of_sentencepiece_that_makes_much_of_little_is_refused(model: Path) -> None:
    (model / SAVED).unlink()
    (model / "text").write_text("\n".join(TEXT * 20))
    (model / "rules.tsv").write_text(f"2603\t{' '.join(['78'] * 1000)}\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(model / "text"), model_prefix=str(model / "spiece"), vocab_size=330, hard_vocab_limit=False,
        normalization_rule_tsv=str(model / "rules.tsv"), minloglevel=2,
    )  # fmt: skip
    put(SETTINGS, tokenizer_class="T5Tokenizer")(model)
    with pytest.raises(ModelUnsupported, match=f"{model}: a rule puts 1000 characters into a text"):
        Tokenizer.load(model)


def test_mistrals_own_vocabulary_is_read(model: Path) -> None:
    (model / SAVED).unlink()
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"he", b"hel"]
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(["<unk>", "<s>", "</s>"])
    ]
    config = {
        "pattern": r"[^\s]+|\s+", "num_vocab_tokens": 258, "default_vocab_size": 261, "default_num_special_tokens": 3,
        "version": "v11",
    }  # fmt: skip
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(vocabulary)
    ]
    write("tekken.json", json.dumps({"config": config, "vocab": entries, "special_tokens": special}))(model)
    put(SETTINGS, tokenizer_class="TokenizersBackend")(model)
    tokenizer = Tokenizer.load(model)
    text = SAMPLE.removesuffix("</s>")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


# -- what only a line can tell ---------------------------------------------------------------------------------------


WARNED: dict[str, tuple[Edit, str]] = {
    "a class that contradicts the file": (put(SETTINGS, tokenizer_class="GemmaTokenizer"), "is read as it is"),
    "no end of sequence": (put(SETTINGS, eos_token=None), "names no end-of-sequence token"),
    "no settings": (without(SETTINGS), "names no end-of-sequence token"),
    "Llama's rule in a model of Mistral's": (
        both(
            put(MODEL, model_type="mistral"),
            put(SAVED, pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t|'re|'ve)|\p{L}+|."}, "behavior": "Isolated",
                     "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            }),
        ),
        "fix_mistral_regex",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "match"), WARNED.values(), ids=WARNED)
def test_what_may_surprise_is_said(edit: Edit, match: str, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(model)
    with caplog.at_level(logging.WARNING, "phalanx"):
        tokenizer = Tokenizer.load(model)
    assert [record.getMessage() for record in caplog.records if match in record.getMessage()]
    assert tokenizer.decode(tokenizer.encode("hello é")) == "hello é"


def test_a_librarys_warning_is_an_entry_of_the_log(
    model: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers writes on its own what config.json says, with its line ends and escape sequences."""
    put(MODEL, model_type="x\nforged \x1b[2J")(model)
    put(SETTINGS, **UNKNOWN)(model)
    Tokenizer.load(model)
    assert [record for record in caplog.records if "forged" in record.getMessage()]
    assert "forged" not in capfd.readouterr().err


# -- where an answer ends --------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[Edit, set[int]]] = {
    "the tokenizer's": (lambda path: None, {2}),
    "another one in config.json": (put(MODEL, eos_token_id=50), {2, 50}),
    "several": (put(MODEL, eos_token_id=[50, 51]), {2, 50, 51}),
    "none in the tokenizer": (both(put(SETTINGS, eos_token=None), put(MODEL, eos_token_id=50)), {50}),
    "in the text part": (put(MODEL, text_config={"eos_token_id": 40}), {2, 40}),
    "for generation": (put("generation_config.json", eos_token_id=[7, 8]), {2, 7, 8}),
    "for generation, and special ones in config.json": (
        both(put("generation_config.json", eos_token_id=7), put(MODEL, eos_token_id=[0, 1, 50])), {0, 1, 2, 7},
    ),
    "null": (both(put("generation_config.json", eos_token_id=None), put(MODEL, eos_token_id=None)), {2}),
    "not a number": (put(MODEL, eos_token_id=["</s>", True, -1]), {2}),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "ends"), ENDS.values(), ids=ENDS)
def test_an_answer_ends_where_any_file_says(edit: Edit, ends: set[int], model: Path) -> None:
    edit(model)
    assert Tokenizer.load(model).eos_ids == ends


@pytest.mark.parametrize("adds", [True, False])
def test_a_conversation_begins_once(adds: bool, model: Path) -> None:
    """Whether or not the tokenizer adds the token that the template has."""
    put(SETTINGS, chat_template="{{ bos_token }}{{ messages[0].content }}", add_bos_token=adds, **UNKNOWN)(model)
    tokenizer = Tokenizer.load(model)
    user = [{"role": "user", "content": "hello"}]
    assert tokenizer.encode_chat(user, template_kwargs={}) == [1, *tokenizer.encode("hello", add_special_tokens=False)]


def test_a_renderer_in_code_refuses_messages_as_templates_do(model: Path) -> None:
    """mlx-lm's for DeepSeek 3.2 asserts what it needs, and has not implemented the rest."""
    put(SETTINGS, chat_template_type="deepseek_v32")(model)
    tokenizer = Tokenizer.load(model)
    tokenizer.start_rendering()
    assert "hello" in tokenizer.render_chat([{"role": "user", "content": "hello"}], template_kwargs={})
    for message in ({"role": "developer", "content": ""}, {"role": "critic", "content": "hm"}):
        with pytest.raises(InvalidRequest, match="refuses these messages"):
            tokenizer.render_chat([message], template_kwargs={})


def test_without_transformers_no_tokenizer_is_read_otherwise_than_with_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make demo` leaves transformers out. Read as it is, this file would give other tokens than on other hosts."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "phalanx.text.transformers_backend", raising=False)
    Tokenizer.load(model)
    put(SETTINGS, **UNKNOWN)(model)
    with pytest.raises(ModelUnsupported, match=r"can be read by transformers only, which is not installed\. Run `make"):
        Tokenizer.load(model)
