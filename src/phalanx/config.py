"""All settings, parsed once and frozen, and every environment variable phalanx reads.

A field declares its type, its range (`Meta`), its default and its flag (`Flag`); the docstring below it documents it.
`cli/flags.py` makes the flags of every command from these declarations, and `phalanx.LLM` checks its keywords against
them. Nothing else reads `os.environ`. Does not know where a value came from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.errors import ConfigError

DEFAULT_MODEL = "demo"
DEFAULT_PORT = 8000
MIB = 1 << 20
GIB = 1 << 30

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Backend = Literal["ring", "mpi", "jaccl", "jaccl-ring", "nccl"]
BackendChoice = Literal["auto", Backend]
Collective = Literal["auto", "star", "ring"]
MOST_RANKS = 16
"""Largest group; the attention heads of no model divide among more ranks."""
SECRET_VARIABLE = "PHALANX_GROUP_SECRET"
CLUSTER_VARIABLE = "PHALANX_CLUSTER_SECRET"
RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
AGENT_PORT = 32330
"""TCP port on which every host but the first waits for the first one to start ranks."""
COORDINATOR_PORT = 32323
"""TCP port of JACCL. JACCL takes every connection for a rank, so phalanx never probes whether the port is free (F3)."""
KERNELS_VARIABLE = "PHALANX_CPU_KERNELS"
API_KEY_VARIABLE = "PHALANX_API_KEY"
GUARD_VARIABLES = ("PHALANX_MEMORY_GUARD_GB", "MLX_MEMORY_GUARD_GB")

CpuPrecision = Literal["auto", "exact", "fast"]
LogLevel = Literal["debug", "info", "warning", "error"]
Panel = Literal["Engine", "Memory", "Ranks", "HTTP", "Limits", "Sampling"]

Count = Annotated[int, Meta(ge=1)]
Size = Annotated[float, Meta(ge=0.0)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Flag(Struct, frozen=True):
    """How `--help` shows a setting. The flag is the field's name with hyphens; range and default are the field's."""

    help: str = ""
    """What the setting does, in one line."""
    panel: Panel | None = None
    """Heading under which the flag stands; None is `Options`."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""
    metavar: str | None = None
    """Placeholder of the value, where its type does not say it."""
    default: str | None = None
    """What happens without the flag, in words, where the default alone does not say it."""
    variable: str | None = None
    """Environment variable that counts where the flag is not given."""
    is_file: bool = False
    """The value is the name of a file, which has to exist."""
    positional: bool = False
    """The value is an argument of the command; there is no flag."""


Control = Literal["cost", "floor", "always"]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Speculation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method"):
    """What all methods of `--speculative-config` have in common; the names are vLLM's where it has the field."""

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=16)] = 15
    """Largest number of drafted tokens per sequence and step; the control chooses up to it."""
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """Nothing is drafted while more than so many rows decode; None leaves it to the control."""
    control: Control = "cost"
    """`cost` weighs what is accepted against what a step takes, as measured; `floor` switches off below a rate of
    acceptance; `always` verifies every draft."""
    window: Annotated[int, Meta(ge=1, le=100_000)] = 50
    """Verified drafts behind the rolling figures, and behind the rate that `floor` judges."""
    compare_steps: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """For measuring: runs of so many steps with drafts take turns with as many without, and how fast both are is
    counted (`spec/comparison.py`); None: no such turns."""
    floor: Share | None = None
    """Of control `floor`: the rate of acceptance below which it switches off; None is 0.40."""
    probe_share: Annotated[float, Meta(ge=0.0, le=0.1)] | None = None
    """Of control `cost`: the share of time that tries without a gain may cost; None is 0.005."""


class NgramSpeculation(Speculation, frozen=True, kw_only=True, tag="ngram"):
    """Prompt lookup: what followed the same last tokens before."""

    prompt_lookup_max: Annotated[int, Meta(ge=1, le=16)] = 4
    """Longest run of last tokens that is looked up."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=16)] = 2
    """Shortest one."""
    prompt_lookup_requests: Annotated[int, Meta(ge=0, le=1024)] = 16
    """Earlier requests that are looked up as well; 0 is the sequence's own tokens only."""


