"""The data types that the server and the engine share: requests, events, facts about the model, statistics.

Plain msgspec data. The messages at the end travel over the local socket between the server process and the leader
(`supervision/wire.py` frames them).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why a sequence ended. `timeout` is the request's time limit; the server maps it to "length" with a detail."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is sampled: a pure function of the logits and of (seed, choice, position).

    Order of application: logit_bias, penalties, temperature, top_k, top_p, min_p (vLLM's order). `temperature == 0`
    is greedy. Penalties: repetition over prompt and output (mlx-lm, HF), presence and frequency over output (OpenAI).
    """

    seed: int = 0  # 0 <= seed < 2**64
    choice: int = 0  # index of this choice among the request's `n`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: off; 0: of the chosen token only; m: also of the m most likely tokens


class StopRule(Struct, frozen=True, kw_only=True):
    """When a sequence ends, by token ids and counts. (The server looks for stop strings.)"""

    max_tokens: int  # >= 1, already limited to the context
    min_tokens: int = 0  # stop ids are masked until the sequence has this many tokens, unless a grammar forces them
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids and the client's stop_token_ids


class SequenceRequest(Struct, frozen=True, kw_only=True):
    """One sequence to generate. A request with n choices is n sequences with the same `group`."""

    id: str  # unique among unfinished sequences, e.g. "chatcmpl-1f/0"
    group: str  # the HTTP request's id; choices of one group share their prompt's prefill
    prompt: list[int]  # token ids, at least one
    sampling: Sampling
    stop: StopRule
    committed: list[int] = []  # tokens that were generated before an engine restart
    prompt_logprobs: int | None = None  # as Sampling.logprobs, for the prompt's tokens (`echo`)
    timeout_s: float | None = None  # seconds from arrival at the engine
    owner: str = ""  # stands for an API key; prefixes are shared within an owner, rows go by turns between owners
    cache_salt: str = ""  # the client's own: prefixes are shared only with sequences of the same owner and salt
    max_drafts: int | None = None  # draft tokens per step, at most; None: the engine decides
    checkpoint: int = 0  # prompt tokens that are kept as a prefix of their own once they are computed; 0: none
    grammar: str = ""  # that the whole output must match (llguidance's JSON, see `text/grammar.py`); "": none

    @property
    def sharing(self) -> str:
        """What sequences that share prefixes and drafts have in common. (An owner has no slash.)"""
        return f"{self.owner}/{self.cache_salt}" if self.cache_salt else self.owner


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities (natural logarithm) under the raw model distribution, before penalties and temperature."""

    token: int
    logprob: float
    rank: int  # 0: the most likely token
    top: list[tuple[int, float]]  # most likely first


class AllReduceFigure(Struct, frozen=True, kw_only=True):
    """The speed of an all-reduce of `bytes` bytes."""

    bytes: int
    median_us: float
    gb_per_s: float


class SelfTest(Struct, frozen=True, kw_only=True):
    """The results of a group's self-test at start."""

    summed: int = 1  # ranks of rank 0's stage
    total: float = 0.0  # their all_sum of rank + 1
    expected: float = 0.0
    all_reduce: list[AllReduceFigure] = []
    control_ms: float = 0.0  # round trip of a small message to all ranks; the slowest of several
    tokens: int = 0  # tokens that all ranks computed equally, from a prompt longer than one prefill chunk
    step_ms: float = 0.0  # median of the steps that decoded these tokens, one at a time
    reductions: int = 0  # checked sums over ranks in one forward
    unchecked: int = 0  # collectives in mlx-lm's own layers, which are not checked
    seconds: float = 0.0


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The engine's report about the loaded model, sent when it is ready."""

    model_type: str
    max_model_len: int  # tokens, prompt + output
    vocab_size: int
    dtype: str
    quantization: str  # "4-bit affine g64", "none", ...
    supports_rollback: bool  # False for recurrent state: speculation is off
    caches: str  # one line on which cache classes were replaced by which
    weights_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    prefix_budget_bytes: int
    load_s: float
    kernels: str = "MLX"  # MLX's own kernels, or a description of the native ones
    speculation: str = "off"  # the drafter and its largest number of drafts, or why there is none
    ranks: int = 1  # of all stages
    stages: int = 1
    backend: str = "none"  # of its collectives
    self_test: SelfTest | None = None  # None for a single rank
    identity: str = ""  # a hash of what decides the logits: the model's files, software, kernels, device, ranks


