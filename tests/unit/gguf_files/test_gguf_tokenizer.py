"""Tokenizers written from metadata: llama.cpp's ids, or those of the models' own tokenizers where llama.cpp differs."""

from __future__ import annotations

import array
import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import CONTROLS, tiny_metadata
from support.gguf_texts import five_hundred
from support.gguf_vocabularies import (
    BYTE,
    BYTES,
    CASES,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    byte_level,
    marks,
    our_ids,
    our_tokenizer,
    recorded,
    sentencepiece,
    texts,
    their_ids_of,
)
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

from phalanx.errors import ModelError, ModelUnsupported, WeightsError
from phalanx.model.gguf import gguf_tokenizer
from phalanx.model.gguf.gguf_metadata import Metadata
from phalanx.model.gguf.gguf_pretokenizers import PRE_TOKENIZERS
from phalanx.model.gguf.gguf_tokenizer import end_ids, write_tokenizer
from phalanx.text.tokenizer import Tokenizer as Served

# -- llama.cpp -----------------------------------------------------------------------------------------------------


def has_case(text: str, above: str = "") -> bool:
    return any(letter.isupper() and letter > above for letter in text)


def has_mark_or_case(text: str) -> bool:
    return any(unicodedata.category(letter).startswith("M") for letter in text) or has_case(text, "\x7f")


def has_number(text: str) -> bool:
    return any(letter.isnumeric() for letter in text)


def has_wide_blank(text: str) -> bool:
    return any(letter.isspace() and letter > "\x7f" for letter in text)


REASONS: dict[str, tuple[int, Callable[[str], bool]]] = {
    **dict.fromkeys(
        ("mpt", "olmo", "command-r", "qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35"),
        (24, lambda text: not unicodedata.is_normalized("NFC", text)),
    ),
    "bos and eos": (23, lambda text: not unicodedata.is_normalized("NFC", text)),
    "tekken": (84, has_mark_or_case),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "no bos"), (83, has_mark_or_case)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (21, lambda text: has_case(text) or has_number(text))),
    "youtu": (3, has_case),
    "kimi-k2": (71, lambda text: has_mark_or_case(text) or has_case(text)),
    "deepseek-llm": (15, has_wide_blank),
    "deepseek-coder": (20, has_wide_blank),
    "afmoe": (28, has_number),
    "superbpe": (2, lambda text: any(letter.isdigit() and letter > "\x7f" for letter in text)),
    "phi-3": (30, has_wide_blank),
}
"""Case -> in how many texts its model's own tokenizer differs from llama.cpp, and what all of these texts have."""


@pytest.mark.parametrize("case", CASES)
def test_ids_are_llama_cpps_or_differ_for_a_known_reason(case: str):
    pairs = zip(texts(case), marks(our_ids(case)), recorded(case), strict=True)
    others = [text for text, ours, theirs in pairs if ours != theirs]
    n, reason = REASONS.get(case, (0, has_case))
    assert len(others) == n and all(map(reason, others)), [ascii(text) for text in others if not reason(text)][:3]


def test_the_record_is_llama_cpps():
    """Where llama-cpp-python is at hand (`make bench-cpu` builds it)."""
    pytest.importorskip("llama_cpp")
    assert [case for case in CASES if marks(their_ids_of(case)) != recorded(case)] == []


def test_every_rule_cuts_some_text_as_no_other_does():
    """Else the record could not tell them apart."""
    rules = {rule: pre for pre, rule in PRE_TOKENIZERS.items()}
    assert len({marks(our_ids(pre)) for pre in rules.values()}) == len(rules) > 25


# -- the models' own rules -----------------------------------------------------------------------------------------