class SuffixSpeculation(Speculation, frozen=True, kw_only=True, tag="suffix"):
    """What followed most often, in this request and recent ones."""

    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    """Longest context that is compared, in tokens."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=1024)] = 64
    """Earlier requests that are remembered; 0 is the sequence's own tokens only."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0.0, le=16.0)] = 2.0
    """A draft is at most so many times as long as the context that matched (`spec/suffix.py` says what counts)."""
    suffix_decoding_min_token_prob: Share = 0.1
    """A draft ends where the estimated probability that all of it is right falls below this."""


class DraftModelSpeculation(Speculation, frozen=True, kw_only=True, tag="draft_model"):
    """A smaller model with the same tokenizer."""

    model: Annotated[str, Meta(min_length=1)]
    """A local directory, a hub id, or `demo`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; None is the default branch."""


class RandomSpeculation(Speculation, frozen=True, kw_only=True, tag="random"):
    """Noise, for drills: shows what speculation costs where it does not help."""


SpeculativeConfig = NgramSpeculation | SuffixSpeculation | DraftModelSpeculation | RandomSpeculation


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of a rank process. They travel as JSON on the command line of `phalanx rank`."""

    model: Annotated[str, Flag("A directory, a hub id, or `demo`, the bundled model.", positional=True)]
    """A local directory, a hub id, or `demo` (the bundled model)."""

    max_model_len: Annotated[
        Count | None, Flag("Prompt + output in tokens, at most.", "Engine", default="the model's")
    ] = None
    """Largest prompt + output in tokens; None is the model's own context."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), Flag("Rows computed together, at most.", "Engine")] = 16
    """Largest number of rows computed together."""
    max_num_batched_tokens: Annotated[Count, Flag("Tokens of one step, at most.", "Engine")] = 512
    """Largest number of tokens a step feeds to the model, prefill chunks and decoding rows together."""
    target_step_ms: Annotated[
        float, Meta(ge=1.0), Flag("Prefill chunks are cut so that a step takes about this long.", "Engine")
    ] = 250.0
    """Prefill chunks are cut so that a step takes about this long, whatever the machine's speed."""
    dtype: Annotated[
        Dtype,
        Flag(
            "`auto`: the checkpoint's, but float32 on CPUs. bfloat16 there: a GPU's rounding; quicker prompts and "
            "streams where the processor has AVX-512 BF16.",
            "Engine",
        ),
    ] = "auto"
    """Floating dtype of weights, scales and activations; `auto` is the checkpoint's, except float32 on the CPU, where
    matrices and scales that the native kernels read stay as they are stored."""
    revision: Annotated[str | None, Flag("Branch, tag or commit of a hub id.", "Engine")] = None
    """Branch, tag or commit of a hub id; None is the default branch."""
    trust_remote_code: Annotated[bool, Flag("Run Python files that come with the model.", "Engine")] = False
    """Run Python files that the model's repository ships (tokenizer or `model_file`)."""
    trace: Annotated[str | None, Flag("Append every plan as a line of JSON.", "Engine", metavar="FILE")] = None
    """File to which every plan is appended as a line of JSON; None is off."""
    speculative_config: Annotated[
        SpeculativeConfig | None,
        Flag(
            """Guess tokens and verify them together; the output does not change. '{"method": "ngram"}', or suffix, """
            "draft_model, random.",
            "Engine",
        ),
    ] = None
    """How tokens are drafted; None is not at all. The output does not depend on it."""
    cpu_kernels: Annotated[
        bool, Flag("Native kernels where MLX computes on the CPU and phalanx-cpu is installed.", "Engine")
    ] = True
    """Compute with the native kernels of phalanx-cpu, where they are installed and MLX runs on the CPU."""
    cpu_precision: Annotated[
        CpuPrecision,
        Flag(
            "Of native products with quantised weights: `fast` rounds activations to 8 bits; `auto` is exact.", "Engine"
        ),
    ] = "auto"
    """Of products with quantised weights: exact sums in float32, fast rounds activations to 8 bits; `auto` is exact."""
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Flag("Of the native kernels, per rank.", "Engine", default="the processors, shared among the ranks"),
    ] = None
    """Threads of the native kernels per rank; None divides the processors among the ranks of this machine."""

    kv_cache_gb: Annotated[Size | None, Flag("GiB for running rows.", "Memory", default="60 % of what is free")] = None
    """GiB for the KV buffers of running rows; None is 60 % of what the memory guard leaves after loading."""
    prefix_cache_gb: Annotated[
        Size | None,
        Flag("GiB for prefixes of finished rows; 0 is off.", "Memory", default="20 % of what is free"),
    ] = None
    """GiB for kept prefixes of finished rows; None is 20 % of what the guard leaves, 0 turns the cache off."""
    memory_guard_gb: Annotated[
        Size | None,
        Flag("GiB that stay free.", "Memory", default="10 %, at least 5", variable=GUARD_VARIABLES[0]),
    ] = None
    """GiB kept free for the rest of the machine; None is max(10 % of physical memory, 5 GB) (B2)."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=MOST_RANKS), Flag("Processes that share every layer.", "Ranks", aliases=("-tp", "--tp"))
    ] = 1
    """Ranks that share every layer; each is a process with its part of the weights and of the KV cache."""
    backend: Annotated[BackendChoice, Flag("What carries their sums; `auto` says what it took.", "Ranks")] = "auto"
    """Transport of the collectives; `auto` takes the best that is installed and logs why (F1)."""
    collective: Annotated[Collective, Flag("All-reduce algorithm of mpi.", "Ranks")] = "auto"
    """All-reduce algorithm where the backend offers a choice (mpi): star gathers on one rank, ring passes round."""
    check_collectives: Annotated[bool, Flag("Checksums on every sum.", "Ranks")] = True
    """Every reduction carries a checksum and a tag; ranks check them before they commit a token of the step (A6)."""
    join_seconds: Annotated[float, Meta(ge=1.0), Flag("To find each other at start.", "Ranks")] = 60.0
    """Seconds that the ranks of a group have to find each other at start."""
    silence_seconds: Annotated[float, Meta(ge=0.5), Flag("After which a rank is lost.", "Ranks")] = 2.0
    """Seconds without a heartbeat after which a rank counts as lost."""
    wedge_seconds: Annotated[
        float,
        Meta(ge=0.5),
        Flag("A step that takes longer, and 5 times longer than predicted, ends the group.", "Ranks"),
    ] = 10.0
    """Seconds that any step may take; a step that takes longer, and 5 times longer than predicted, ends the group."""
    inject: Annotated[
        str | None,
        Flag(
            "Produce a fault once, to see what happens: "
            "garbage, stale, zero, permute, kill, suspend, wedge, tamper, crash.",
            "Ranks",
            metavar="KIND:rank=R,step=S",
        ),
    ] = None
    """A fault to produce, for drills and tests: `KIND:rank=R,step=S[,layer=L]`; see `dist/fault_injection.py`."""


class GroupConfig(Struct, frozen=True, kw_only=True):
    """What makes rank processes one group; without it, a rank is a group of its own.

    Travels as JSON on the command line of `phalanx rank`. The group's secret does not: it is in the environment.
    """

    size: int
    """Number of ranks."""
    backend: Backend
    """Transport of the collectives. Where it does not work, the start fails; phalanx tries no other."""
    nonce: int
    """Random number of this start of this group; it tells ranks of another job, or of an earlier start, apart."""
    control: str
    """`host:port` on which rank 0 accepts the other ranks' control connections."""
    addresses: tuple[str, ...] = ()
    """`ip:port` of each rank in a ring; empty for backends that find their peers themselves."""
    ranks_here: int = 1
    """Number of ranks on this rank's machine, which share its memory."""