class LinkStats(Struct, frozen=True, kw_only=True):
    """A rank's end of a connection to another rank, cumulative since the engine started. None: this end cannot tell."""

    peer: int  # the other rank
    carries: Literal["plans", "hidden states"]
    frames: int | None = None  # received
    bytes: int | None = None  # received in them
    waited_s: float | None = None  # inside steps, for frames to arrive
    round_trip_us: int | None = None  # the least of the last minutes
    segments: int | None = None  # of TCP, with data, that this end sent
    resent: int | None = None  # segments that this end sent again


class RankStats(Struct, frozen=True, kw_only=True):
    """Statistics of one rank, cumulative since the engine started unless named otherwise."""

    rank: int
    stage: int = 0  # of the pipeline; 0 has the embedding
    layers: tuple[int, int] | None = None  # first and last one of its stage; None where there is one stage
    host: str
    pid: int
    steps: int = 0  # steps executed
    matches: int = 0  # steps in which the rank's rows matched the plan's digest; a mismatch ends the group
    reductions: int = 0  # checked sums over ranks
    active_bytes: int = 0  # MLX active memory
    peak_bytes: int = 0
    rss_bytes: int = 0
    links: list[LinkStats] = []


class SpecStats(Struct, frozen=True, kw_only=True):
    """Statistics of speculation, cumulative since the engine started unless named otherwise.

    A *draft* is the sequence of draft tokens verified for one row in one step.
    """

    method: str  # ngram, suffix, draft_model, random
    steps: int = 0  # steps that decoded, with or without drafts
    drafts: int = 0
    drafted: int = 0  # tokens in all drafts
    accepted: int = 0  # accepted tokens of these
    drafted_at: list[int] = []  # by position: drafts that have a token there
    accepted_at: list[int] = []  # by position: drafts that were accepted up to there
    recent_drafted: int = 0  # tokens in the last `window` drafts
    recent_accepted: int = 0  # accepted tokens of these
    window: int = 50
    # When steps with and without speculation are compared: tokens and seconds of each kind; None: no comparison.
    compared_with: tuple[int, float] | None = None
    compared_without: tuple[int, float] | None = None


class SequenceWork(Struct, kw_only=True):
    """What an engine has done for a sequence since it was submitted to it. The engine counts in place."""

    chunks: int = 0  # of its prompt, each computed in one forward
    steps: int = 0  # forwards that drew tokens for it
    preemptions: int = 0  # times its row was taken away, so that what it had was computed again
    nearest_tokens: int = 0  # of the kept prefix or row that had most in common with it; 0: there was none
    left_at: int = 0  # tokens that the two have in common: the prompt differs from the nearest at this index


class SequenceProgress(Struct, frozen=True, kw_only=True):
    """Where a sequence with a row stands."""

    id: str
    computed: int  # tokens whose KV is computed
    known: int  # tokens of prompt and answer
    cached_tokens: int = 0
    disk_tokens: int = 0  # of those, loaded from disk for this sequence
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    work: SequenceWork = field(default_factory=SequenceWork)


class EngineStats(Struct, frozen=True, kw_only=True):
    """Counters and gauges of the leader. Counters are cumulative since the engine started."""

    step: int = 0
    running: int = 0  # sequences that hold a row (gauge)
    waiting: int = 0  # sequences that wait for a row (gauge)
    kv_bytes: int = 0  # allocated for rows, or promised to them where they take memory by the page (gauge)
    kv_usage: float = 0.0  # kv_bytes / budget, 0..1 (gauge)
    prefix_bytes: int = 0  # gauge
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in it
    disk_queries: int = 0  # prompt tokens looked up on disk
    disk_hits: int = 0  # prompt tokens loaded from there, which are among `prefix_hits`
    disk_failures: int = 0  # loads that failed on some rank, or took too long
    disk_mismatches: int = 0  # restored prefixes that were not what computing them gives (`--verify-restores`)
    disk_blocks: int = 0  # blocks of prefixes on every rank's disk (gauge)
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0  # forwards that sampled
    step_s: float = 0.0  # seconds inside steps
    model_s: float = 0.0  # part of step_s: the model call, sampling and evaluation
    control_s: float = 0.0  # part of step_s: sending plans to other ranks
    active_bytes: int = 0  # MLX active memory (gauge)
    peak_bytes: int = 0
    cache_bytes: int = 0  # MLX buffer cache (gauge)
    rss_bytes: int = 0  # of the engine process (gauge)
    ranks: list[RankStats] = []  # of every rank, rank 0 first
    spec: SpecStats | None = None  # None without speculation
    sequences: list[SequenceProgress] = []  # those with rows


