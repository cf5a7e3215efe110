"""Draws `docs/demo.svg`, the picture in the README: what `make demo` prints, less most start-up lines.

    make demo 2>&1 | python tools/readme_picture.py         # in a fresh clone

Sets the lines that `SHOWN` names, unchanged but for their end where they are too long. The picture names no font file,
so that nothing is loaded from elsewhere. Does not know what the demo does.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
COLUMNS = 104
CHARACTER, LINE, MARGIN = 8.4, 20, 18  # pixels, at a font size of 14

SHOWN = (
    (r"^\$ ", "command"),
    (r"^(Installing|Compiling|Taking|pulling) ", "quiet"),
    (r"^rank \d: context", "quiet"),
    (r"^serving at", "plain"),
    (r"^(you|model) | \S", "talk"),
    (r"^kill -9 ", "command"),
    (r"^(first token after|The answer stood still|Asked again) ", "plain"),
    (r"^rank \d \(", "good"),
)
"""Pattern of a line -> its style; a blank line stands wherever the style changes."""

STYLES = {
    "command": "fill:#ffffff;font-weight:bold",
    "quiet": "fill:#8b949e",
    "plain": "fill:#c9d1d9",
    "talk": "fill:#79c0ff",
    "good": "fill:#7ee787",
}


def main() -> None:
    """Read the transcript and write the picture."""
    printed = ["$ make demo", *sys.stdin.read().splitlines()]
    lines = [(line, style) for line in printed if (style := style_of(line))]
    PICTURE.write_text(draw(lines))
    print(f"{PICTURE}: {len(lines)} lines")


def style_of(line: str) -> str:
    """The style of a line that is shown, "" for others."""
    return next((style for pattern, style in SHOWN if re.match(pattern, line)), "")


def draw(lines: list[tuple[str, str]]) -> str:
    """The lines as an SVG of a terminal."""
    texts, y, before = [], MARGIN + 26, lines[0][1]
    for line, style in lines:
        y += LINE if style == before else LINE * 3 // 2
        before = style
        shown = line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
        texts.append(f'<text x="{MARGIN}" y="{y}" class="{style}">{escape(shown)}</text>')
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), y + MARGIN
    rules = "".join(f".{name}{{{rule}}}" for name, rule in STYLES.items())
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 20 * i}" cy="20" r="6" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-label="A terminal in which make demo asks a model three things and kills a rank">\n'
        f"<style>text{{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}}{rules}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{dots}\n' + "\n".join(texts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
