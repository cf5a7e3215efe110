"""How a text is cut before byte-level BPE merges its bytes: llama.cpp's names of pre-tokenizers, and their rules.

The names, `whole_words` and `add_bos` are those of llama.cpp's llama-vocab.cpp. The expressions and `nfc` are those of
the models' own tokenizer.json where llama.cpp differs: docs/model-directories.md says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """A rule: each expression cuts the parts that those before it left; matches and the text between them are parts."""

    cuts: tuple[str, ...]
    whole_words: bool = False
    """Whether a part that is a token stays whole, whatever the merges say."""
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # the text is composed first


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # ends of English words
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
QWEN2 = rf"{SHORT}|{WORD}|\p{{N}}|{SIGNS}|{SPACES}"
LLAMA3 = rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
TEKKEN = rf"{'|'.join(TEKKEN_WORDS)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
O200K_WORDS = "|".join(rf"{word}{SHORT}?" for word in TEKKEN_WORDS)
O200K = rf"{O200K_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3 = (
    r"\p{N}{1,3}", CJK,
    rf"{ASCII_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
)  # fmt: skip
CASED = (  # escapes for letters that Unicode normalises to others
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
HANGUL_CJK = "[一-龥ࠀ-一가-퟿]+"
THREES = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}"  # digits in threes from the right
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
NO_HAN = r"&&[^\p{Han}]"
KIMI_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}{NO_HAN}]*[{LOWER}{NO_HAN}]+{SHORT}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}{NO_HAN}]+[{LOWER}{NO_HAN}]*{SHORT}?"
)

HANGUL_JAMO = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|"
RUNS = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))  # blanks by powers of two

_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2,))
_O200K = PreTokenizer((O200K,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais"), _GPT2),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("mpt", "olmo"), _GPT2._replace(nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": _DIGITS._replace(nfc=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("glm4", "glm5"), _LLAMA3._replace(add_bos=False)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), whole_words=True),
    "jais-2": PreTokenizer((rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}|\s*[\r\n]+|{RUNS}|\s{{1,2}}(?!\S)|\s",)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2._replace(nfc=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open", "bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2),
    "qwen35": PreTokenizer((
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
    ), nfc=True),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2)),
    "ufakzeka": PreTokenizer((rf"{WORD}|\p{{N}}|{SIGNS}|{SPACES}",)),
    "seed-coder": PreTokenizer((rf"{SHORT}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}",)),
    "exaone-moe": PreTokenizer((
        rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|{SPACES}",
    )),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3}){0,99}\b)", O200K))),
    "youtu": PreTokenizer((
        HANGUL_JAMO + CJK, O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
    ), whole_words=True),
    "kimi-k2": PreTokenizer((rf"\p{{Han}}+|{KIMI_WORDS}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}",)),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?[{CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HANGUL_CJK, r"\p{N}+",
    )),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HANGUL_CJK, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(DEEPSEEK3)),
    "spark2_5": PreTokenizer((*DEEPSEEK3[:2], DEEPSEEK3[2].replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}")),
    "afmoe": PreTokenizer((THREES, ASIAN, DEEPSEEK3[2])),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3}){1,99}(?!\d))")),  # 99: no number takes quadratic time
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer((BLOOM,))),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
}  # fmt: skip
"""`tokenizer.ggml.pre` -> the rule. Those of models that only embed texts are left out."""