# Messages server -> leader ---------------------------------------------------------------------------------------


class Submit(Struct, frozen=True, tag="Submit"):
    """Generate this sequence."""

    request: SequenceRequest


class Cancel(Struct, frozen=True, tag="Cancel"):
    """Cancel this sequence. Unknown ids are ignored, since the sequence may just have finished."""

    id: str


class Finish(Struct, frozen=True, tag="Finish"):
    """End this sequence after its first `n_tokens` output tokens, because the server found a stop string there."""

    id: str
    n_tokens: int


class Ping(Struct, frozen=True, tag="Ping"):
    """Ask for a `Pong`, which the engine's loop sends itself (not a thread that reads messages)."""

    nonce: int


class ResetPrefixCache(Struct, frozen=True, tag="ResetPrefixCache"):
    """Drop all cached prefixes and free MLX's buffer cache."""


class KeepOwners(Struct, frozen=True, tag="KeepOwners"):
    """Delete what is on disk of prefixes of all other API keys: theirs are not accepted any more."""

    owners: list[str]


class Shutdown(Struct, frozen=True, tag="Shutdown"):
    """End the engine process now. The server sends it after draining."""


ToEngine = Submit | Cancel | Finish | Ping | ResetPrefixCache | KeepOwners | Shutdown


# Messages leader -> server ---------------------------------------------------------------------------------------


class Loading(Struct, frozen=True, tag="Loading"):
    """The progress of loading: `done` of `total` bytes."""

    phase: str
    done: int
    total: int


class Ready(Struct, frozen=True, tag="Ready"):
    """The engine is ready."""

    info: ModelInfo
    pid: int


class Tokens(Struct, frozen=True, tag="Tokens"):
    """Newly committed tokens of one sequence. `start` is the number of output tokens committed before these."""

    id: str
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if the request wants them


class PromptScored(Struct, frozen=True, tag="PromptScored"):
    """Log-probabilities of the prompt (`echo`): entry i is that of prompt token i; the first is None."""

    id: str
    logprobs: list[TokenLogprobs | None]


class Timing(Struct, frozen=True, kw_only=True):
    """Seconds on the leader's monotonic clock."""

    queue_s: float = 0.0  # arrival -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token
    decode_s: float = 0.0  # first token -> last token


class Finished(Struct, frozen=True, tag="Finished"):
    """The last message about a sequence."""

    id: str
    reason: FinishReason
    n_tokens: int  # output tokens, including the stop token
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    timing: Timing = Timing()
    detail: str = ""
    stop_id: int | None = None  # the stop token that ended it; None if none did
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    disk_tokens: int = 0  # of `cached_tokens`, those loaded from disk for this sequence
    work: SequenceWork = field(default_factory=SequenceWork)


class Pong(Struct, frozen=True, tag="Pong"):
    """The answer to a `Ping` with the same nonce."""

    nonce: int
    stats: EngineStats


class Failed(Struct, frozen=True, tag="Failed"):
    """The engine failed, during its start or later. The process ends with `code` after this message."""

    kind: str  # name of the error's class
    message: str
    code: int  # an `ExitCode`


class Batch(Struct, frozen=True, tag="Batch"):
    """All sequence events of one step, in commit order."""

    step: int
    events: list[Tokens | PromptScored | Finished]


FromEngine = Loading | Ready | Batch | Pong | Failed
