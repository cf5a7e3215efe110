"""A model's memory per rank: bytes by part and by number of ranks that share a layer.

Plain data, read from the weights' headers by `engine/model_shape_reader.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.dist.topology import Parts

Bytes = Annotated[int, Meta(ge=0)]


class WeightPart(Struct, frozen=True, kw_only=True):
    """Weights that a rank has all or none of: a layer, an embedding, a head."""

    kept: Bytes = 0
    """Bytes in memory while serving."""
    stored: Bytes = 0
    """Bytes in the files."""
    largest: Bytes = 0
    """Bytes of its largest tensor, stored and kept."""


class RankParts(Struct, frozen=True, kw_only=True):
    """One rank's part of the whole model if `degree` ranks share each layer."""

    degree: int
    before: WeightPart
    """Of the first stage only: the embedding."""
    layers: tuple[WeightPart, ...]
    behind: WeightPart
    """Of the last stage only: norm and head."""
    both: WeightPart
    """`before` and `behind` together, with tied embeddings counted once."""
    everywhere: WeightPart
    kv_token_bytes: tuple[Bytes, ...]
    """By layer: bytes of keys and values of a token."""
    kv_row_bytes: tuple[Bytes, ...]
    """By layer: bytes of recurrent state of a row."""
    all_reduces: int
    """All-reduces in one forward of the whole model."""

    def stage(self, first: int, stop: int) -> list[WeightPart]:
        """The parts of a rank that has the layers `[first, stop)`."""
        is_first, is_last = first == 0, stop == len(self.layers)
        ends = [self.both] if is_first and is_last else [self.before] * is_first + [self.behind] * is_last
        return [self.everywhere, *ends, *self.layers[first:stop]]


class ModelShape(Struct, frozen=True, kw_only=True):
    """A model as plans see it."""

    name: str
    shares: Annotated[tuple[RankParts, ...], Meta(min_length=1)]
    """By number of ranks that share every layer, from 1."""
    width: int = 0
    """Elements of a token's hidden states; 0 if `uncut`."""
    activation_bytes: int = 4
    """Bytes of one element of the hidden states."""
    page_tokens: Annotated[int, Meta(ge=1)] = 256
    """Tokens by which the memory of a row grows."""
    tokenizer_bytes: Bytes = 0
    """Of tokenizer.json, which the server has in memory in another form."""
    max_len: int | None = None
    """The model's own context, in tokens."""
    parts: Parts | None = None
    """Costs by which a start splits layers into stages; None if `uncut` says why it cannot."""
    uncut: str = ""
    """Why the model cannot be cut into stages; "" if it can."""
    unsplit: str = ""
    """Why its layers cannot be shared; "" if they can."""
    on_gpu: bool = False
    key: str = ""
    """Equal for models with the same timings: shapes, quantisation and dtype."""

    @property
    def whole(self) -> RankParts:
        """The part of a single rank."""
        return self.shares[0]

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.whole.layers)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Numbers of ranks that can share every layer."""
        return tuple(one.degree for one in self.shares)

    def share(self, degree: int) -> RankParts:
        """A rank's part if `degree` ranks share each layer."""
        return next(one for one in self.shares if one.degree == degree)


def total(parts: Iterable[WeightPart]) -> WeightPart:
    """The sum of several parts."""
    found = list(parts)
    return WeightPart(
        kept=sum(part.kept for part in found),
        stored=sum(part.stored for part in found),
        largest=max((part.largest for part in found), default=0),
    )
