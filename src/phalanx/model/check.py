"""The model check at start: compares ragged rows with mlx-lm's own caches, on a dozen tokens, in the model's dtype.

Two rows of different length are prefilled, decoded together, verified with padding and rolled back. All logits must
equal those of the model with mlx-lm's caches, one row at a time, up to a tolerance. If rows cannot be computed
together, the check tries them one after another; if that is wrong as well, it refuses the model. In the same way it
finds out whether rows can be packed, without padding. A stage is checked alone, on random hidden states as input, and
must not need anything else from earlier stages. Leaves no state behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from phalanx.errors import CollectiveFault, EngineError, ModelUnsupported
from phalanx.model.cache.layer_layout import KvLayout, leaves, single_caches
from phalanx.model.runner import Runner
from phalanx.model.stage import call_model, cannot_be_cut
from phalanx.sched.plan import Admit, Forward, Resize

FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a model's own code may raise with a config or a cache that it was not written for."""

ARENA = -1  # of the check alone: no plan names it
PROMPTS = ((11, 7), (5, 3, 8, 2, 9))
NEXT = (4, 6)
"""Tokens after the prompts: any ids that every vocabulary has."""

LARGEST = 11
"""The largest of these ids."""

EXACT, ROUNDED = 0.01, 0.25
"""Largest RMS of the difference, in units of the logits' standard deviation. A wrong mask or position gives ~1; a
rounding error in 16 bits that selects another expert gives ~0.1."""

Compared = tuple[str, mx.array, mx.array]


def check_model(runner: Runner, model: Module, *, may_pack: bool = False) -> None:
    """Compare `runner` with `model` on mlx-lm's caches. May set `one_row` or `packs` in `runner.facts`.

    Args:
        may_pack: whether all ranks can pack rows (have the native kernels). Must be the same on all ranks.

    Raises:
        ModelUnsupported: rows of different lengths differ from mlx-lm's results, or mlx-lm fails or computes no
            numbers; says where and how. Or a stage needs something of other stages.
    """
    try:
        expected = [
            _reference_logits(runner, model, prompt, follow) for prompt, follow in zip(PROMPTS, NEXT, strict=True)
        ]
    except FOREIGN as error:
        raise ModelUnsupported(
            f"mlx-lm itself cannot run the model here in {str(runner.dtype).rpartition('.')[2]}: {error}",
            remedy="Try --dtype float32, or a quantised version of the model.",
        ) from error
    if not all(mx.isfinite(logits).all().item() for row in expected for logits in row):
        raise ModelUnsupported(
            "The model computes no numbers: mlx-lm's own logits are NaN or infinite.",
            remedy="Weights or config.json are damaged: download the model again. In float16 also try --dtype float32.",
        )
    problem = _first_difference(runner, expected)
    if problem and not runner.facts.one_row:
        reason = f"together they disagree with mlx-lm ({problem})"
        facts = runner.facts
        runner.facts = replace(facts, one_row=reason, description=f"{facts.description}; rows one by one: {reason}")
        problem = _first_difference(runner, expected)
    if problem:
        raise ModelUnsupported(
            f"The model's output on rows of different lengths is not mlx-lm's: {problem}.",
            remedy="Please report the model's name; it can be run with mlx-lm itself.",
        )
    facts = runner.facts
    if may_pack and facts.supports_rollback and not facts.one_row:
        runner.facts = replace(facts, packs=not _first_difference(runner, expected, packed=True))


def tolerance_of(dtype: mx.Dtype, *, on_cpu: bool) -> float:
    """The tolerance of the check: `EXACT` only where products are.

    GPUs round the operands of float32 products of several rows to 10 bits (TF32), as much as float16; mlx-lm computes
    the check's rows one at a time, and the runner together.
    """
    return EXACT if dtype == mx.float32 and on_cpu else ROUNDED


def _reference_logits(runner: Runner, model: Module, prompt: Sequence[int], follow: int) -> list[mx.array]:
    """The logits after the prompt and after one more token, with mlx-lm's own caches; of a stage what it hands on."""
    caches = make_prompt_cache(model)
    outputs = []
    for tokens in (prompt[:-1], prompt[-1:], [follow]):
        output = call_model(model, runner.stage, mx.array([tokens]), caches, _hidden_input(runner, [tokens]))[0, -1]
        sums = runner.reducer.finish()
        mx.eval(*sums, output)
        if runner.stage is not None and mx.isnan(output).any().item():
            raise cannot_be_cut(
                runner.stage.name,
                f"{runner.stage} cannot do with the array that is handed on: NaN came from elsewhere",
            )
        runner.reducer.judge(0, sums)
        outputs.append(output)
        if runner.stage is not None:
            _advance_foreign(runner, caches, len(tokens))
    return outputs[1:]


def _advance_foreign(runner: Runner, caches: list[Any], count: int) -> None:
    """Make mlx-lm's caches of other stages' layers longer, from which a model may take masks. They stay empty."""
    for leaf, cache in zip(leaves(runner.facts.layouts), single_caches(caches), strict=True):
        if isinstance(leaf, KvLayout) and leaf.keys is None:
            cache.offset += count


