"""What the planner predicts for machines that others have published figures of, beside these figures.

What to expect. `phalanx plan` measures the machines it plans for; these it cannot measure. So each machine is an entry
marked *published*: what its maker states of memory and arithmetic, half of which a program reaches (SHARE), and what is
known of its link. Everything else is the planner's own arithmetic (`planning/predictor.py`). It knows neither other
programs' overhead nor their kernels, so that within a factor of two is what can be expected; of the ratio between one
machine and several, more. No plan is ever chosen by these entries.

    python benchmarks/published.py            # prints the table of docs/planning.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.planning.candidates import Candidate, Fit
from phalanx.planning.group_overhead import from_links
from phalanx.planning.model_shape import ModelShape, RankParts, WeightPart
from phalanx.planning.predictor import Speed, predict
from phalanx.planning.timings import DecodePoint, RankTimings

SHARE = 0.5  # of the stated memory bandwidth and arithmetic
NONE = WeightPart()


@dataclass(frozen=True)
class Machine:
    """A published machine."""

    name: str
    read_gb_s: float
    tflops: float
    """16-bit."""


@dataclass(frozen=True)
class Link:
    """A link between two of them: round trip and bandwidth."""

    name: str
    round_trip_us: float
    gb_s: float


@dataclass(frozen=True)
class Model:
    """A model: parameters in all and of one token, in units of 10^9."""

    name: str
    size: float
    active: float
    layers: int
    width: int
    bits: float = 4.5


M3 = Machine("M3 Ultra", 819, 57)
M5 = Machine("M5 Max (beside an M3 Ultra)", 614, 70)
M4 = Machine("M4 Max", 546, 34)
STRIX = Machine("Strix Halo", 256, 59)
PI = Machine("Raspberry Pi 5", 17, 0.08)
SPARK = Machine("DGX Spark", 273, 100)
HOME = Machine("home computer", 60, 1)
RDMA = Link("RDMA", 30, 6.3)
CABLE = Link("TCP, Thunderbolt", 300, 2.5)
GIGABIT = Link("1 Gbit", 200, 0.118)
WIFI = Link("Wi-Fi", 5000, 0.03)
FAST = Link("200 Gbit", 30, 20)
KIMI = Model("Kimi K2.5", 1000, 32, 61, 7168)
QWEN_235 = Model("Qwen3-235B, 8 bits", 235, 22, 94, 4096, 8.5)
DEEPSEEK = Model("DeepSeek V3.1", 671, 37, 61, 7168)
QWEN_30 = Model("Qwen3-30B-A3B", 30, 3.3, 48, 2048)
QWEN_27 = Model("Qwen3.6-27B", 27, 27, 64, 5120)
QWEN_4 = Model("Qwen3-4B", 4, 4, 36, 2560)
V4 = Model("DeepSeek V4, taken as 37 G active", 671, 37, 61, 7168)
V4_SMALL = Model("DeepSeek V4, taken as 13 G active", 284, 13, 43, 4096)
LLAMA_8 = Model("Llama 3 8B", 8, 8, 32, 4096)
QWEN_32 = Model("32B", 32, 32, 64, 5120)
QWEN_30_DENSE = Model("30B", 30, 30, 60, 6656)
LLAMA_13 = Model("13B", 13, 13, 40, 5120)
LLAMA_70 = Model("Llama 3 70B", 70, 70, 80, 8192)


@dataclass(frozen=True)
class Run:
    """A published figure, and the plan it is of."""

    source: str
    model: Model
    machine: Machine
    ranks: int
    kind: str
    """"tp" or "pp"."""
    link: Link | None
    what: str
    """"x1", "x4": tokens/s of so many streams; "prefill": prompt tokens/s; "ms": a token; "x1/one": tokens/s over those
    of one machine; "first/two": the first token over that of two. Ratios where the machine is not described."""
    figure: float


RUNS = (
    Run("seeds", KIMI, M3, 2, "tp", RDMA, "x1", 16.0),
    Run("seeds", KIMI, M3, 2, "tp", RDMA, "prefill", 346),
    Run("seeds", QWEN_4, M4, 4, "tp", CABLE, "x1", 12.8),
    *(Run("exo", QWEN_235, M3, n, "tp", RDMA, "x1", rate) for n, rate in ((1, 19.5), (2, 26.2), (4, 31.9))),
    *(Run("exo", DEEPSEEK, M3, n, "tp", RDMA, "x1", rate) for n, rate in ((1, 21.1), (2, 27.8), (4, 32.5))),
    Run("oMLX", QWEN_30, M5, 2, "tp", RDMA, "x1", 56.8),
    Run("oMLX", QWEN_30, M5, 2, "tp", RDMA, "x4", 216),
    Run("oMLX", QWEN_30, M5, 2, "tp", RDMA, "prefill", 1534),
    Run("oMLX", QWEN_27, M4, 1, "tp", None, "x1", 16.1),
    Run("oMLX", QWEN_27, M4, 2, "tp", RDMA, "x1", 28.6),
    Run("ds4", V4, M3, 3, "pp", RDMA, "x1", 24),
    Run("ds4", V4, M3, 3, "pp", RDMA, "prefill", 711),
    Run("ds4", V4_SMALL, STRIX, 2, "pp", GIGABIT, "x1", 15.08),
    Run("ds4", V4_SMALL, STRIX, 2, "tp", GIGABIT, "x1", 13.86),
    Run("ds4", V4_SMALL, STRIX, 2, "pp", GIGABIT, "prefill", 242),
    Run("ds4", V4_SMALL, STRIX, 2, "tp", GIGABIT, "prefill", 166),
    *(Run("prima.cpp", model, HOME, 4, "pp", WIFI, "ms", ms) for model, ms in ((LLAMA_8, 15), (QWEN_32, 89))),
    Run("prima.cpp", LLAMA_70, HOME, 4, "pp", WIFI, "ms", 674),
    *(Run("distributed-llama", LLAMA_8, PI, n, "tp", GIGABIT, "x1", rate) for n, rate in ((1, 1.77), (2, 2.25))),
    Run("distributed-llama", LLAMA_8, PI, 4, "tp", GIGABIT, "x1", 3.01),
    Run("LLMKube", LLAMA_70, SPARK, 2, "pp", FAST, "x1/one", 12.42 / 12.83),
    Run("CPU cluster", QWEN_30_DENSE, HOME, 8, "tp", GIGABIT, "first/two", 37.8 / 16.0),
    Run("CPU cluster", LLAMA_13, HOME, 8, "tp", GIGABIT, "first/two", 20.9 / 7.7),
)


def speed(run: Run) -> Speed:
    """The planner's prediction."""
    model, width = run.model, run.ranks if run.kind == "tp" else 1
    layer = int(model.active * 1e9 * model.bits / 8 / model.layers)
    parts = RankParts(
        degree=width, before=NONE, layers=(WeightPart(kept=layer // width),) * model.layers, behind=NONE, both=NONE,
        everywhere=NONE, kv_token_bytes=(0,) * model.layers, kv_row_bytes=(0,) * model.layers,
        all_reduces=2 * model.layers * (width > 1),
    )  # fmt: skip
    shape = ModelShape(
        name=model.name, shares=(parts,), width=model.width, activation_bytes=2, on_gpu=run.machine != PI
    )
    stages = run.ranks // width
    candidate = Candidate(stages=stages, width=width, hosts=tuple(f"host {i}" for i in range(run.ranks)))
    split = tuple(model.layers * (i + 1) // stages - model.layers * i // stages for i in range(stages))
    fit = Fit(candidate=candidate, split=split, context=1 << 20)
    group = None
    if run.link is not None:
        group = from_links((width,) * stages, [run.link.round_trip_us / 1e6], [run.link.gb_s * 1e9])
    return predict(shape, fit, dict.fromkeys(candidate.hosts, _timings(run, layer, width)), group)


def _timings(run: Run, layer: int, width: int) -> RankTimings:
    """What the machine's maker states: reading a layer once for each token, or computing it."""
    reads = layer / width / (run.machine.read_gb_s * 1e9 * SHARE)
    token_s = 2 * run.model.active * 1e9 / run.model.layers / width / (run.machine.tflops * 1e12 * SHARE)
    more = min(4.0, run.model.size / run.model.active)  # experts that four rows read, of those that one reads
    points = tuple(DecodePoint(rows=rows, layer_s=reads * each, ends_s=0.0) for rows, each in ((1, 1.0), (4, more)))
    return RankTimings(
        degree=width, decode=points, decode_context_s=0.0, token_s=token_s, token_context_s=0.0, spread=0.0
    )


def figure(run: Run) -> float:
    """The published figure's counterpart."""
    found = speed(run)
    if run.what == "x1/one":
        return found.tokens_per_s[1] / speed(replace(run, ranks=1, link=None)).tokens_per_s[1]
    if run.what == "first/two":
        return found.ttft_s[512] / speed(replace(run, ranks=2)).ttft_s[512]
    if run.what == "prefill":
        return 4000 / found.ttft_s[4000]
    return 1000 / found.tokens_per_s[1] if run.what == "ms" else found.tokens_per_s[int(run.what[1:])]


def main() -> None:
    units = {"prefill": "prefill tokens/s", "ms": "ms a token", "x1": "tokens/s", "x4": "tokens/s, 4 streams",
        "x1/one": "tokens/s, of one's", "first/two": "first token, of two's",
    }  # fmt: skip
    print("| source | model, machines | plan | what | published | predicted | ratio |\n|---|---|---|---|---|---|---|")
    for run in RUNS:
        value = figure(run)
        plan = f"{run.kind} {run.ranks}, {run.link.name}" if run.link is not None and run.ranks > 1 else "one"
        row = (
            run.source, f"{run.model.name}, {run.machine.name}", plan, units[run.what],
            f"{run.figure:.4g}", f"{value:.0f}" if value >= 1000 else f"{value:.3g}", f"{run.figure / value:.2f}",
        )  # fmt: skip
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
