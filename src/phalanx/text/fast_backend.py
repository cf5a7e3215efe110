"""Loads a tokenizer.json with the library `tokenizers` alone, and its chat template. Most models need no more.

transformers reads the same file with the same library, behind a second of imports. Its general class takes the file as
it is; its other classes build rules of their own and may contradict the file. `read` therefore serves the general class
and one other where it agrees with the file (`qwen2_rules.py`). It takes only settings whose effect is known to be
nothing or is done here too, and declines everything else, which `transformers_backend.py` loads. Knows the files of a
model's directory; does not know mlx-lm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from phalanx.errors import ModelUnsupported
from phalanx.text import chat_template as templates
from phalanx.text import qwen2_rules
from phalanx.text.backend import Backend

GENERAL_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Values of `tokenizer_class` under which transformers takes tokenizer.json unchanged."""

OWN_CLASS = frozenset("hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2".split())
"""Model types for which transformers uses a specific class although the files name the general one."""

GENERAL_MODELS = frozenset(
    "glm glm4 glm4_moe glm4_moe_lite granite granitemoe granitemoehybrid internlm2 internlm3 jamba kimi_linear "
    "mimo_v2_flash minimax_m2 ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 phi3 phimoe smolvlm".split()
)
"""Model types for which transformers uses the general class, whatever class the files name."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")

NO_EFFECT = frozenset(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder backend chat_template "
    "clean_up_tokenization_spaces errors is_local legacy model_input_names model_max_length name_or_path "
    "processor_class sp_model_kwargs spaces_between_special_tokens tokenizer_class use_default_system_prompt "
    "use_fast".split()
)
"""Settings that change no id and no text where there is a tokenizer.json, or that `read` implements."""

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
        self._named = dict(named)
        self._chat_templates = dict(chat_templates)
        ids = {name: found for name, token in named.items() if (found := tokenizer.token_to_id(token)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id = ids.get("bos_token")
        self.eos_ids = frozenset({ids["eos_token"]} if "eos_token" in ids else ())
        self.special = frozenset(ids.values()) | {token for token, found in added.items() if found.special}
        self.byte_level = type(tokenizer.decoder).__name__ == "ByteLevel"
        self.has_chat_template = bool(chat_templates)
        self._thinks = any(all(tokenizer.token_to_id(t) is not None for t in tokens) for tokens in THINKING)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def name_of(self, token: int) -> str | None:
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        chat_template: str | None,
    ) -> str:
        return templates.render(
            self._choose_template(chat_template, variables.get("tools") is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._named, "enable_thinking": self._thinks, **variables},
        )

    def _choose_template(self, given: str | None, tools: bool) -> str:
        """The source of the template to render. `given` is a source, or the name of one of the model's templates."""
        if given is not None:
            return self._chat_templates.get(given, given)
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self._chat_templates:
                return self._chat_templates[name]
        raise ValueError(
            "This model has multiple chat templates with no default specified! Available template names are "
            f"{sorted(self._chat_templates)}."
        )


def read(path: Path, *, trust_remote_code: bool) -> FastBackend | None:
    """The tokenizer of a model's directory; None if transformers might read the files differently.

    Raises:
        ModelUnsupported: the library cannot read tokenizer.json, so transformers cannot either.
    """
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text = (path / "tokenizer.json").read_bytes()
        saved = msgspec.json.decode(text, type=Saved)
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or not isinstance(model, dict):
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
    chat_templates = _chat_templates(path, settings)
    if named is None or chat_templates is None or not _settings_known(settings, saved):
        return None
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelUnsupported(
            f"The tokenizer in {path} cannot be loaded: {error}", remedy="Copy the model's tokenizer.json there."
        ) from error
    if not _ids_match(tokenizer, saved.added_tokens):
        return None
    return FastBackend(tokenizer, named, chat_templates)


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
    """Whether transformers builds, by its class for Qwen 2 and 3, what the file says."""
    if not qwen2_rules.applies(settings, str(model.get("model_type"))) or "model_name" in model:
        return False
    decoder = settings.get("added_tokens_decoder", {})
    if not _all_in_vocabulary(decoder, saved):
        return False
    return qwen2_rules.are_the_files(text, [(token.id, token.content) for token in saved.added_tokens], settings)


def _no_further_files(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the directory has no further file that transformers would read."""
    others = ["tekken.json", "additional_chat_templates"]
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


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Name -> template source, from chat_template.jinja or else the settings. None for an unknown format."""
    file = path / "chat_template.jinja"
    try:
        found = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    except (OSError, ValueError):
        return None
    if found is None or isinstance(found, str):
        return {} if found is None else {"default": found}
    try:
        return {entry["name"]: entry["template"] for entry in msgspec.convert(found, list[dict[str, str]])}
    except (msgspec.ValidationError, KeyError):
        return None


def _ids_match(tokenizer: Tokenizer, tokens: Sequence[NumberedToken]) -> bool:
    """Whether the library gave every added token the id of the file."""
    taken = tokenizer.get_added_tokens_decoder()
    return all(token.id in taken and taken[token.id].content == token.content for token in tokens)
