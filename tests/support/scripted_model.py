"""A model that says given texts: tokenizers with the templates of four formats of calls, and an engine on a script.

The templates are cut down from those of Qwen 3 (hermes), Qwen 3 Coder (qwen3_coder), LFM 2 (lfm2, Python's calls) and
gpt-oss (openai, channels). As the originals they write arguments in their own words, and leave older reasoning out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from phalanx.supervision.fake_engine import FAKE_INFO, FakeEngine
from phalanx.text.tokenizer import Tokenizer
from phalanx.types import Finished, SequenceRequest

CHATML = """
{%- macro head(role) %}{{ '<|im_start|>' + role + '\\n' }}{% endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{{ head('system') }}# Tools\\n<tools>
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\nCalls are written as HOW<|im_end|>\\n' }}{% endif -%}
{%- for m in messages %}
{%- if m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif m.role == 'assistant' -%}
{{ head('assistant') }}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif -%}
{{ m.content }}CALLS{{ '<|im_end|>\\n' }}
{%- else %}{{ head(m.role) + m.content + '<|im_end|>\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif -%}
"""
JSON_CALLS = """{% for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}"""
MARKUP_CALLS = """{% for tool_call in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
{%- for key, value in tool_call.function.arguments.items() -%}
{{ '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"""
PYTHON_CALLS = """{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}{% for call in m.tool_calls -%}
{{ call.function.name + '(' }}{% for key, value in call.function.arguments.items() -%}
{{ key + '=' + (value | tojson) + (', ' if not loop.last else '') }}{% endfor -%}
{{ ')' + (', ' if not loop.last else '') }}{% endfor %}{{ ']<|tool_call_end|>' }}{% endif %}"""
HARMONY = """
{%- if tools %}{{ '<|start|>developer<|message|>namespace functions {' }}
{%- for tool in tools %}{{ '\\ntype ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}{% endfor -%}
{{ '}<|end|>' }}{% endif -%}
{%- set ns = namespace(last='', final=-1) -%}
{%- for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|start|>functions.' + ns.last + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{%- if m.reasoning_content and loop.index0 > ns.final -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif -%}
{%- set ns.last = m.tool_calls[0].function.name -%}
{{ '<|start|>assistant to=functions.' + ns.last + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' -%}
{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}
"""


def _chatml(calls: str, how: str) -> str:
    return CHATML.replace("CALLS", calls).replace("HOW", how)


TEMPLATES = {
    "hermes": _chatml(JSON_CALLS, '<tool_call>\\n{"name": "f", "arguments": {"a": 1}}\\n</tool_call>'),
    "qwen3_coder": _chatml(MARKUP_CALLS, "<tool_call>\\n<function=f>\\n<parameter=a>\\n1\\n</parameter>\\n</function>"),
    "lfm2": _chatml(PYTHON_CALLS, "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
    "openai": HARMONY,
}
MARKS = {
    "hermes": ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "lfm2": ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>"),
    "openai": (*("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),),
}
ENDS = {name: ("<|return|>", "<|call|>") if name == "openai" else ("<|im_end|>",) for name in TEMPLATES}
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that are no special tokens, as Qwen's."""


def tokenizer_of(shape: str, path: Path) -> Tokenizer:
    """A byte-level tokenizer with the marks and the template of a format."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    fast.train_from_iterator(['{"city": "Oslo"}, the weather there is fine'] * 4, trainer)
    fast.add_tokens([AddedToken(mark, special=mark not in PLAIN, normalized=False) for mark in MARKS[shape]])
    path.mkdir(parents=True, exist_ok=True)
    fast.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ENDS[shape][0],
        "chat_template": TEMPLATES[shape],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [fast.token_to_id(end) for end in ENDS[shape]]
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}))
    return Tokenizer.load(path)


class ScriptedEngine(FakeEngine):
    """Says one text after the other, each to one request, whatever that asks; special tokens stand in it as text.

    Counts cached tokens as an engine does that keeps every prefix: all that a prompt has in common with a prompt and
    its answer up to the last token, which no forward has seen.

    Args:
        answers: texts with their end; or what makes one of the prompt's text.
    """

    def __init__(self, tokenizer: Tokenizer, answers: Iterable[str] | Callable[[str], str], **options: Any) -> None:
        info = replace(FAKE_INFO, vocab_size=tokenizer.vocab_size, max_model_len=1 << 20)
        super().__init__(info, script=self._next, **options)
        self._tokenizer = tokenizer
        self._answers = answers if callable(answers) else iter(answers)
        self._said: dict[str, list[int]] = {}  # id of the request -> its answer
        self._prompts: dict[str, list[int]] = {}
        self._cached: dict[str, int] = {}
        self._computed: list[list[int]] = []

    def _next(self, request: SequenceRequest, position: int) -> int:
        if request.id not in self._said:
            self._begin(request)
        said = self._said[request.id]
        return said[position] if position < len(said) else min(self._tokenizer.eos_ids)

    def _begin(self, request: SequenceRequest) -> None:
        if callable(self._answers):
            text = self._answers(self._tokenizer.decode(request.prompt, skip_special_tokens=False))
        else:
            text = next(self._answers)
        self._prompts[request.id] = request.prompt
        self._said[request.id] = self._tokenizer.encode(text, add_special_tokens=False)
        self._cached[request.id] = max((_common(request.prompt, one) for one in self._computed), default=0)

    def emit_batch(self, batch: Any) -> None:
        """Keep the prefixes of sequences that end, and say how much of each prompt was cached."""
        for i, event in enumerate(batch.events):
            if isinstance(event, Finished):
                request = next(
                    m.request for m in self.received if getattr(m, "request", None) and m.request.id == event.id
                )
                self._computed.append([*request.prompt, *self._said[event.id][: event.n_tokens - 1]])
                batch.events[i] = replace(event, cached_tokens=self._cached[event.id])
        super().emit_batch(batch)


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)
