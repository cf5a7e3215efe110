"""The memory that `phalanx plan` predicts, beside what a started server takes: idle, at its peak, and under a limit.

What to expect. Weights are known to the byte from headers; a process's own memory is a constant of the planner. So the
prediction should be within 5 % or 100 MB of what is measured: `Pss`, in which a page that several processes share
counts in parts, of the server and its ranks. The peak is that of the start and one answer, 20 looks a second; what a
start reads ahead lies in the system's cache, and is in no process.

With --limits each server also starts in a memory cgroup (v1, root): once with a limit with which the plan says that it
fits, the least one in steps of 16 MiB, in which it must answer; and once with 96 MiB less, which the plan refuses, and
the start has to refuse as well. The last line is one JSON object.

    python benchmarks/planning_memory.py demo --families llama gemma3_text qwen3_moe mamba2 --limits
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from servers import MODEL_NAME

from phalanx.cluster.planner import PlanRequest, make_plans
from phalanx.config import RUN_PHALANX
from phalanx.memory import MIB
from phalanx.planning.recommendation import GroupPlan

ROOT = Path(__file__).resolve().parent.parent
GROUPS = Path("/sys/fs/cgroup/memory")
LOOK_S = 0.05
IDLE_S = 3.0  # after 2 s the ranks give buffers back
NEAR = 0.05
NEAR_BYTES = 100_000_000
STEP = 16 << 20
LESS = 96 << 20  # the error that a prediction may have
FLAGS = ("--port", "0", "--prefix-cache-gb", "0", "--kv-cache-gb", "0.02", "--served-model-name", MODEL_NAME)


class Watch(threading.Thread):
    """The peak of what a process and its children hold."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0, False

    def run(self) -> None:
        while not self.ended:
            self.peak = max(self.peak, held(self.pid))
            time.sleep(LOOK_S)


def held(pid: int) -> int:
    """`Pss` of a process and its children."""
    total = 0
    with suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total


@contextmanager
def server(model: str, plan: GroupPlan, guard: str, group: Path | None = None) -> Iterator[tuple[str, Watch]]:
    """The plan's server, in a memory cgroup if one is given; its URL is "" if it does not start."""
    shape = ("--tp", str(plan.candidate.width), "--pp", str(plan.candidate.stages), "--memory-guard-gb", guard)
    command = [sys.executable, *RUN_PHALANX, "serve", model, *FLAGS, *shape]
    enter = None if group is None else (lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=enter, start_new_session=True
    )
    watch = Watch(process.pid)
    watch.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield (line.split()[3] if line.startswith("phalanx is ready") else ""), watch
    finally:
        watch.ended = True
        process.terminate()
        process.communicate()
        watch.join()


def answers(url: str) -> bool:
    """Whether a server answers a request."""
    body = {"model": MODEL_NAME, "prompt": list(range(3, 60)), "max_tokens": 16, "ignore_eos": True}
    answer = httpx.post(f"{url}/completions", json=body, timeout=120, trust_env=False)
    return answer.status_code == httpx.codes.OK


def compare(model: str, plan: GroupPlan) -> dict[str, Any]:
    """Predicted and measured bytes of one plan."""
    idle = sum(rank.process + rank.weights for rank in plan.fit.ranks)
    with server(model, plan, "0.5") as (url, watch):
        assert url and answers(url)
        time.sleep(IDLE_S)
        found = held(watch.pid)
    row = {"model": Path(model).name, "plan": plan.candidate.name, "predicted": idle, "idle": found}
    row |= {"peak": watch.peak, "near": near(idle, found), "near_peak": near(idle, watch.peak)}
    return row


def near(predicted: int, measured: int) -> bool:
    """Within 5 % or 100 MB."""
    return abs(predicted - measured) <= max(NEAR * measured, NEAR_BYTES)


def fits(model: str, plan: GroupPlan, group: Path) -> bool:
    """Whether the planner says in a cgroup that a plan fits."""
    words = ("plan", model, "--memory-only", "--json", "--memory-guard-gb", "0", "--kv-cache-gb", "0.02")
    done = subprocess.run(
        [sys.executable, *RUN_PHALANX, *words], capture_output=True, text=True, check=False,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    shape = (plan.candidate.stages, plan.candidate.width)
    for one in json.loads(done.stdout or '{"plans": []}')["plans"]:
        candidate = one["fit"]["candidate"]
        if (candidate["stages"], candidate["width"]) == shape:
            return not one["fit"]["problem"]
    return False


def under_limit(model: str, plan: GroupPlan) -> dict[str, Any]:
    """The least limit with which the plan fits, and whether the server answers there, and below."""
    group = GROUPS / f"planning-{os.getpid()}"
    group.mkdir()

    def limit(size: int) -> None:
        (group / "memory.limit_in_bytes").write_text(str(size))

    try:
        need = sum(rank.process + rank.weights for rank in plan.fit.ranks)
        size = need // STEP * STEP
        limit(size)
        while not fits(model, plan, group):
            size += STEP
            limit(size)
        with server(model, plan, "0", group) as (url, _):
            fitting = bool(url) and answers(url)
        limit(size - LESS)
        said = fits(model, plan, group)
        with server(model, plan, "0", group) as (url, _):
            below = bool(url)
        return {"limit": size, "answers": fitting, "said below": said, "starts below": below}
    finally:
        time.sleep(0.5)
        group.rmdir()


def models(given: argparse.Namespace, folder: Path) -> list[str]:
    """The named models, and tiny ones of families."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.models import make_model  # type: ignore[import-not-found]  # noqa: PLC0415 - of the tests

    return [*given.models, *(str(make_model(family, folder / family)) for family in given.families)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names or directories")
    parser.add_argument("--families", nargs="*", default=[], help="of tests/support/families.py")
    parser.add_argument("--limits", action="store_true")
    given = parser.parse_args()
    rows, limits = [], []
    with tempfile.TemporaryDirectory() as folder:
        for model in models(given, Path(folder)):
            request = PlanRequest(model=model, ranks_here=2, measure=False, guard_gb=0.5, kv_gb=0.02)
            for plan in asyncio.run(make_plans(request)).plans:
                if plan.fit.problem:
                    continue
                rows.append(row := compare(model, plan))
                sizes = [f"{name} {row[name] / MIB:.0f}" for name in ("predicted", "idle", "peak")]
                print(f"{row['model']}, {row['plan']}: {', '.join(sizes)} MiB; near {row['near']}", flush=True)
                if given.limits:
                    limits.append(found := under_limit(model, plan))
                    print(f"  {found}", flush=True)
    result = {"rows": rows, "near": sum(row["near"] for row in rows), "of": len(rows), "limits": limits}
    print(json.dumps(result | {"near_peak": sum(row["near_peak"] for row in rows)}))


if __name__ == "__main__":
    main()
