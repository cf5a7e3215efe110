"""Settings of `--speculative-config`: one class per method. `spec/` drafts."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Control = Literal["cost", "floor", "always"]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Speculation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="method"):
    """What all methods of `--speculative-config` have in common; the names are vLLM's where it has the field."""

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=16)] = 15
    """Largest number of drafted tokens per sequence and step; the control chooses up to it."""
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """Nothing is drafted while more than so many rows decode; None leaves it to the control."""
    control: Control = "cost"
    """`cost` weighs accepted tokens against the measured time of a step; `floor` switches off below a rate of
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
    """Random tokens: shows what speculation costs where it does not help."""


SpeculativeConfig = NgramSpeculation | SuffixSpeculation | DraftModelSpeculation | RandomSpeculation
