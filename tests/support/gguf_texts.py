"""Five hundred texts of all scripts, on which tokenizers are compared."""

from __future__ import annotations

import random

WRITTEN = (
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\r\n", "\r\n\r\n", " \n", "\n ", "\t\n", " \r\n ",
    "\n \n \n", "Hello world", " Hello world", "Hello  world ", "hello", "HELLO WORLD", "Hello, world!",
    "It's we'll I'd they've", "IT'S WE'LL I'D THEY'VE I'M", "'s 't 're", "don't can''t o'clock 'tis",
    "l'été d'où qu'il", "iPhone McDonald XMLHttp", "camelCaseAndSnake_case and kebab-case", "aBcDeF ABCdefGHI", "1",
    "12", "123", "1234", "12345", "1234567", "12345678901234567890", "3.14159", "1,234,567.89", "-42",
    "+1 (555) 010-9999", "2024-02-29T12:34:56Z", "0x1F600 0b1010 1e-5", "50% off $9.99 €5 £3 ¥700",
    "½ ¼ ² ³ ⅷ Ⅻ ①②③ 一二三", "٠١٢٣٤٥٦٧٨٩ ۱۲۳۴ १२३४५", "x=1;y=2", "a+b=c*d/e", "!!!???...", "--- === *** ___",
    "<<>>()[]{}", "`code` ```block```", "@user #tag ^_^ :-) ~", "$x^2$ \\frac{a}{b}",
    "email@example.com https://example.com/a?b=c&d=%20#e", "def f(x):\n    return x + 1\n", "def f(x):\n\treturn x\n",
    "if (a && b) {\r\n  c();\r\n}\r\n", "#include <stdio.h>\nint main() { return 0; }",
    "SELECT * FROM t WHERE a = 'b';", "<div class=\"a\">é</div>", "{\"a\": [1, 2.5, null, true]}",
    "// TODO: fix\n/* x */", "    four spaces", "        eight", "\t\ttabs", "a\tb\tc", "a    b", "trailing   ",
    "trailing\n", "line1\nline2\r\nline3\rline4", "a\n\n\n\nb", "a \n \n b", "word\n\n  word",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g", "zero\u200bwidth\u200cjoin\u200der\ufeffbom",
    "\x00\x01\x02\x1b\x7f", "a\x00b", "\x0b\x0c\x1c\x1d\x1e\x1f", "café naïve résumé",
    "cafe\u0301 nai\u0308ve re\u0301sume\u0301", "e\u0301\u0302\u0303 a\u0300", "Ångström Å \u212b K \u212a Ω \u2126",
    "ﬁ ﬂ ﬀ ﬃ", "Straße ẞ ß", "İstanbul ı I i", "ŁÓDŹ łódź Żółć", "Việt Nam Cửa", "Vie\u0323\u0302t Nam",
    "Ελληνικά ΑΒΓ άέή ς", "Русский ТЕКСТ ёлка", "Українська ґанок", "български", "ქართული", "Հայերեն", "你好世界",
    "漢字かな交じり文", "カタカナ ﾊﾝｶｸ ー", "한국어 문장 입니다", "ㄱㄴㄷ ㅏㅑ \u1112\u1161\u11ab",
    "我想在apple工作1314151天～", "。，、！？「」『』…—", "繁體中文，測試。", "𠀀𠮷𡃁", "龘靐齉", "豈更車",
    "العربية مرحبا بالعالم", "مُحَمَّد", "فارسی می‌خواهم", "اردو۔ ہے", "עברית שלום", "שָׁלוֹם",
    "हिन्दी नमस्ते दुनिया।", "क्षत्रिय ज्ञान", "বাংলা ভাষা", "தமிழ் மொழி", "తెలుగు", "ಕನ್ನಡ", "മലയാളം",
    "ภาษาไทย สวัสดีครับ", "ลาว ພາສາລາວ", "ខ្មែរ កាន់តែពិសេស", "မြန်မာ", "བོད་ཡིག", "አማርኛ", "ᠮᠣᠩᠭᠣᠯ", "ᏣᎳᎩ ꮳꮃꭹ",
    "ⵜⵉⴼⵉⵏⴰⵖ", "😀😃", "👨‍👩‍👧‍👦", "👍🏽👍", "🏳️‍🌈🇩🇪🇫🇷", "😶‍🌫️ ✅ 🦙🦙", "❤️ ☺︎ ™ © ®", "♠♣♥♦ ←↑→↓ ∑∏√∞≠≤",
    "1️⃣2️⃣", "𝒳𝓨𝔸 𝟏𝟐", "𐐷𐑌 𞤀𞤢", "\ue000\uf8ff\U000f0000", "\ufffd\ufffe", "\u0378\u0379", "a\u0301\u200d\u0301",
    "\u0301start", " \u0301", "1\u0301 2\u20e3", "İ\u0307", "ǅ ǈ ǋ Dž", "ʰʷˠ ªº", "ªº²³¹", "<|im_end|>", "<s>",
    "</s>", "a<|im_end|>b", " <|im_end|> ", "<|im_end|>\n<|im_end|>", "<|im_end|", "<s><s> x </s>", "<0x0A>", "<unk>",
    "▁a▁▁b", " ▁ ", "Ġhello", "[INST] x [/INST]", "'S'T'RE'ſ 'D", "1st 2nd 3rd", "v1.2.3-beta+4", "x'stop'stop'stop",
    "A1 B22 C333 D4444", "x²+y³", "10km/h", "C++ C# F#", "a/b\\c|d", "and/or\n/path/to/x/\n", "!/\n//\n",
    "?\r\n!\n\n", "...\n\n...", "a!\n\nb", "(a) [b] {c} <d> \"e\" 'f' `g`", "“quotes” ‘single’ «french» „german‟",
    "100,000,000 1000000000 12 34", "१२३४ ١٢٣٤٥ 123", "aaaaaaaaaaaaaaaa", "ababababab",
    "                                ", "=" * 40, "\n" * 9, "\t" * 7, "0" * 33,
)  # fmt: skip
PARTS = (
    "the", "quick", "Brown", "FOX", "isn't", "we'LL", "naïve", "cafe\u0301", "Über", "ÉCOLE", "привет", "МИР",
    "λόγος", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "你好", "世界", "こんにちは", "カタカナ", "한국어", "👍🏽", "👩‍💻",
    "🇯🇵", "🙂", "1", "42", "365", "2024", "99999", "٣٤٥", "x²", "_a", "f(x)", "==", "!=", "->", "...", "!", "?!", ",",
    "。", "، ", ";", "(", ")", "[0]", "{", "}", "\"", "'", "`", "$", "%", "&", "/", "//", "\\n", "#", "@", "\x07",
    "\u200b", "\ue123", "\u0300", "<s>", "ﬁ", "Ⅳ", "½", "º",
)  # fmt: skip
JOINTS = ("", "", " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n  ", "\u00a0", "\u3000")


def five_hundred() -> list[str]:
    """Written texts, then random ones of parts with blanks between, before and after them."""
    random_numbers = random.Random(55)
    made = list(WRITTEN)
    while len(made) < 500:
        n = 1 + int(random_numbers.random() * 7)
        parts = [PARTS[int(random_numbers.random() * len(PARTS))] for _ in range(n)]
        joints = [JOINTS[int(random_numbers.random() * len(JOINTS))] for _ in range(n + 1)]
        made.append(joints[0] + "".join(part + joint for part, joint in zip(parts, joints[1:], strict=True)))
    return made
