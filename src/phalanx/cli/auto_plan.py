"""`--tp auto --pp auto`: the shape of a group as `phalanx plan` recommends it, and the line that says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from phalanx.cli.terminal import note
from phalanx.cluster.argument_flags import flag_value, split_flag
from phalanx.cluster.planner import Planned, PlanRequest, make_plans
from phalanx.cluster.shape import PP_FLAGS, SPLIT_FLAG, TP_FLAGS
from phalanx.cluster.survey import learn
from phalanx.config import DEFAULT_MODEL
from phalanx.errors import ConfigError, MemoryShortage
from phalanx.planning.recommendation import GroupPlan, recommend
from phalanx.planning.timings import Learned
from phalanx.server.sequences.speed_meter import PROMPT, PredictedSpeed, SpeedMeter

log = logging.getLogger(__name__)

AUTO = "auto"


def without_auto(words: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The arguments of `serve` without `--tp auto` and `--pp auto`, and whether they were there.

    Raises:
        ConfigError: one of the two is auto, and the other or the layers of stages are chosen.
    """
    rest, tps = split_flag(words, *TP_FLAGS)
    rest, pps = split_flag(rest, *PP_FLAGS)
    if AUTO not in (*tps, *pps):
        return tuple(words), False
    chosen = [f"--tp {value}" for value in tps if value != AUTO] + [f"--pp {value}" for value in pps if value != AUTO]
    chosen += [f"{SPLIT_FLAG} {value}" for value in split_flag(rest, SPLIT_FLAG)[1]]
    if chosen:
        raise ConfigError(
            f"{'--tp' if AUTO in tps else '--pp'} {AUTO} chooses ranks and stages together, but there is {chosen[0]}.",
            remedy="Leave one of them out. `phalanx plan` shows all plans.",
        )
    return rest, True


def chooses_shape(words: Sequence[str]) -> bool:
    """Whether the arguments of `serve` choose ranks or stages themselves."""
    rest, tps = split_flag(words, *TP_FLAGS)
    rest, pps = split_flag(rest, *PP_FLAGS)
    return bool(tps or pps or split_flag(rest, SPLIT_FLAG)[1])


def planned_here(words: Sequence[str]) -> list[str]:
    """The words of `phalanx serve` for this machine, with numbers in place of `auto`; says which, and why.

    Raises:
        ConfigError, MemoryShortage, ModelNotFound: as `without_auto` and `recommended`.
    """
    rest, is_auto = without_auto(words)
    if not is_auto:
        return [*words]
    request = plan_request(rest[rest.index("serve") + 1 :])
    plan, model, line = asyncio.run(recommended(request))
    note(line)
    shape = ["--tp", str(plan.candidate.width), "--pp", str(plan.candidate.stages)]
    return [*rest, *shape, *predicted_words(plan, model)]


def plan_request(words: Sequence[str]) -> PlanRequest:
    """What the arguments of `serve` ask of a plan, on this machine: model, context and memory."""
    context = flag_value(words, "--max-model-len")
    return PlanRequest(
        model=words[0] if words and not words[0].startswith("-") else DEFAULT_MODEL,
        max_len=int(context) if context is not None and context.isdecimal() else None,
        kv_gb=_number(words, "--kv-cache-gb"),
        guard_gb=_number(words, "--memory-guard-gb"),
    )


def _number(words: Sequence[str], flag: str) -> float | None:
    """The value of a flag; None where there is none, or `serve` itself will refuse it."""
    try:
        return float(flag_value(words, flag) or "")
    except ValueError:
        return None


def predicted_words(plan: GroupPlan, model: str) -> list[str]:
    """The words of `serve` that carry what is predicted for a plan.

    Args:
        model: `ModelShape.key`.
    """
    speed = plan.speed
    if speed is None or PROMPT not in speed.ttft_s:
        return []
    predicted = PredictedSpeed(
        tokens_per_second=speed.tokens_per_s[1], ttft_seconds=speed.ttft_s[PROMPT], model=model,
        plan=plan.candidate.key, rate_factor=speed.learned.rate, ttft_factor=speed.learned.ttft,
    )  # fmt: skip
    return ["--predicted", msgspec.json.encode(predicted).decode()]


def read_predicted(text: str) -> PredictedSpeed | None:
    """What `predicted_words` has written; None without it.

    Raises:
        ConfigError: the text is of another form.
    """
    try:
        return msgspec.json.decode(text, type=PredictedSpeed) if text else None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--predicted: {error}.", remedy="`phalanx up` and `--tp auto` write it.") from error


def learn_from(speeds: SpeedMeter) -> None:
    """Store measured over predicted speed, for later predictions of the same model and plan."""
    predicted, rate, first_s = speeds.predicted, speeds.tokens_per_second, speeds.ttft_seconds
    if predicted is None or not predicted.plan or (rate is None and first_s is None):
        return
    off = 1.0 if rate is None else rate / predicted.tokens_per_second
    late = 1.0 if first_s is None else first_s / predicted.ttft_seconds
    found = Learned(rate=predicted.rate_factor * off, ttft=predicted.ttft_factor * late)
    try:
        learn(predicted.model, predicted.plan, found)
    except OSError as error:
        log.warning("what this start measured is not kept for `phalanx plan`: %s", error)


async def recommended(request: PlanRequest) -> tuple[GroupPlan, str, str]:
    """The plan to serve with, the model's `ModelShape.key`, and a line that says what was chosen and why.

    Raises:
        MemoryShortage: nothing fits; says what each plan lacks.
        ClusterError, ConfigError: as `make_plans`.
    """
    planned = await make_plans(request)
    best = recommend(planned.plans, "latency")
    if best is None:
        raise unfitting(planned)
    speed = best.plan.speed
    line = f"plan: {best.plan.candidate.name} ({best.plan.candidate.flags}). {best.why}"
    if speed is not None:
        line += f" Predicted: {1000 / speed.tokens_per_s[1]:.2f} ms a token, {speed.error:.0%} more or less."
    return best.plan, planned.shape.key, line


def unfitting(planned: Planned) -> MemoryShortage:
    """The error where nothing fits, with what each plan lacks and the nearest that fit."""
    reasons = "\n".join(f"  {plan.candidate.name}: {plan.fit.problem}" for plan in planned.plans)
    smaller = "a smaller or more strongly quantised model"
    return MemoryShortage(
        f"{planned.shape.name} fits in no way:\n{reasons}",
        remedy=f"What fits: {'; '.join([*planned.nearest, smaller])}." if planned.nearest else f"Use {smaller}.",
    )
