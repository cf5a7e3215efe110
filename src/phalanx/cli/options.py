"""Flags that several commands share, named as `vllm serve` names them where it has them.

Each is a type for a command's signature; typer checks ranges and says flag, value and what is allowed. Does not know
what the settings do: `config.py` documents them.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import typer

from phalanx.config import MOST_RANKS, BackendChoice, Collective, CpuPrecision, Dtype, EngineConfig
from phalanx.dist.fault_injection import parse
from phalanx.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]


def whole(low: int, high: int | None = None) -> dict[str, Any]:
    """For `typer.Option`: a whole number in a range. Errors say what was given and what is allowed."""
    allowed = f"a whole number, {_range(low, high)}"

    def parse(given: str | int) -> int:
        try:
            value = int(given)
        except ValueError:
            raise typer.BadParameter(f"{given!r} is not {allowed}.") from None
        if value < low or (high is not None and value > high):
            raise typer.BadParameter(f"{value} is not {allowed}.")
        return value

    return {"parser": parse, "metavar": "N"}


def number(low: float, high: float | None = None) -> dict[str, Any]:
    """As `whole`, for a finite number."""
    allowed = f"a number, {_range(low, high)}"

    def parse(given: str | float) -> float:
        try:
            value = float(given)
        except ValueError:
            raise typer.BadParameter(f"{given!r} is not {allowed}.") from None
        if not (math.isfinite(value) and value >= low and (high is None or value <= high)):
            raise typer.BadParameter(f"{given} is not {allowed}.")
        return value

    return {"parser": parse, "metavar": "X"}


def _range(low: float, high: float | None) -> str:
    return f"{low:g} or more" if high is None else f"{low:g} to {high:g}"


_ENGINE = "Engine"
_MEMORY = "Memory"
_GROUP = "Ranks"

Model = Annotated[str, typer.Argument(help="A directory, a hub id, or `demo`, the bundled model.")]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.", rich_help_panel=_ENGINE)
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python files that come with the model.", rich_help_panel=_ENGINE),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        help="`auto`: the checkpoint's, but float32 on CPUs. bfloat16 there: a GPU's rounding; quicker prompts and "
        "streams where the processor has AVX-512 BF16.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        **whole(1),
        help="Prompt + output in tokens, at most.",
        show_default="the model's",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int,
    typer.Option("--max-num-seqs", **whole(1, 4096), help="Rows computed together, at most.", rich_help_panel=_ENGINE),
]
MaxNumBatchedTokens = Annotated[
    int,
    typer.Option("--max-num-batched-tokens", **whole(1), help="Tokens of one step, at most.", rich_help_panel=_ENGINE),
]
TargetStepMs = Annotated[
    float,
    typer.Option(
        "--target-step-ms",
        **number(1.0),
        help="Prefill chunks are cut so that a step takes about this long.",
        rich_help_panel=_ENGINE,
    ),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Append every plan as a line of JSON.", rich_help_panel=_ENGINE),
]
KvCacheGb = Annotated[
    float | None,
    typer.Option(
        "--kv-cache-gb",
        **number(0.0),
        help="GiB for running rows.",
        show_default="60 % of what is free",
        rich_help_panel=_MEMORY,
    ),
]
PrefixCacheGb = Annotated[
    float | None,
    typer.Option(
        "--prefix-cache-gb",
        **number(0.0),
        help="GiB for prefixes of finished rows; 0 is off.",
        show_default="20 % of what is free",
        rich_help_panel=_MEMORY,
    ),
]
NoPrefixCaching = Annotated[
    bool,
    typer.Option(
        "--no-prefix-caching",
        "--no-enable-prefix-caching",
        help="The same as --prefix-cache-gb 0.",
        rich_help_panel=_MEMORY,
    ),
]
MemoryGuardGb = Annotated[
    float | None,
    typer.Option(
        "--memory-guard-gb",
        **number(0.0),
        help="GiB that stay free.",
        show_default="10 %, at least 5",
        rich_help_panel=_MEMORY,
    ),
]
CpuKernels = Annotated[
    bool,
    typer.Option(
        "--cpu-kernels/--no-cpu-kernels",
        help="Native kernels where MLX computes on the CPU and phalanx-cpu is installed.",
        rich_help_panel=_ENGINE,
    ),
]
CpuPrecisionOption = Annotated[
    CpuPrecision,
    typer.Option(
        "--cpu-precision",
        help="Of native products with quantised weights: `fast` rounds activations to 8 bits; `auto` is exact.",
        rich_help_panel=_ENGINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        **whole(1, 256),
        help="Of the native kernels, per rank.",
        show_default="the processors, shared among the ranks",
        rich_help_panel=_ENGINE,
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        "--tp",
        **whole(1, MOST_RANKS),
        help="Processes that share every layer.",
        rich_help_panel=_GROUP,
    ),
]
BackendOption = Annotated[
    BackendChoice,
    typer.Option("--backend", help="What carries their sums; `auto` says what it took.", rich_help_panel=_GROUP),
]
CollectiveOption = Annotated[
    Collective, typer.Option("--collective", help="All-reduce algorithm of mpi.", rich_help_panel=_GROUP)
]
CheckCollectives = Annotated[
    bool,
    typer.Option("--check-collectives/--no-check-collectives", help="Checksums on every sum.", rich_help_panel=_GROUP),
]
JoinSeconds = Annotated[
    float,
    typer.Option("--join-seconds", **number(1.0), help="To find each other at start.", rich_help_panel=_GROUP),
]
SilenceSeconds = Annotated[
    float,
    typer.Option("--silence-seconds", **number(0.5), help="After which a rank is lost.", rich_help_panel=_GROUP),
]
WedgeSeconds = Annotated[
    float,
    typer.Option(
        "--wedge-seconds",
        **number(0.5),
        help="A step that takes longer, and 5 times longer than predicted, ends the group.",
        rich_help_panel=_GROUP,
    ),
]
Inject = Annotated[
    str | None,
    typer.Option(
        "--inject",
        metavar="KIND:rank=R,step=S",
        help="Produce a fault once, to see what happens: "
        "garbage, stale, zero, permute, kill, suspend, wedge, tamper, crash.",
        rich_help_panel=_GROUP,
    ),
]
SpeculativeConfigOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="""Guess tokens and verify them together; the output does not change. '{"method": "ngram"}', or suffix, """
        "draft_model, random.",
        rich_help_panel=_ENGINE,
    ),
]
LogLevelOption = Annotated[LogLevel, typer.Option("--log-level", help="Verbosity of the log on stderr.")]

DEFAULTS = EngineConfig(model="demo")
"""Where the defaults of the flags above come from."""


def prefix_budget(prefix_cache_gb: float | None, no_prefix_caching: bool) -> float | None:
    """The one setting behind two flags.

    Raises:
        ConfigError: they contradict each other.
    """
    if no_prefix_caching and prefix_cache_gb:
        raise ConfigError(
            f"--no-prefix-caching contradicts --prefix-cache-gb {prefix_cache_gb:g}.", remedy="Give one of them."
        )
    return 0.0 if no_prefix_caching else prefix_cache_gb


def check_engine(config: EngineConfig) -> EngineConfig:
    """What a range per flag cannot say.

    Raises:
        ConfigError: names the flags.
    """
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is less than "
            f"--max-num-seqs {config.max_num_seqs}: every running row needs a token per step.",
            remedy=f"Use --max-num-batched-tokens {config.max_num_seqs} or more.",
        )
    if config.inject is not None and (rank := parse(config.inject).rank) >= config.tensor_parallel_size:
        raise ConfigError(f"--inject {config.inject!r}: there is no rank {rank}.")
    if config.tensor_parallel_size == 1:
        unused = {"--backend": config.backend != "auto", "--collective": config.collective != "auto"}
        for flag in (flag for flag, given in unused.items() if given):
            raise ConfigError(f"{flag} says how several ranks talk, but there is one.", remedy="Add --tp N.")
    return config
