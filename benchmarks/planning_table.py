"""The tables of docs/planning.md, made of the results of `planning.py`."""

from __future__ import annotations

from typing import Any

NEAR = 0.25
FIGURES = {
    "tokens/s x1": "1 stream", "tokens/s x4": "4 streams", "tokens/s x16": "16 streams",
    "first of 512": "first of 512", "first of 4000": "first of 4,000",
}  # fmt: skip
WISHES = {"latency": "tokens/s x1", "throughput": "tokens/s x16"}
ENOUGH = 0.9  # of the best measured plan


def table(results: list[dict[str, Any]]) -> str:
    """Measured over predicted, one line for each plan, and which recommendations were right."""
    lines = [f"| model, plan | link | {' | '.join(FIGURES.values())} |", f"|{'---|' * (2 + len(FIGURES))}"]
    near = count = 0
    for result in results:
        by_plan: dict[tuple[str, str, str], dict[str, float]] = {}
        for row in result["rows"]:
            by_plan.setdefault((row["model"], row["plan"], row["link"]), {})[row["figure"]] = row["ratio"]
        for (model, plan, link), ratios in by_plan.items():
            known = [ratio for ratio in ratios.values() if ratio > 0]
            count += len(known)
            near += sum(abs(ratio - 1) <= NEAR for ratio in known)
            cells = (f"{ratios[name]:.2f}" if ratios.get(name) else "-" for name in FIGURES)
            lines.append(f"| {model}, {plan} | {link or 'one machine'} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{near} of {count} within 25 %.", *_recommended(results)])


def _recommended(results: list[dict[str, Any]]) -> list[str]:
    """For each case: the recommended plan's speed over the best one's."""
    lines = []
    for result in results:
        for wish, figure in WISHES.items():
            rates = {row["plan"]: row["measured"] for row in result["rows"] if row["figure"] == figure}
            chosen = result["recommended"].get(wish)
            if len(rates) < 2 or chosen not in rates or not max(rates.values()):
                continue
            share = rates[chosen] / max(rates.values())
            where = f"{result['rows'][0]['model']}, {result['rows'][0]['link'] or 'one machine'}, {wish}"
            lines.append(f"{where}: {chosen} {share:.2f} of the best: {'right' if share >= ENOUGH else 'wrong'}")
    return lines