def cut(pre: str, text: str) -> list[str]:
    tokenizer = our_tokenizer(byte_level(pre))
    text = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [decoders.ByteLevel().decode([part]) for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_texts_are_cut_as_the_models_own_tokenizers_do_where_llama_cpp_differs():
    assert cut("qwen2", "cafe\u0301 1") == ["caf\u00e9", " ", "1"]  # composed
    assert cut("qwen35", "हिन्दी x") == ["हिन्दी", " x"]  # marks belong to words
    assert cut("gpt-4o", "naïveÉcole हिन्दी e\u0301a's") == ["naïve", "École", " हिन्दी", " e\u0301a's"]
    assert cut("tekken", "iPhone's 12") == ["i", "Phone", "'s", " ", "1", "2"]
    assert cut("kimi-k2", "汉字abc XMLHttp 1234") == ["汉字", "abc", " XMLHttp", " ", "123", "4"]
    assert cut("deepseek-coder", "\u3000(a") == ["\u3000", "(", "a"]
    assert cut("afmoe", "a  1234567") == ["a", "  ", "1", "234", "567"]
    assert cut("tiny_aya", "1234567 camelCase") == ["1", "234", "567", " camel", "Case"]
    assert cut("superbpe", "a1234567 b٣٤٥٦") == ["a", "1", "234", "567", " b", "٣", "٤٥٦"]


def test_no_number_takes_quadratic_time():
    """The end of a number is looked for in the next 300 digits: 100,000 of them took minutes."""
    for rule in (PRE_TOKENIZERS["tiny_aya"].cuts[:1], PRE_TOKENIZERS["superbpe"].cuts):
        cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated") for cut in rule])
        assert [len(part) for part, _ in cuts.pre_tokenize_str("7" * 298)] == [1, *[3] * 99]
        first, *others = [len(part) for part, _ in cuts.pre_tokenize_str("7" * 400)]
        assert first >= 100 and set(others) == {3}


def test_blanks_behind_the_special_tokens_of_phi_3_are_dropped():
    tokenizer = our_tokenizer(CASES["phi-3"]())
    ids = tokenizer.encode("<|user|>\n\u3000x<|end|>  y<s> z", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(token) for token in ids] == ["<|user|>", "▁x", "<|end|>", "▁", "y", "<s>", "▁▁", "z"]


def test_the_blank_behind_inst_is_that_of_mistrals_template():
    """Its own library encodes the message apart, with one blank before it; llama.cpp puts another."""

    def pieces(kind: int, text: str) -> list[str]:
        return our_tokenizer(sentencepiece(["[INST]"], kind)).encode(text, add_special_tokens=False).tokens

    assert pieces(CONTROL, "[INST] hello") == ["[INST]", "▁", "hello"]
    assert pieces(CONTROL, "hello") == pieces(USER_DEFINED, "hello") == ["▁", "hello"]
    assert pieces(USER_DEFINED, "[INST]hello") == ["[INST]", "▁", "hello"]
    assert pieces(USER_DEFINED, "[INST] hello") == ["[INST]", "▁▁", "hello"]
    tokenizer = our_tokenizer(sentencepiece(["[INST]"]))
    assert tokenizer.decode(tokenizer.encode("hello  x", add_special_tokens=False).ids) == "hello  x"


def best_neighbours(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece by its definition: of all neighbours, those whose text has the best score are joined."""
    parts = list(text)
    while True:
        joined = [(scores.get(a + b, -1e9), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best, place = max(joined, default=(-1e9, 0))
        if best == -1e9:
            return parts
        parts[-place : 2 - place] = ["".join(parts[-place : 2 - place])]


@pytest.mark.parametrize(("letters", "n"), [("ab", 60), ("abc▁", 200), ("abcdefgh▁", 900), ("aäßπж中한🙂▁", 4000)])
def test_pieces_are_joined_by_their_scores(letters: str, n: int):
    """Vocabularies of random words with random scores: nearly every text has several ways to each token."""
    for seed in range(3):
        numbers = random.Random(seed)
        names = dict.fromkeys(letters)
        while len(names) < n:
            names["".join(numbers.choices(letters, k=numbers.randint(2, 6)))] = None
        scores = [-float(rank) for rank in numbers.sample(range(n), n)]
        tokenizer = our_tokenizer(sentencepiece(
            tokens=["<unk>", "<s>", "</s>", *BYTES, *names],
            token_type=array.array("i", [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[1] * n]),
            scores=array.array("f", [*[0.0] * 259, *scores]), add_space_prefix=False,
        ))  # fmt: skip
        by_name = dict(zip(names, scores, strict=True))
        for _ in range(200):
            text = "".join(numbers.choices(letters, k=numbers.randint(1, 40)))
            assert tokenizer.encode(text, add_special_tokens=False).tokens == best_neighbours(text, by_name), text


def test_of_equal_scores_the_lower_id_is_joined_first():
    """As the models' own tokenizers do; converters that find no scores write one number for all."""
    made = sentencepiece()
    n = len(made["tokenizer.ggml.tokens"])
    equal = our_tokenizer(sentencepiece(scores=array.array("f", [-1000.0] * n)))
    scored = our_tokenizer(made)
    assert all(equal.encode(text).ids == scored.encode(text).ids for text in five_hundred())


@pytest.mark.parametrize("case", ["gpt-2", "default", "gpt-4o", "deepseek-llm", "kimi-k2", "llama", "gemma4"])
def test_texts_come_back(case: str):
    tokenizer = our_tokenizer(CASES[case]())
    for text in five_hundred():
        if case not in ("llama", "gemma4") or "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            back = tokenizer.decode(ids, skip_special_tokens=False)
            assert back == text or (case == "llama" and "<" in text), ascii(text)  # blanks beside special tokens


# -- around them ---------------------------------------------------------------------------------------------------


def with_types(metadata: dict[str, Any], **types: int) -> dict[str, Any]:
    """Metadata with other types of some tokens."""
    names = metadata["tokenizer.ggml.tokens"]
    kinds = array.array("i", metadata["tokenizer.ggml.token_type"])
    for name, kind in types.items():
        kinds[names.index(name)] = kind
    return {**metadata, "tokenizer.ggml.token_type": kinds}


def named(*added: str, kind: int = CONTROL, **own: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with tokens behind the others."""
    made = byte_level("gpt-2")
    tokens = [*made["tokenizer.ggml.tokens"], *added]
    kinds = array.array("i", [*made["tokenizer.ggml.token_type"], *[kind] * len(added)])
    return byte_level("gpt-2", tokens=tokens, token_type=kinds, **own)


def ends(metadata: dict[str, Any]) -> list[str]:
    return [metadata["tokenizer.ggml.tokens"][token] for token in end_ids(Metadata("x.gguf", metadata))]


def test_what_ends_an_answer():
    assert ends(named("<|endoftext|>", "</s>", "<end_of_turn>", "<other>")) == [
        CONTROLS[2], "<|endoftext|>", "<end_of_turn>", "</s>",
    ]  # fmt: skip
    assert ends(named("<|endoftext|>", "</s>", kind=1)) == [CONTROLS[2], "<|endoftext|>"], "</s> is a piece of HTML"
    assert ends(named("<|end|>", "<|return|>")) == [CONTROLS[2], "<|end|>", "<|return|>"]
    assert ends(named("<|end|>", "<|return|>", "<|call|>")) == [CONTROLS[2], "<|return|>", "<|call|>"]
    last = len(byte_level("gpt-2")["tokenizer.ggml.tokens"])
    assert ends(named("<|user|>", "<x>", eot_token_id=last, eom_token_id=last + 1)) == [CONTROLS[2], "<|user|>", "<x>"]
    assert ends(named("<|endoftext|>", eos_token_id=None)) == [CONTROLS[2], "<|endoftext|>"]
    no_names = [name.replace("im_end", "x") for name in byte_level("gpt-2")["tokenizer.ggml.tokens"]]
    with pytest.raises(WeightsError, match=r"x\.gguf is damaged: tokenizer\.ggml\.eos_token_id is missing"):
        ends(byte_level("gpt-2", tokens=no_names, eos_token_id=None))


def test_what_ends_a_turn_is_special_whatever_its_type():
    tokenizer = our_tokenizer(named("<|endoftext|>", "</s>", kind=1))
    ids = tokenizer.encode("a<|endoftext|></s>", add_special_tokens=False)
    assert "<|endoftext|>" in ids.tokens and "</s>" not in ids.tokens
    assert tokenizer.decode(ids.ids) == "a</s>"


def test_templates_with_names_come_along(tmp_path: Path):
    def described(**own: Any) -> Any:
        write_tokenizer(Metadata("x.gguf", tiny_metadata("llama", **own)), tmp_path)
        return json.loads((tmp_path / "tokenizer_config.json").read_text()).get("chat_template")

    names = {"tokenizer__chat_templates": ["tool_use", "rag", "lost"], "tokenizer__chat_template__rag": "R"}
    of_names = [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
    own = {**names, "tokenizer__chat_template__tool_use": "T"}
    default = {"name": "default", "template": "D"}
    assert described(**own, tokenizer__chat_template="D") == [default, *of_names]
    assert described(**own, tokenizer__chat_template=None) == of_names
    assert described(tokenizer__chat_templates=["lost"], tokenizer__chat_template="D") == "D"
    assert described(tokenizer__chat_template=None) is None
    no_text = {"tokenizer__chat_templates": ["\x1b[31m\n"], "tokenizer__chat_template__\x1b[31m\n": 5}
    assert described(**no_text, tokenizer__chat_template="D") == "D"


@pytest.mark.parametrize("case", ["llama", "llama, no prefix", "gemma4", "phi-3", "gpt-4o"])
def test_what_is_written_is_served(case: str, tmp_path: Path):
    """The checks of a start, a stream, and a conversation."""
    metadata = CASES[case]()
    write_tokenizer(Metadata("x.gguf", metadata), tmp_path)
    config = {"model_type": "llama", "eos_token_id": end_ids(Metadata("x.gguf", metadata))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Served.load(tmp_path)
    assert set(config["eos_token_id"]) <= tokenizer.eos_ids and tokenizer.has_chat_template
    text = "Wörter, 世界 🙂\n\ttab  two"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.stream()
    assert "".join([*(stream.add(token) for token in ids), stream.finish()]) == tokenizer.decode(ids) == text


# -- damage --------------------------------------------------------------------------------------------------------


def refused(match: str, metadata: dict[str, Any], directory: Path, kind: type[ModelError] = WeightsError) -> None:
    with pytest.raises(kind, match=match) as raised:
        write_tokenizer(Metadata("x.gguf", metadata), directory)
    assert str(raised.value).isprintable() and "x.gguf" in str(raised.value) and raised.value.remedy
    assert not list(directory.iterdir())


@pytest.mark.parametrize("kind", ["bert", "rwkv", "plamo2", "t5", "none"])
def test_other_kinds_are_refused_by_name(kind: str, tmp_path: Path):
    match = f"its tokenizer is of the kind '{kind}', taken are"
    refused(match, byte_level("gpt-2", model=kind), tmp_path, ModelUnsupported)


def test_damaged_vocabularies_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = sentencepiece()
    names, scores = made["tokenizer.ggml.tokens"], made["tokenizer.ggml.scores"]
    for bad in (float("nan"), float("inf"), float("-inf")):
        changed = array.array("f", scores)
        changed[300] = bad
        refused("scores has a number that is not finite", sentencepiece(scores=changed), tmp_path)
    refused("scores is missing", sentencepiece(scores=None), tmp_path)
    refused("scores has 9 elements", sentencepiece(scores=scores[:9]), tmp_path)
    refused("token_type is missing", sentencepiece(token_type=None), tmp_path)
    refused("token_type has 9 elements", sentencepiece(token_type=array.array("i", [1] * 9)), tmp_path)
    refused("merges is missing", byte_level("gpt-2", merges=None), tmp_path)
    refused("merges is not a list of texts", byte_level("gpt-2", merges=[["a"]]), tmp_path)
    refused("merge 'ab' is not one of two tokens", byte_level("gpt-2", merges=["ab"]), tmp_path)
    refused("tokens has a token twice", sentencepiece(tokens=[*names[:-1], names[5]]), tmp_path)
    refused("the token 'a.*' has 513 letters", sentencepiece(tokens=[*names[:-1], "a" * 513]), tmp_path)
    refused("the bos token is 4294967295 of", sentencepiece(bos_token_id=0xFFFFFFFF), tmp_path)
    refused("the eom token is 99999 of", sentencepiece(eom_token_id=99999), tmp_path)
    lacks_bytes = [f"x{name}" if name == "<0x7F>" else name for name in names]
    refused("its tokenizer lacks <0x7F>", sentencepiece(tokens=lacks_bytes), tmp_path, ModelUnsupported)
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 100)
    refused("its tokens can be made of two others in more than 100 ways", sentencepiece(), tmp_path)


@pytest.mark.parametrize("case", ["default", "llama", "gemma4"])
def test_any_value_of_a_key_is_taken_or_refused_in_one_line(case: str, tmp_path: Path):
    made = CASES[case]()
    n = len(made["tokenizer.ggml.tokens"])
    values = [
        None, False, 0, n - 1, n, 1 << 62, 1.5, float("nan"), "", "x", [], [""], ["a", "b"], [["a"]], array.array("i"),
        *(array.array("i", [kind] * n) for kind in (0, 2, 3, 4, 9)), array.array("f", [float("nan")] * n),
        array.array("Q", [1 << 63] * n), [str(i) for i in range(n)],
    ]  # fmt: skip
    keys = [key for key in made if key.startswith("tokenizer.")]
    optional = ["add_bos_token", "add_eos_token", "add_space_prefix", "eot_token_id", "pre"]
    refusals = 0
    for key in {*keys, "tokenizer.chat_templates", "general.name", *(f"tokenizer.ggml.{name}" for name in optional)}:
        for value in values:
            try:
                write_tokenizer(Metadata("x.gguf", {**made, key: value}), tmp_path)
            except ModelError as error:
                refusals += 1
                assert str(error).isprintable() and "x.gguf" in str(error)
            else:
                assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a b").ids
    assert refusals > 100


def test_tokens_without_a_text_have_one(tmp_path: Path):
    made = byte_level("gpt-2")
    names = [*made["tokenizer.ggml.tokens"], "", ""]
    kinds = array.array("i", [*made["tokenizer.ggml.token_type"], 1, USER_DEFINED])
    tokenizer: Tokenizer = our_tokenizer(byte_level("gpt-2", tokens=names, token_type=kinds))
    assert tokenizer.id_to_token(len(names) - 1) == f"[EMPTY_{len(names) - 1}]"
    assert tokenizer.encode("a b", add_special_tokens=False).ids == our_tokenizer(made).encode("a b").ids
