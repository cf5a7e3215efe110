"""Settings of ranks, groups and clusters, parsed once and frozen; the servers' are in
`server/settings/server_settings.py` and `gateway/settings/gateway_settings.py`.

A field declares its type, its range (`Meta`), its default and its flag (`Flag`). The docstring below it documents it,
and is the flag's help. `cli/setting_flags.py` makes the flags of every command from these declarations, and
`phalanx.LLM` checks its keywords against them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from msgspec import Meta, Struct

from phalanx.environment import GUARD_VARIABLES
from phalanx.errors import ConfigError
from phalanx.speculation_config import SpeculativeConfig

DEFAULT_MODEL = "demo"
DEFAULT_PORT = 8000
GATEWAY_PORT = 8080  # not the server's: both may run on one machine
MIB = 1 << 20
GIB = 1 << 30

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Backend = Literal["ring", "mpi", "jaccl", "jaccl-ring", "nccl"]
BackendChoice = Literal["auto", Backend]
Collective = Literal["auto", "star", "ring"]
ActivationDtype = Literal["model", "float32", "float16", "bfloat16"]
PREFIX_CACHE_DISK_GB = 10.0
"""The default of --prefix-cache-disk-gb."""
MAX_RANKS = 16
"""Largest group; the attention heads of no model divide among more ranks."""
NONCE_BITS = 48
"""Of the random number that tells starts apart; the group compares it as three numbers of 16 bits."""
RUN_PHALANX = ("-P", "-m", "phalanx")
"""Python's options that run phalanx. -P: the current directory may hold a file with the name of a module."""
CREDENTIALS_FILE = "credentials.json"
"""Name of the file with a host's key and the certificates of its cluster; it lies beside the cluster's file."""
AGENT_PORT = 32330
"""TCP port on which every host but the first waits for the first one to start ranks."""
COORDINATOR_PORT = 32323
"""TCP port of JACCL. JACCL takes every connection for a rank, so phalanx never probes whether the port is free."""

CpuPrecision = Literal["auto", "exact", "fast"]
LogLevel = Literal["debug", "info", "warning", "error"]
Panel = Literal["Engine", "Memory", "Ranks", "HTTP", "Limits", "Sampling", "Replicas", "Health checks", "Retries"]

