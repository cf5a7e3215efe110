"""Loads a tokenizer.json with the library `tokenizers` alone, and its chat template. Most models need no more.

transformers reads the same file with the same library, behind a second of imports. Its general class takes the file as
it is; its other classes build rules of their own and may contradict the file. `read` therefore serves the general
class, and one other if that agrees with the file (`qwen2_rules.py`). It accepts only settings that have no effect or
are implemented here, and leaves everything else to `transformers_backend.py`.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, pre_tokenizers

from phalanx.errors import ModelUnsupported
from phalanx.text import chat_template as templates
from phalanx.text import qwen2_rules, template_files
from phalanx.text.library_errors import library_errors
from phalanx.text.model_files import MAX_TOKENIZER, read_file, read_json
from phalanx.text.template_process import TemplateRenderer
from phalanx.text.tokenizer_backend import Backend
from phalanx.text.vocabulary import NEVER_IN_UTF8, is_byte_level

log = logging.getLogger("phalanx.text")

GENERAL_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Values of `tokenizer_class` under which transformers takes tokenizer.json unchanged."""

OWN_CLASS = frozenset("hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2".split())
"""Model types for which transformers uses a specific class although the files name the general one."""

GENERAL_MODELS = frozenset(
    "glm glm4 glm4_moe glm4_moe_lite granite granitemoe granitemoehybrid internlm2 internlm3 jamba kimi_linear "
    "mimo_v2_flash minimax_m2 ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 phi3 phimoe smolvlm".split()
)
"""Model types for which transformers uses the general class, whatever class the files name."""

MISTRAL = frozenset({"mistral", "mistral3", "ministral3"})
"""Model types of Mistral's models, whose rule for words has no English contractions."""

CONTRACTIONS = b"(?i:'s|'t|'re|"

NFC_SHRINKS = 3
"""Factor by which NFC can shorten a text, in UTF-8 bytes: three jamo of three bytes become a syllable of three."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")

NO_EFFECT = frozenset(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder backend chat_template "
    "clean_up_tokenization_spaces errors is_local legacy model_input_names model_max_length name_or_path "
    "processor_class sp_model_kwargs spaces_between_special_tokens tokenizer_class use_default_system_prompt "
    "use_fast".split()
)
"""Settings that change no id and no text if there is a tokenizer.json, or that `read` implements."""

THINKING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
)
"""A vocabulary with all tokens of a line is a reasoning model's for mlx-lm; its template gets `enable_thinking`."""


