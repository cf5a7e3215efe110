"""`--tp auto --pp auto`: the shape of a group as `phalanx plan` recommends it, and the line that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from phalanx.cli.terminal import note
from phalanx.cluster.argument_flags import flag_value, split_flag
from phalanx.cluster.planner import Planned, PlanRequest, make_plans
from phalanx.cluster.shape import PP_FLAGS, SPLIT_FLAG, TP_FLAGS
from phalanx.config import DEFAULT_MODEL
from phalanx.errors import ConfigError, MemoryShortage
from phalanx.planning.recommendation import GroupPlan, recommend

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


def planned_here(words: Sequence[str]) -> list[str]:
    """The words of `phalanx serve` for this machine, with numbers in place of `auto`; says which, and why.

    Raises:
        ConfigError, MemoryShortage, ModelNotFound: as `without_auto` and `recommended`.
    """
    rest, is_auto = without_auto(words)
    if not is_auto:
        return [*words]
    request = plan_request(rest[rest.index("serve") + 1 :])
    plan, line = recommended(request)
    note(line)
    return [*rest, "--tp", str(plan.candidate.width), "--pp", str(plan.candidate.stages)]


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


def recommended(request: PlanRequest) -> tuple[GroupPlan, str]:
    """The plan to serve with, and a line that says what was chosen and why.

    Raises:
        MemoryShortage: nothing fits; says what each plan lacks.
        ClusterError, ConfigError: as `make_plans`.
    """
    planned = asyncio.run(make_plans(request))
    best = recommend(planned.plans, "latency")
    if best is None:
        raise unfitting(planned)
    speed = best.plan.speed
    line = f"plan: {best.plan.candidate.name} ({best.plan.candidate.flags}). {best.why}"
    if speed is not None:
        line += f" Predicted: {1000 / speed.tokens_per_s[1]:.2f} ms a token, {speed.error:.0%} more or less."
    return best.plan, line


def unfitting(planned: Planned) -> MemoryShortage:
    """The error where nothing fits, with what each plan lacks and the nearest that fit."""
    reasons = "\n".join(f"  {plan.candidate.name}: {plan.fit.problem}" for plan in planned.plans)
    smaller = "a smaller or more strongly quantised model"
    return MemoryShortage(
        f"{planned.shape.name} fits in no way:\n{reasons}",
        remedy=f"What fits: {'; '.join([*planned.nearest, smaller])}." if planned.nearest else f"Use {smaller}.",
    )