class HostConfig(Struct, frozen=True, kw_only=True):
    """One machine of a cluster, as the first machine reaches it."""

    name: str
    """Its name for ssh and in messages."""
    address: str
    """Address of its agent; of the first host: for control connections. Stable, wired or Wi-Fi (F3)."""
    ips: tuple[str, ...]
    """Addresses for a ring's collectives, by which the previous rank reaches this one."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA devices of this host towards each host of the cluster, None for itself; empty without RDMA (F2)."""


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """The machines of one group, rank by rank. `phalanx up` writes it to a file for `phalanx serve --cluster`."""

    hosts: tuple[HostConfig, ...]
    """Rank i runs on host i; the server runs beside rank 0."""
    agent_port: Annotated[Port, Flag("Port of the agents.")] = AGENT_PORT
    """TCP port of the agents."""
    envs: tuple[str, ...] = ()
    """`NAME=value`, for every rank."""


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server."""

    host: Annotated[str, Flag("Address to bind.", "HTTP")] = "127.0.0.1"
    """Address to bind. Other machines reach the server only if the user gives another address than the default."""
    port: Annotated[int, Meta(ge=0, le=65535), Flag("Port; 0 picks a free one.", "HTTP")] = DEFAULT_PORT
    """TCP port; 0 picks a free one, which is printed."""
    api_key: Annotated[
        tuple[str, ...], Flag("A key clients must send; may be repeated.", "HTTP", variable=API_KEY_VARIABLE)
    ] = ()
    """Accepted Bearer keys; empty means no key is needed."""
    served_model_name: Annotated[
        tuple[str, ...], Flag("Name clients use; may be repeated.", "HTTP", default="MODEL as given")
    ] = ()
    """Names by which clients may ask for the model; empty is the model argument itself."""
    chat_template: Annotated[str | None, Flag("Jinja file instead of the model's.", "HTTP", is_file=True)] = None
    """File with a Jinja chat template that replaces the model's."""
    default_chat_template_kwargs: Annotated[dict[str, object], Flag("Variables of the chat template.", "HTTP")] = {}
    """Defaults for the template's variables; a request's own win."""
    keepalive_seconds: Annotated[float, Meta(ge=0.1), Flag("A comment after this much silence.", "HTTP")] = 5.0
    """After so many seconds without an event, a stream gets a comment line, which keeps the connection open."""

    queue: Annotated[int, Meta(ge=0), Flag("Requests that may wait; one more is a 429.", "Limits")] = 32
    """Requests (choices) that may wait beyond `max_num_seqs`; one more is answered 429."""
    max_n: Annotated[int, Meta(ge=1, le=1024), Flag("Largest `n`.", "Limits")] = 16
    """Largest `n` (and number of prompts times n in one completions call)."""
    max_body_mb: Annotated[float, Meta(ge=0.001, le=1024), Flag("Largest request, MiB.", "Limits")] = 8.0
    """Largest HTTP request body, MiB."""
    drain_seconds: Annotated[Size, Flag("For running requests at the end.", "Limits")] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    stall_seconds: Annotated[float, Meta(ge=1.0), Flag("Silence that ends the engine.", "Limits")] = 60.0
    """Seconds without a step or an answer after which the engine process is killed and restarted."""

    engine: EngineConfig
    """The engine this server starts and restarts."""
    log_level: Annotated[LogLevel, Flag("Verbosity of the log on stderr.")] = "info"
    """Verbosity of the log on stderr."""

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)


