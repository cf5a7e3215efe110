"""Drafters and control together on texts as people have models write them; tokens are words and signs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from machine import CURVES, few_cores, memory_bound, recite, stairs

from phalanx.spec.drafters import RandomDrafter
from phalanx.spec.ngram import NgramDrafter
from phalanx.spec.rules import build
from phalanx.spec.suffix import SuffixDrafter
from phalanx.speculation_config import NgramSpeculation, RandomSpeculation, SuffixSpeculation

ROOT = Path(__file__).resolve().parents[3]
WORDS: dict[str, int] = {}


def tokens(text: str) -> list[int]:
    """One per word or sign."""
    return [WORDS.setdefault(piece, len(WORDS)) for piece in re.findall(r"\w+|\s+|.", text)]


def code_edit() -> tuple[str, str]:
    source = (ROOT / "src" / "phalanx" / "sched" / "arena.py").read_text()
    return source + "\nRename slot to place.", source.replace("slot", "place")


def records() -> tuple[str, str]:
    draw = random.Random(3)
    rows = [{"name": f"n{draw.randrange(99)}", "age": draw.randrange(90), "town": f"t{draw.randrange(9)}"}
            for _ in range(40)]  # fmt: skip
    return "Write forty records.", "\n".join(map(json.dumps, rows))


def prose() -> tuple[str, str]:
    text = (ROOT / "docs" / "design.md").read_text()
    return "Describe the system.", text[text.index("Ranks are replicas") :][:6000]


METHODS = {
    "ngram": (NgramSpeculation(), lambda: NgramDrafter(NgramSpeculation())),
    "suffix": (SuffixSpeculation(), lambda: SuffixDrafter(SuffixSpeculation())),
}


def gain(method: str, curve, text: tuple[str, str]) -> float:
    config, make = METHODS[method]
    prompt, answer = text
    return recite(build(config), make(), curve, tokens(prompt), tokens(answer))


@pytest.mark.parametrize("method", METHODS)
class TestDocuments:
    """Gains over non-speculative steps, from the first token of the first request on."""

    def test_code_with_a_name_changed(self, method):
        assert gain(method, memory_bound, code_edit()) > 4
        assert gain(method, stairs, code_edit()) > 2.5
        assert gain(method, few_cores, code_edit()) > 1.15

    def test_records(self, method):
        assert gain(method, memory_bound, records()) > 1.8
        assert gain(method, stairs, records()) > 1.8

    @pytest.mark.parametrize("curve", CURVES)
    def test_prose_loses_nothing(self, method, curve):
        assert gain(method, curve, prose()) > 0.98

    def test_the_same_answer_again(self, method):
        """What an agent asks twice is nearly free the second time."""
        config, make = METHODS[method]
        prompt, answer = (tokens(text) for text in prose())
        drafter, control = make(), build(config)
        first = recite(control, drafter, memory_bound, prompt, answer, key=0)
        assert recite(control, drafter, memory_bound, prompt, answer, key=1) > 3 * first


@pytest.mark.parametrize("curve", CURVES)
def test_noise_costs_nothing(curve):
    prompt, answer = (tokens(text) for text in prose())
    assert recite(build(RandomSpeculation()), RandomDrafter(len(WORDS)), curve, prompt, answer) > 0.98