Count = Annotated[int, Meta(ge=1)]
Width = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Size = Annotated[float, Meta(ge=0.0)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class Flag(Struct, frozen=True):
    """How `--help` shows a setting. Name (with hyphens), text, range and default of the flag are the field's."""

    panel: Panel | None = None
    """Heading under which the flag stands; None is `Options`."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the flag."""
    metavar: str | None = None
    """Placeholder of the value, where its type does not say it."""
    default: str | None = None
    """The default in words, where its value alone does not say what happens."""
    variable: str | None = None
    """Environment variable that counts where the flag is not given."""
    is_file: bool = False
    """The value is the name of a file, which has to exist."""
    is_key: bool = False
    """The value is a secret that a header carries; a second flag, with `-file` behind its name, names a file of it."""
    positional: bool = False
    """The value is an argument of the command; there is no flag."""


class EngineConfig(Struct, frozen=True, kw_only=True):
    """Settings of a rank process. They travel as JSON on the command line of `phalanx rank`."""

    model: Annotated[str, Flag(positional=True)]
    """A hub id, one with a GGUF file's quantisation (`owner/name:Q4_K_M`), a short name such as `qwen3:4b` or
    `smollm2`, a local directory, a GGUF file, which is imported once, or `demo`, the bundled model."""

    max_model_len: Annotated[Count | None, Flag("Engine", default="the model's")] = None
    """Prompt + output in tokens, at most."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), Flag("Engine")] = 16
    """Rows computed together, at most."""
    max_num_batched_tokens: Annotated[
        Count | None, Flag("Engine", default="512 on a CPU (128 with stages), 2,048 on a GPU; at least one a row")
    ] = None
    """Tokens of one step, at most: of prefill chunks and decoding rows together."""
    target_step_ms: Annotated[float, Meta(ge=1.0), Flag("Engine")] = 250.0
    """Prefill chunks are cut so that a step takes about so many milliseconds; on a CPU, less beside streams."""
    decode_share: Annotated[float, Meta(ge=0.0, le=0.95), Flag("Engine")] = 0.5
    """Part of the time that streams keep while prompts are read; at 0, every step computes a chunk of them."""
    dtype: Annotated[Dtype, Flag("Engine")] = "auto"
    """Type of weights, scales and activations. `auto`: float32 on CPUs; the checkpoint's on GPUs, where scales of 32
    bits (of GGUF files) are rounded to float16. bfloat16 on CPUs: a GPU's rounding; quicker prompts and streams where
    the processor has AVX-512 BF16."""
    revision: Annotated[str | None, Flag("Engine", default="the default branch")] = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: Annotated[bool, Flag("Engine")] = False
    """Run Python files that come with the model (tokenizer or `model_file`)."""
    trace: Annotated[str | None, Flag("Engine", metavar="FILE")] = None
    """Append every plan and what it cost to this file, as lines of JSON."""
    speculative_config: Annotated[SpeculativeConfig | None, Flag("Engine")] = None
    """Guess tokens and verify them together; the output does not change. '{"method": "ngram"}', or suffix, draft_model,
    random."""
    cpu_kernels: Annotated[bool, Flag("Engine")] = True
    """Native kernels where MLX computes on the CPU and phalanx-cpu is installed."""
    cpu_precision: Annotated[CpuPrecision, Flag("Engine")] = "auto"
    """Native products with quantised weights: `exact` sums in float32, `fast` rounds activations to 8 bits; `auto` is
    exact."""
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | None,
        Flag("Engine", default="the machine's processors, shared among its ranks"),
    ] = None
    """Threads of the native kernels, per rank."""

    kv_cache_gb: Annotated[Size | None, Flag("Memory", default="60 % of what --memory-guard-gb leaves")] = None
    """GiB for the KV buffers of running rows."""
    prefix_cache_gb: Annotated[Size | None, Flag("Memory", default="20 % of what --memory-guard-gb leaves")] = None
    """GiB for kept prefixes of finished rows; 0 is off."""
    prefix_cache_dir: Annotated[str | None, Flag("Memory", metavar="DIR")] = None
    """Keep prefixes on disk as well, so that they survive a restart: in this directory on each host, for this server
    alone. Prompts and answers lie there in clear, readable by this user only."""
    prefix_cache_disk_gb: Annotated[Size | None, Flag("Memory", default=f"{PREFIX_CACHE_DISK_GB:g}")] = None
    """GiB of disk that a rank uses for them."""
    verify_restores: Annotated[bool, Flag("Memory")] = False
    """Compute the last 256 tokens of every prefix from disk again: one that differs by more than rounding is deleted,
    counted and logged. Not with recurrent state."""
    memory_guard_gb: Annotated[
        Size | None,
        Flag("Memory", default="10 %, at least 5; 10 % of an NVIDIA GPU's memory", variable=GUARD_VARIABLES[0]),
    ] = None
    """GiB that stay free for the rest of the machine."""
    wired_limit: Annotated[bool, Flag("Memory")] = True
    """Macs: keep weights and caches in memory (wired), up to the GPU's whole part; without, macOS may page them out.
    `phalanx doctor` says what speaks for and against."""

    tensor_parallel_size: Annotated[
        Width | tuple[Width, ...], Flag("Ranks", metavar="N[,N...]", aliases=("-tp", "--tp"))
    ] = 1
    """Processes that share every layer, each with its part of weights and KV cache; with --pp also of each stage, the
    one with the embedding first (2,1). `serve` and `up` take `auto`: ranks and stages as `phalanx plan` recommends."""
    pipeline_parallel_size: Annotated[Width, Flag("Ranks", aliases=("-pp", "--pp"))] = 1
    """Stages, each with some consecutive layers and ranks of its own."""
    pp_split: Annotated[tuple[Count, ...] | None, Flag("Ranks", metavar="N,N...", default="by cost and memory")] = None
    """Layers of each stage, the one with the embedding first."""
    pp_activation_dtype: Annotated[ActivationDtype, Flag("Ranks")] = "model"
    """dtype of the hidden states sent between stages; `model` is exact, others send less and round."""
    backend: Annotated[BackendChoice, Flag("Ranks")] = "auto"
    """Collective backend of the all-reduces; `auto` takes the best one installed and logs why."""
    collective: Annotated[Collective, Flag("Ranks")] = "auto"
    """All-reduce algorithm of mpi: star gathers on one rank, ring passes round."""
    check_collectives: Annotated[bool, Flag("Ranks")] = True
    """A checksum and a tag on every all-reduce, verified before a token of the step is committed."""
    join_seconds: Annotated[float, Meta(ge=1.0), Flag("Ranks")] = 60.0
    """Seconds in which ranks must find each other at start."""
    heartbeat_timeout_seconds: Annotated[float, Meta(ge=0.5), Flag("Ranks")] = 2.0
    """Seconds without a heartbeat after which a rank is lost."""
    step_timeout_seconds: Annotated[float, Meta(ge=0.5), Flag("Ranks")] = 10.0
    """Seconds for a step; one that takes longer, and 5 times longer than predicted, ends the group."""
    inject: Annotated[str | None, Flag("Ranks", metavar="KIND:rank=R,step=S")] = None
    """Produce a fault once, for drills and tests (`,layer=L` may follow): garbage, stale, zero, permute, kill, suspend,
    wedge, tamper, crash; between stages cut, lose, repeat, corrupt."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Ranks of each stage, the one with the embedding first."""
        given = self.tensor_parallel_size
        return (given,) * self.pipeline_parallel_size if isinstance(given, int) else given

    @property
    def n_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(self.widths)


class GroupConfig(Struct, frozen=True, kw_only=True):
    """Settings that join rank processes to one group; without them, a rank is a group of its own.

    Travels as JSON on the command line of `phalanx rank`.
    """

    size: int
    """Number of ranks, of all stages."""
    widths: tuple[int, ...] = ()
    """Ranks of each stage, the one with the embedding first; empty: one stage. See `dist/topology.py`."""
    backend: Backend | None
    """Transport of the collectives of each stage; None where no stage has more than one rank. Where it does not work,
    the start fails; phalanx tries no other."""
    nonce: int
    """Random number of this start of this group; it tells ranks of another job, or of an earlier start, apart."""
    control: str
    """Where rank 0 accepts the other ranks' control connections: the path of a Unix socket, or `host:port`."""
    addresses: tuple[str, ...] = ()
    """`ip:port` of each rank in a ring; empty for backends that find their peers themselves."""
    link_addresses: tuple[str, ...] = ()
    """Address of each rank's host for connections between stages; empty on one machine, which uses Unix sockets."""
    ranks_here: int = 1
    """Number of ranks on this rank's machine, which share its processors and read the same files."""
    hosts: tuple[str, ...] = ()
    """Name of each rank's host in the cluster file; empty where there is none. Machines' own names do not tell them
    apart: two Macs are often both `Mac-Studio.local`."""

    def __post_init__(self) -> None:
        for name, given in (
            ("addresses", self.addresses),
            ("hosts", self.hosts),
            ("link_addresses", self.link_addresses),
        ):
            if given and len(given) != self.size:
                raise ValueError(f"{name} has {len(given)} entries for {self.size} ranks")
        if self.widths and sum(self.widths) != self.size:
            raise ValueError(f"widths {self.widths} do not add up to {self.size} ranks")


class HostConfig(Struct, frozen=True, kw_only=True):
    """One machine of a cluster, as the first machine reaches it."""

    name: str
    """Its name for ssh and in messages."""
    address: str
    """Address of its agent; of the first host: for control connections. Stable, wired or Wi-Fi."""
    ips: tuple[str, ...] = ()
    """Addresses for a ring's collectives, by which the previous rank reaches this one. In a file, none means
    `address`."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA devices of this host towards each host of the cluster, None for itself; empty without RDMA."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """Number of NVIDIA GPUs that MLX can use there. A rank computes on the first; with one on every host, `auto` is
    nccl."""


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """The machines of one group, rank by rank. `phalanx up` writes it to a file for `phalanx serve --cluster`."""

    hosts: tuple[HostConfig, ...]
    """Rank i runs on host i; the server runs beside rank 0."""
    agent_port: Annotated[Port, Flag()] = AGENT_PORT
    """TCP port of the agents."""
    envs: tuple[str, ...] = ()
    """`NAME=value`, for every rank."""


def check_disk_flags(given: Collection[str]) -> None:
    """Refuse flags for prefixes on disk without a directory for them.

    Args:
        given: names of flags.

    Raises:
        ConfigError: names the flag.
    """
    for flag in ("--prefix-cache-disk-gb", "--verify-restores"):
        if flag in given and "--prefix-cache-dir" not in given:
            raise ConfigError(
                f"{flag} is for prefixes on disk, and there is no --prefix-cache-dir.",
                remedy=f"Add --prefix-cache-dir DIR, or leave {flag} out.",
            )