class AddedToken(msgspec.Struct, frozen=True):
    """An entry of `added_tokens` in tokenizer.json, or of `added_tokens_decoder` in tokenizer_config.json."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: the opposite of `special`
    special: bool = False

    @property
    def properties(self) -> tuple[bool, bool, bool, bool, bool]:
        """single_word, lstrip, rstrip, normalized, special."""
        normalized = not self.special if self.normalized is None else self.normalized
        return self.single_word, self.lstrip, self.rstrip, normalized, self.special


class NumberedToken(AddedToken, frozen=True, kw_only=True):
    """An added token of tokenizer.json."""

    id: int


class Saved(msgspec.Struct, frozen=True):
    """Parts of tokenizer.json that `read` checks itself."""

    added_tokens: list[NumberedToken]
    truncation: Any = None
    padding: Any = None


class FastBackend(Backend):
    """A tokenizer of the library `tokenizers`.

    Args:
        tokenizer: without truncation and padding.
        named: attribute, such as "bos_token" -> token; the template gets them as variables.
        chat_templates: name -> source; a template without a name is "default". Empty without templates.
    """

    reserved = templates.STEERING
    failures = templates.FAILURES

    def __init__(self, tokenizer: Tokenizer, named: Mapping[str, str], chat_templates: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self.named = dict(named)
        self._chat_templates = dict(chat_templates)
        self.renderer = TemplateRenderer()
        ids = {name: found for name, token in named.items() if (found := tokenizer.token_to_id(token)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id = ids.get("bos_token")
        self.eos_ids = frozenset({ids["eos_token"]} if "eos_token" in ids else ())
        self.special = frozenset(ids.values()) | {token for token, found in added.items() if found.special}
        self.added = {found.content: token for token, found in added.items()}
        self.byte_level = decodes_bytes(tokenizer)
        self.has_chat_template = bool(chat_templates)
        self.chat_template = self._chat_templates.get(template_files.DEFAULT)
        self._thinks = any(all(tokenizer.token_to_id(t) is not None for t in tokens) for tokens in THINKING)

    @cached_property
    def longest_token(self) -> int | None:
        names = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        added = self._tokenizer.get_added_tokens_decoder()
        stripping = any(token.lstrip or token.rstrip for token in added.values())  # such a token takes any spaces
        if not self.byte_level or stripping or not _keeps_all_text(self._tokenizer, names):
            return None
        # The name of a token has a character for each byte, that of an added one is the text itself.
        longest = max(len(name.encode()) if token in added else len(name) for token, name in enumerate(names))
        return longest * (1 if self._tokenizer.normalizer is None else NFC_SHRINKS)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, which holds the interpreter's lock from beginning to end.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]
        return text

    def name_of(self, token: int) -> str | None:
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    def template_source(self, chat_template: str | None) -> str:
        return template_files.shown(self._chat_templates, chat_template)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        return self.renderer.render(
            template_files.choose(self._chat_templates, chat_template, tools=variables.get("tools") is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.named, "enable_thinking": self._thinks, **variables},
        )


def read(path: Path, *, trust_remote_code: bool) -> FastBackend | None:
    """The tokenizer of a model's directory; None if transformers might read the files differently.

    Raises:
        ModelUnsupported: the library cannot read tokenizer.json, so transformers cannot either; or a file of settings
            is damaged.
    """
    try:
        settings, model = read_json(path / "tokenizer_config.json"), read_json(path / "config.json")
        text = read_file(path / "tokenizer.json", MAX_TOKENIZER)
        saved = msgspec.json.decode(text, type=Saved)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if trust_remote_code and "auto_map" in model:
        return None
    if not _is_general(settings, model, text):
        if not _is_qwen2(settings, model, text, saved):
            return None
        settings = {**qwen2_rules.DEFAULTS, **settings}
    if not _no_further_files(path, settings):
        return None
    named = _named_tokens(settings, saved)
    if named is None or not _settings_known(settings, saved):
        return None
    tokenizer = _from_buffer(path, text)
    if not _ids_match(tokenizer, saved.added_tokens):
        return None
    if model["model_type"] in MISTRAL and CONTRACTIONS in text:
        log.warning(
            "%s splits words as Llama 3's. If this is a model of Mistral's, a conversion has lost its rule: set "
            '"fix_mistral_regex": true in tokenizer_config.json.', path / "tokenizer.json"
        )  # fmt: skip
    return FastBackend(tokenizer, named, template_files.read_templates(path))


def read_as_it_is(path: Path) -> FastBackend | None:
    """The tokenizer that tokenizer.json describes, whatever class the settings name.

    None without such a file, or if more than the file decides: the model's own code, a renderer of mlx-lm, or added
    tokens of other files.

    Raises:
        ModelUnsupported: a file is damaged, or a special token is neither a text nor an object with one.
    """
    try:
        settings = read_json(path / "tokenizer_config.json")
        text = read_file(path / "tokenizer.json", MAX_TOKENIZER)
    except FileNotFoundError:
        return None
    if "auto_map" in settings or "chat_template_type" in settings:
        return None
    tokenizer = _from_buffer(path, text)
    if any(tokenizer.token_to_id(token) is None for token in _added_elsewhere(path, settings)):
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named = {}
    for attribute in NAMED_TOKENS:
        value = settings.get(attribute)
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise ModelUnsupported(
                f"{path / 'tokenizer_config.json'}: {attribute} is {str(value)[:40]}; it must be a token's text.",
                remedy="Repair it, or download the file again.",
            )
        if token is not None and tokenizer.token_to_id(token) is not None:
            named[attribute] = token
    return FastBackend(tokenizer, named, template_files.read_templates(path))


def _added_elsewhere(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """The added tokens that tokenizer_config.json and added_tokens.json name."""
    listed = settings.get("added_tokens_decoder")
    tokens = [token.get("content") for token in listed.values()] if isinstance(listed, dict) else []
    with contextlib.suppress(FileNotFoundError):
        tokens += read_json(path / "added_tokens.json")
    return [token for token in tokens if isinstance(token, str)]


def decodes_bytes(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer decodes every token to a fixed byte string.

    A byte-level vocabulary whose decoder does not know bytes gets the decoder that does.
    """
    steps = b"" if tokenizer.decoder is None else bytes(tokenizer.decoder.__getstate__())
    if b'"ByteLevel"' not in steps and is_byte_level(tokenizer.token_to_id):
        tokenizer.decoder = decoders.ByteLevel()
    return type(tokenizer.decoder).__name__ == "ByteLevel"