def _hidden_input(runner: Runner, rows: Sequence[Sequence[int]]) -> mx.array | None:
    """The stage's input hidden states for these tokens: [rows, L, width], equal for equal tokens; None without any."""
    if runner.stage is None or not runner.stage.has_hidden_input:
        return None
    table = mx.random.normal((LARGEST + 1, runner.stage.width), runner.dtype, key=mx.random.key(0))
    hidden: mx.array = table[mx.array([list(row) for row in rows])]
    return hidden


def _first_difference(runner: Runner, expected: list[list[mx.array]], *, packed: bool = False) -> str:
    """The first difference beyond the tolerance, or the first error, in words; "" if there is none."""
    tolerance = tolerance_of(runner.dtype, on_cpu=mx.default_device() == mx.Device(mx.cpu))
    try:
        for place, ours, theirs in (_compare_packed if packed else _compare)(runner, expected):
            distance = _distance(ours, theirs)
            if not distance <= tolerance:
                return f"{place}: relative difference {distance:.2g}, allowed {tolerance:g}"
    except CollectiveFault:
        raise
    except (EngineError, *FOREIGN) as error:
        return repr(error)
    finally:
        runner.reducer.discard()  # of a call that failed
        runner.reset()
        runner.apply([Resize(arena=ARENA, rows=0, capacity=0)])
    return ""


def _compare(runner: Runner, expected: list[list[mx.array]]) -> Iterator[Compared]:
    """Run the forwards of the check. Yields a description, the runner's logits and mlx-lm's."""
    short, long = PROMPTS
    lengths = _prefill(runner)
    logits = _feed(runner, 0, [short[-1:], long[-1:]], lengths, sample=True)
    for row in range(2):
        yield f"row {row}, one token", logits[row, 0], expected[row][0]
    if runner.facts.supports_rollback:
        logits = _feed(runner, 0, [(short[-1], NEXT[0]), long[-1:]], lengths, sample=True)
        yield "row 0, first of two tokens", logits[0, 0], expected[0][0]
        yield "row 0, second of two tokens", logits[0, 1], expected[0][1]
        yield "row 1, padded", logits[1, 0], expected[1][0]
    lengths = [length + 1 for length in lengths]
    logits = _feed(runner, 0, [(token,) for token in NEXT], lengths, sample=True)
    for row in range(2):
        yield f"row {row}, next token", logits[row, 0], expected[row][1]


def _compare_packed(runner: Runner, expected: list[list[mx.array]]) -> Iterator[Compared]:
    """As `_compare`, with packed rows: two tokens of one row and one of the other, and the reverse."""
    short, long = PROMPTS
    lengths = _prefill(runner)
    logits = _feed(runner, 0, [(short[-1], NEXT[0]), long[-1:]], lengths, sample=True, packed=True)
    yield "row 0, first of two tokens", logits[0, 0], expected[0][0]
    yield "row 0, second of two tokens", logits[1, 0], expected[0][1]
    yield "row 1", logits[2, 0], expected[1][0]
    logits = _feed(runner, 0, [short[-1:], (long[-1], NEXT[1])], lengths, sample=True, packed=True)
    yield "row 0", logits[0, 0], expected[0][0]
    yield "row 1, first of two tokens", logits[1, 0], expected[1][0]
    yield "row 1, second of two tokens", logits[2, 0], expected[1][1]


def _prefill(runner: Runner) -> list[int]:
    """Prefill both prompts except for their last tokens. Returns the lengths."""
    short, long = PROMPTS
    admits = [Admit(arena=ARENA, slot=slot, seq=slot) for slot in range(2)]
    runner.apply([Resize(arena=ARENA, rows=2, capacity=len(long) + 3), *admits])
    _feed(runner, 0, [short[:-1]], [0], sample=False)
    _feed(runner, 1, [long[:2]], [0], sample=False)
    _feed(runner, 1, [long[2:-1]], [2], sample=False)
    return [len(short) - 1, len(long) - 1]


def _feed(
    runner: Runner,
    start: int,
    rows: Sequence[Sequence[int]],
    kv_len: Sequence[int],
    *,
    sample: bool,
    packed: bool = False,
) -> mx.array:
    width = max(map(len, rows))
    forward = Forward(
        arena=ARENA,
        start=start,
        seqs=tuple(range(start, start + len(rows))),
        tokens=tuple((*row, *[0] * (width - len(row))) for row in rows),
        valid=tuple(len(row) for row in rows),
        sample=sample,
        packed=packed,
    )
    fed = [(token,) for row in rows for token in row] if packed else forward.tokens
    logits = runner.forward(forward, kv_len, _hidden_input(runner, fed))
    if logits is None:
        return mx.zeros((0,))
    mx.eval(logits, runner.written_caches())
    runner.check_sums()
    return logits


def _distance(ours: mx.array, theirs: mx.array) -> float:
    """RMS of the difference, in standard deviations of `theirs`; NaN if any value is."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    distance = mx.sqrt(mx.mean((a - b) ** 2)) / mx.maximum(mx.std(b), 1e-6)
    return float(cast(float, distance.item()))
