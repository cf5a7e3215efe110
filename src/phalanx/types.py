"""The vocabulary shared by the server and the engine: requests in, events out, model facts.

Plain msgspec data, no behaviour beyond trivial properties. Does not know HTTP, MLX or processes. The messages at the
end travel over the local socket between the server process and the leader (`supervision/wire.py` frames them).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why a sequence ended. `timeout` is the client's own deadline; the HTTP layer maps it to "length" with a detail."""


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is chosen: a pure function of the logits and of (seed, choice, position).

    Order of application: logit_bias, penalties, temperature, top_k, top_p, min_p (vLLM's order). `temperature == 0`
    is greedy. Penalties: repetition over prompt and output (mlx-lm, HF), presence and frequency over output (OpenAI).
    """

    seed: int = 0  # 0 <= seed < 2**64
    choice: int = 0  # index of this choice among the request's `n`
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None = off, 0 = the chosen token only, m = the m most likely as well


class StopRule(Struct, frozen=True, kw_only=True):
    """When a sequence is finished, as far as token ids and counts can tell (text is the server's matter)."""

    max_tokens: int  # >= 1, already limited to the context
    min_tokens: int = 0  # stop ids are masked (not sampled) before this many tokens
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence ids and the client's stop_token_ids


class SequenceRequest(Struct, frozen=True, kw_only=True):
    """One sequence to generate: a request with n choices is n of these with the same `group`."""

    id: str  # unique among unfinished sequences, e.g. "chatcmpl-1f/0"
    group: str  # the HTTP request's id; choices of one group share their prompt's prefill
    prompt: list[int]  # >= 1 token ids
    sampling: Sampling
    stop: StopRule
    committed: list[int] = []  # tokens already generated before an engine restart (resume)
    prompt_logprobs: int | None = None  # as Sampling.logprobs, for the prompt's own tokens (`echo`)
    timeout_s: float | None = None  # seconds from arrival at the engine
    cache_salt: str = ""  # prefix-cache entries are shared only within one salt
    most_drafts: int | None = None  # verified in a step; None: as many as the engine finds worth it


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the raw model distribution (before penalties and temperature)."""

    token: int
    logprob: float
    rank: int  # 0 = the most likely token
    top: list[tuple[int, float]]  # most likely first


class FabricFigure(Struct, frozen=True, kw_only=True):
    """How long an all-reduce of so many bytes takes."""

    bytes: int
    median_us: float
    gb_per_s: float


class SelfTest(Struct, frozen=True, kw_only=True):
    """What a group found out about itself before it served (F4)."""

    total: float = 0.0  # all_sum of rank + 1
    expected: float = 0.0
    fabric: list[FabricFigure] = []
    control_ms: float = 0.0  # round trip of a small message through all ranks, the slowest of some
    tokens: int = 0  # that all ranks computed equally, from a prompt longer than one prefill chunk
    reductions: int = 0  # sums over ranks in one forward, checked
    unchecked: int = 0  # collectives that mlx-lm's own layers do
    seconds: float = 0.0


class ModelInfo(Struct, frozen=True, kw_only=True):
    """What the engine reports about the loaded model when it is ready."""

    model_type: str
    max_model_len: int  # tokens, prompt + output
    vocab_size: int
    dtype: str
    quantization: str  # "4-bit affine g64", "none", ...
    rolls_back: bool  # False for recurrent state: speculation is off (A3)
    caches: str  # one line: which cache classes were replaced by what
    weights_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    prefix_budget_bytes: int
    load_s: float
    kernels: str = "MLX"  # what computes: MLX's own kernels, or which native ones
    speculation: str = "off"  # who drafts how much, or why nobody does
    ranks: int = 1  # of the tensor-parallel group
    backend: str = "none"  # what carries its collectives
    self_test: SelfTest | None = None  # None for a single rank


class RankStats(Struct, frozen=True, kw_only=True):
    """One rank's own figures."""

    rank: int
    host: str
    pid: int
    steps: int = 0  # steps executed
    matches: int = 0  # of those, with rows equal to the plan's digest; one that differs ends the group (A1, A5)
    reductions: int = 0  # checked sums over ranks
    active_bytes: int = 0  # MLX active memory
    peak_bytes: int = 0
    rss_bytes: int = 0


class SpecStats(Struct, frozen=True, kw_only=True):
    """What speculation came to (A8); cumulative since the engine started unless named otherwise.

    A *draft* is the tokens verified for one row in one step.
    """

    method: str  # ngram, suffix, draft_model, random
    steps: int = 0  # steps that decoded, with a draft or without
    drafts: int = 0
    drafted: int = 0  # tokens in them
    accepted: int = 0  # of those
    drafted_at: list[int] = []  # by position in the draft: drafts that were so long
    accepted_at: list[int] = []  # of those, accepted up to here
    recent_drafted: int = 0  # of the last `window` drafts
    recent_accepted: int = 0
    window: int = 50
    compared_drafted: tuple[int, float] | None = (
        None  # tokens and seconds of steps that might have drafts; None: nothing
    )
    compared_plain: tuple[int, float] | None = (
        None  # is compared. The same of steps that might not, in turns with those
    )


class EngineStats(Struct, frozen=True, kw_only=True):
    """Counters and gauges of the leader; cumulative since the engine started unless named otherwise."""

    step: int = 0
    running: int = 0  # rows that hold a slot (gauge)
    waiting: int = 0  # gauge
    kv_bytes: int = 0  # allocated for rows (gauge)
    kv_usage: float = 0.0  # kv_bytes / budget, 0..1 (gauge)
    prefix_bytes: int = 0  # gauge
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    preemptions: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0  # forwards that sampled
    step_s: float = 0.0  # total seconds inside steps
    model_s: float = 0.0  # of those, inside the model call, sampling and evaluation
    control_s: float = 0.0  # of those, sending plans to other ranks
    active_bytes: int = 0  # MLX active memory (gauge)
    peak_bytes: int = 0
    cache_bytes: int = 0  # MLX buffer cache (gauge)
    rss_bytes: int = 0  # of the engine process (gauge)
    ranks: list[RankStats] = []  # of every rank, rank 0 first
    spec: SpecStats | None = None  # None: nothing is drafted


# Messages server -> leader ---------------------------------------------------------------------------------------


class Submit(Struct, frozen=True, tag=True):
    """Generate this sequence."""

    request: SequenceRequest


class Cancel(Struct, frozen=True, tag=True):
    """Forget this sequence, whatever it is doing. Unknown ids are ignored (it may just have finished)."""

    id: str


class Finish(Struct, frozen=True, tag=True):
    """The server found a stop string: the sequence ends with its first `n_tokens` output tokens."""

    id: str
    n_tokens: int


class Ping(Struct, frozen=True, tag=True):
    """Answered by the engine loop itself (not by a reader thread) with `Pong`."""

    nonce: int


class ResetPrefixCache(Struct, frozen=True, tag=True):
    """Drop every prefix entry and free MLX's buffer cache."""


class Shutdown(Struct, frozen=True, tag=True):
    """End the engine process now (the server has drained)."""


ToEngine = Submit | Cancel | Finish | Ping | ResetPrefixCache | Shutdown


# Messages leader -> server ---------------------------------------------------------------------------------------


class Loading(Struct, frozen=True, tag=True):
    """Progress while the model loads: `done` of `total` bytes."""

    phase: str
    done: int
    total: int


class Ready(Struct, frozen=True, tag=True):
    """The engine serves from now on."""

    info: ModelInfo
    pid: int


class Tokens(Struct, frozen=True, tag=True):
    """Newly committed tokens of one sequence. `start` is the number of output tokens committed before these."""

    id: str
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token where asked for


class PromptScored(Struct, frozen=True, tag=True):
    """Prompt log-probabilities (`echo`): entry i belongs to prompt token i; the first is None."""

    id: str
    logprobs: list[TokenLogprobs | None]


class Timing(Struct, frozen=True, kw_only=True):
    """Seconds on the leader's monotonic clock (M1)."""

    queue_s: float = 0.0  # arrival -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token
    decode_s: float = 0.0  # first token -> last token


class Finished(Struct, frozen=True, tag=True):
    """The last message about a sequence. `n_tokens` output tokens count, stop token included."""

    id: str
    reason: FinishReason
    n_tokens: int
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    timing: Timing = Timing()
    detail: str = ""
    stop_id: int | None = None  # the stop token that ended it, if one did
    drafted_tokens: int = 0  # guessed by speculation and verified
    accepted_tokens: int = 0  # of those, right, and part of the output


class Pong(Struct, frozen=True, tag=True):
    nonce: int
    stats: EngineStats


class Failed(Struct, frozen=True, tag=True):
    """Start-up or the engine itself failed; the process ends after this, with `code`, an `ExitCode`. `kind` is the
    error's class name."""

    kind: str
    message: str
    code: int


class Batch(Struct, frozen=True, tag=True):
    """All sequence events of one step, in commit order."""

    step: int
    events: list[Tokens | PromptScored | Finished]


FromEngine = Loading | Ready | Batch | Pong | Failed