def _from_buffer(path: Path, text: bytes) -> Tokenizer:
    def unreadable(reason: str) -> ModelUnsupported:
        return ModelUnsupported(
            f"{path / 'tokenizer.json'} cannot be loaded: {reason}", remedy="Copy the model's tokenizer.json there."
        )

    try:
        with library_errors(unreadable):
            return Tokenizer.from_buffer(text)
    except ValueError as error:
        raise unreadable(str(error)) from error


def _keeps_all_text(tokenizer: Tokenizer, names: Collection[str]) -> bool:
    """Whether every byte of a text, up to NFC, becomes a part of some token."""
    if tokenizer.normalizer is not None and type(tokenizer.normalizer).__name__ != "NFC":
        return False
    rules = b"" if tokenizer.pre_tokenizer is None else bytes(tokenizer.pre_tokenizer.__getstate__())
    kinds = set(re.findall(rb'"type":"(\w+)"', rules))
    if kinds - {b"Sequence", b"Split", b"ByteLevel", b"Digits"} or b'"Removed"' in rules:
        return False
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - set(names)
    return missing <= NEVER_IN_UTF8  # the library drops a byte without a token


def _is_general(settings: Mapping[str, Any], model: Mapping[str, Any], text: bytes) -> bool:
    """Whether transformers uses its general class for this model."""
    named, kind = settings.get("tokenizer_class"), model.get("model_type")
    if not isinstance(named, str) or not isinstance(kind, str) or not kind or "model_name" in model:
        return False
    if named in GENERAL_CLASSES:
        return kind not in OWN_CLASS
    if kind in GENERAL_MODELS:
        return True
    # Llama 3 and others name Llama 2's class, which cannot have a file with byte-level rules.
    return named in ("LlamaTokenizer", "LlamaTokenizerFast") and b'"ByteLevel"' in text and kind not in OWN_CLASS


def _is_qwen2(settings: Mapping[str, Any], model: Mapping[str, Any], text: bytes, saved: Saved) -> bool:
    """Whether transformers' class for Qwen 2 and 3 builds the tokenizer that the file describes."""
    if not qwen2_rules.applies(settings, str(model.get("model_type"))) or "model_name" in model:
        return False
    decoder = settings.get("added_tokens_decoder", {})
    if not _all_in_vocabulary(decoder, saved):
        return False
    return qwen2_rules.are_the_files(text, [(token.id, token.content) for token in saved.added_tokens], settings)


def _no_further_files(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the directory has no further file that transformers would read."""
    others = ["tekken.json"]
    if "added_tokens_decoder" not in settings:
        others += ["special_tokens_map.json", "added_tokens.json"]
    return not any((path / name).exists() for name in others)


def _settings_known(settings: Mapping[str, Any], saved: Saved) -> bool:
    """Whether every setting of tokenizer_config.json is known and changes nothing in tokenizer.json."""
    if saved.truncation is not None or saved.padding is not None:
        return False
    if any(settings.get(side, "left") not in ("left", "right") for side in ("padding_side", "truncation_side")):
        return False
    if settings.get("split_special_tokens"):
        return False
    special = {token.content for token in saved.added_tokens if token.special}
    for extra in (settings.get(name) or [] for name in EXTRA_TOKENS):
        if not isinstance(extra, list) or not all(isinstance(token, str) and token in special for token in extra):
            return False
    known = NO_EFFECT | {*NAMED_TOKENS, *EXTRA_TOKENS, "padding_side", "truncation_side", "split_special_tokens"}
    return settings.keys() <= known and _all_in_vocabulary(settings.get("added_tokens_decoder", {}), saved)


def _all_in_vocabulary(decoder: Any, saved: Saved) -> bool:
    """Whether tokenizer_config.json's added tokens are among tokenizer.json's, with the same properties."""
    try:
        tokens = msgspec.convert(decoder, dict[str, AddedToken])
    except msgspec.ValidationError:
        return False
    present = {token.content: token.properties for token in saved.added_tokens}
    return all(present.get(token.content) == token.properties for token in tokens.values())


def _named_tokens(settings: Mapping[str, Any], saved: Saved) -> dict[str, str] | None:
    """Attribute -> token, for attributes that are set; None if one names a token that is not in the vocabulary."""
    present = {token.content for token in saved.added_tokens}
    named = {}
    for attribute in NAMED_TOKENS:
        value = settings.get(attribute)
        if isinstance(value, dict) and value.get("__type") == "AddedToken":
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str) or value not in present:
            return None
        named[attribute] = value
    return named


def _ids_match(tokenizer: Tokenizer, tokens: Sequence[NumberedToken]) -> bool:
    """Whether the library gave every added token the id of the file."""
    taken = tokenizer.get_added_tokens_decoder()
    return all(token.id in taken and taken[token.id].content == token.content for token in tokens)