def environment() -> Mapping[str, str]:
    """The process environment, for handing to child processes."""
    return os.environ


def default_environment(variables: Mapping[str, str]) -> None:
    """Set variables that libraries in this process read, where the user has not."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def group_secret() -> bytes | None:
    """Shared secret by which ranks prove that they belong to one group; the launcher sets the variable."""
    text = os.environ.get(SECRET_VARIABLE)
    return text.encode() if text else None


def cluster_secret() -> str | None:
    """Shared secret by which the first host's server proves itself to agents; `phalanx up` gives it to all hosts."""
    return os.environ.get(CLUSTER_VARIABLE) or None


def cpu_kernels_wanted() -> bool:
    """Whether this process may load the native kernels; the launcher forbids it with `PHALANX_CPU_KERNELS=0`."""
    return os.environ.get(KERNELS_VARIABLE, "1") != "0"


def memory_guard_override_gb() -> float | None:
    """`PHALANX_MEMORY_GUARD_GB`, else `MLX_MEMORY_GUARD_GB` (B2); None when neither is set.

    Raises:
        ConfigError: the variable is not a non-negative number.
    """
    for name in GUARD_VARIABLES:
        text = os.environ.get(name)
        if text is None or text == "":
            continue
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not value >= 0.0 or value == float("inf"):
            raise ConfigError(f"{name}={text!r} is not a number of GB.", remedy=f"Set {name}=5, or unset it.")
        return value
    return None


def api_key_from_environment() -> str | None:
    """`PHALANX_API_KEY` (as `vllm serve` reads VLLM_API_KEY); None when unset or empty."""
    return os.environ.get(API_KEY_VARIABLE) or None


def runtime_dir() -> Path:
    """Directory of this user's sockets and PID files: `$XDG_RUNTIME_DIR`, else the temporary directory."""
    return Path(os.environ.get(RUNTIME_VARIABLE) or os.environ.get("TMPDIR") or "/tmp")


def hub_cache() -> Path:
    """Directory of huggingface_hub's models: `$HF_HUB_CACHE`, else `$HF_HOME/hub`, else below the home directory."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
