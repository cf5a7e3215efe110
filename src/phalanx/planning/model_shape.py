"""What a model needs of each rank, read from its headers: bytes by part and by number of ranks that share a layer.

Plain data. Does not know how it is read (`engine/model_shape_reader.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.dist.topology import Parts

Bytes = Annotated[int, Meta(ge=0)]


class WeightPart(Struct, frozen=True, kw_only=True):
    """Weights that a rank keeps or leaves out together: a layer, an embedding, a head."""

    kept: Bytes = 0
    """Bytes in memory while serving."""
    stored: Bytes = 0
    """Bytes as the files have them."""
    largest: Bytes = 0
    """Bytes of its largest tensor, stored and kept."""


class RankParts(Struct, frozen=True, kw_only=True):
    """One rank's part of the whole model, with so many ranks to a layer."""

    degree: int
    before: WeightPart
    """What only the first stage reads: an embedding."""
    layers: tuple[WeightPart, ...]
    behind: WeightPart
    """What only the last stage reads: norm and head."""
    both: WeightPart
    """What `before` and `behind` have, tied embeddings once."""
    everywhere: WeightPart
    kv_token_bytes: tuple[Bytes, ...]
    """By layer: bytes of keys and values of a token."""
    kv_row_bytes: tuple[Bytes, ...]
    """By layer: bytes of recurrent state of a row."""
    sums: int
    """Sums over ranks in one forward of the whole model."""

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
    """Elements of a token's hidden states; 0 where `uncut` says why there are no stages."""
    activation_bytes: int = 4
    """Bytes of one element of the hidden states."""
    page_tokens: Annotated[int, Meta(ge=1)] = 256
    """Tokens by which the memory of a row grows."""
    max_len: int | None = None
    """Tokens of the model's own context."""
    parts: Parts | None = None
    """By which the start shares layers out among stages; None where `uncut` says why there are none."""
    uncut: str = ""
    """Why the model cannot be cut into stages; "" if it can."""
    unsplit: str = ""
    """Why its layers cannot be shared; "" if they can."""
    on_gpu: bool = False
    key: str = ""
    """Equal for models that take the same time: their shapes, quantisation and dtype."""

    @property
    def whole(self) -> RankParts:
        """The part of a rank that shares no layer."""
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
        """The part of a rank, with so many to a layer."""
        return next(one for one in self.shares if one.degree == degree)


def total(parts: Iterable[WeightPart]) -> WeightPart:
    """Several parts as one."""
    found = list(parts)
    return WeightPart(
        kept=sum(part.kept for part in found),
        stored=sum(part.stored for part in found),
        largest=max((part.largest for part in found), default=0),
    )
