"""The checked sum over ranks: algorithm-based fault tolerance for a fabric that may deliver anything (A6).

No backend notices a garbage, stale, zero or permuted buffer. So every summed vector travels with a checksum under
random signs that belong to its place in the model (Huang and Abraham, 1984), and with a tag that changes with every
forward. After the sum each rank compares what it got, within what rounding can do to vectors of that magnitude; the
verdicts of all ranks on all places are themselves summed once at the end of the forward, so that every rank knows of a
fault on any of them before a token is committed, and can name the layer.

One engine thread owns the group: a group used from two threads gives wrong sums. Does not know models, plans or
sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from phalanx.dist.checksum import Checksum, ComposedChecksum
from phalanx.errors import CollectiveFault

FLOOR = {mx.float16: 2.0**-21}
"""What rounding to float16's smallest steps (2**-24) can leave, however small the vector."""
OUTSTANDING = 4  # results of the last reductions that are kept until evaluated: parallel branches of the last layer


class Fault(Protocol):
    """Spoils what the fabric delivered; for drills (`inject.py`)."""

    def at_step(self, step: int) -> None:
        """A step begins."""

    def __call__(self, wire: mx.array, forward: int, site: int) -> mx.array:
        """What this rank gets to see instead of `wire`."""


class Site(NamedTuple):
    """A place in the model where ranks sum."""

    name: str
    width: int


class Summed(NamedTuple):
    """One reduction of a forward."""

    site: int
    rows: int
    dtype: mx.Dtype


class _Result(NamedTuple):
    """What one reduction left for the verdict."""

    summed: Summed
    figures: mx.array  # [rows, 3]: residual of the checksum, magnitude, tag


@dataclass(slots=True)
class Tally:
    """What was reduced and judged since the start."""

    forwards: int = 0
    reductions: int = 0


class Reducer:
    """Sums over the ranks of one group, and the verdict on the sums of a forward.

    Args:
        group: None for a single rank, whose sums are its own vectors.
        checked: whether sums carry checksums; without, only the evaluation order is kept.
        checksum: how they are computed; by MLX's own operations if not said.
    """

    def __init__(
        self,
        group: mx.distributed.Group | None,
        *,
        checked: bool = True,
        fault: Fault | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.checked = checked and self.size > 1
        self.names = [f"rank {rank}" for rank in range(self.size)]
        """How messages call the ranks."""
        self.foreign = False
        """Whether the model has collectives besides these (mlx-lm's own, for which there is no class of ours)."""
        self.sites: list[Site] = []
        self.tally = Tally()
        self._fault = fault
        self._checksum = checksum or ComposedChecksum()
        self._signs: dict[int, mx.array] = {}
        self._limits: dict[tuple[tuple[int, mx.Dtype], ...], mx.array] = {}
        self._tags: dict[int, list[mx.array]] = {}
        self._traced_tags: list[mx.array] | None = None
        self._results: list[_Result] = []
        self._summed: list[Summed] = []  # to be judged
        self._outstanding: list[mx.array] = []

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._fault is not None:
            self._fault.at_step(step)

    def site(self, name: str, width: int) -> int:
        """Register a place where vectors of `width` are summed. Every rank registers the same ones in one order."""
        self.sites.append(Site(name, width))
        return len(self.sites) - 1

    def all_sum(self, y: mx.array, site: int) -> mx.array:
        """The sum over ranks of y [..., width]; lazy."""
        if self.size == 1:
            return y
        self.tally.reductions += 1
        if not self.checked:
            total = mx.distributed.all_sum(y, group=self.group)
            if self._fault is not None:
                total = self._fault(total, self.tally.forwards, site)
            self._keep(total)
            return total
        width = y.shape[-1]
        signs = self._signs_of(site)
        loaded = self._checksum.load(y.reshape(-1, width), signs, self.tags()[0])
        wire = mx.distributed.all_sum(loaded, group=self.group)
        if self._fault is not None:
            wire = self._fault(wire, self.tally.forwards, site)
        total, figures = self._checksum.read(wire, signs)
        self._results.append(_Result(Summed(site, figures.shape[0], y.dtype), figures))
        self._keep(wire)
        return total.reshape(y.shape)

    def finish(self) -> list[mx.array]:
        """The forward's graph is built: what must be evaluated on every rank, in this order, before anything else.

        Collectives pair up in evaluation order, so all ranks evaluate the same arrays; the last one is the verdict
        where sums are checked.
        """
        outstanding, self._outstanding = self._outstanding, []
        self._summed = [result.summed for result in self._results]
        if not self._results:
            self.tally.forwards += self.size > 1
            return outstanding
        verdict, self._results = self._verdict(), []
        return [*outstanding, verdict]

    def discard(self) -> None:
        """Forget reductions that were built but never evaluated, on any rank."""
        self._results, self._outstanding, self._summed = [], [], []

    # -- forwards that are replayed ----------------------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether a forward's sums are the same operations each time."""
        return self._fault is None and not self.foreign

    def tags(self) -> list[mx.array]:
        """What differs between the sums of two forwards: the tag of what this rank sends, and that of the sum."""
        if self._traced_tags is not None:
            return self._traced_tags
        if not self.checked:
            return []
        tag = self._tag()
        if tag not in self._tags:
            self._tags[tag] = [mx.array(float(tag)), mx.array(float(tag * self.size))]
        return self._tags[tag]

    @contextmanager
    def tracing(self, tags: list[mx.array]) -> Iterator[None]:
        """Forwards are only built, with these for tags; nothing of them is left."""
        reductions, forwards = self.tally.reductions, self.tally.forwards
        self._traced_tags = tags if self.checked else None
        try:
            yield
        finally:
            self._traced_tags = None
            self.tally.reductions, self.tally.forwards = reductions, forwards
            self.discard()

    def summed(self) -> list[Summed]:
        """The reductions of the forward that `finish` has finished."""
        return list(self._summed)

    def replayed(self, summed: list[Summed]) -> None:
        """A forward with these reductions was replayed, up to what `finish` would have returned."""
        self._summed = list(summed)
        self.tally.reductions += len(summed)
        self.tally.forwards += self.size > 1 and not summed

    # -- the verdict -------------------------------------------------------------------------------------------------

    def judge(self, step: int, evaluated: list[mx.array]) -> None:
        """Read the verdict of what `finish` returned.

        Raises:
            CollectiveFault: some rank received a wrong sum; names the step and the layers.
        """
        summed, self._summed = self._summed, []
        if not summed:
            return
        *bad, tags = [float(v) for v in cast("list[float]", evaluated[-1].tolist())]
        expected = float(self._tag() * self.size)
        self.tally.forwards += 1
        if tags == expected and not any(bad):
            return
        judged = [summed[i] for alike in _alike(summed) for i in alike]
        corrupt = [(self.sites[place.site].name, flags) for place, flags in zip(judged, bad, strict=True) if flags]
        sites = [name for name, _ in corrupt]
        where = ", ".join(sites[:4]) + (f" and {len(sites) - 4} more" if len(sites) > 4 else "")
        raise CollectiveFault(
            f"step {step}: the sum over ranks is wrong at {where or 'the verdict itself'} "
            f"(checksum or tag) on {self._seen_by([flags for _, flags in corrupt])}.",
            remedy="The fabric delivered a wrong buffer. If it happens again, check cables and run `phalanx selftest`.",
        )

    def _seen_by(self, flags: list[float]) -> str:
        """The ranks whose bit is set in verdicts; this one, if the verdicts themselves are what is wrong."""
        if not flags or not all(bits.is_integer() and 0 < bits < 1 << self.size for bits in flags):
            return f"{self.names[self.rank]}, at least"
        union = 0
        for bits in flags:
            union |= int(bits)
        return ", ".join(name for rank, name in enumerate(self.names) if union >> rank & 1)

    # -- the checksum ----------------------------------------------------------------------------------------------

    def _tag(self) -> int:
        """Differs between consecutive forwards; its sum over ranks is exact in every dtype (at most 256)."""
        period = max(1, 256 // self.size)
        return 1 + self.tally.forwards % period

    def _signs_of(self, site: int) -> mx.array:
        """The signs of a place, [width], as large as make a checksum as large as an element: no overflow."""
        if site not in self._signs:
            width = self.sites[site].width
            bits = mx.random.bernoulli(0.5, (width,), key=mx.random.key(site))
            self._signs[site] = mx.where(bits, 1.0, -1.0) / width**0.5
            mx.eval(self._signs[site])
        return self._signs[site]

    def _verdict(self) -> mx.array:
        """[reductions + 1]: on which ranks each reduction failed, and the verdict's own summed tag. A rank is a bit.

        All reductions of a forward are judged in one piece, a model call at a time: what is done per reduction is
        paid for as often as the model has layers.
        """
        flags: list[mx.array] = []
        tag, sum_of_tags = self.tags()
        for alike in _alike(self._summed):
            results = [self._results[i] for i in alike]
            figures = mx.concatenate([result.figures for result in results])
            limits = self._limits_of([result.summed for result in results])
            flags.append(self._checksum.judge(figures, limits, sum_of_tags, 1 << self.rank))
        return mx.distributed.all_sum(mx.concatenate([*flags, tag.reshape(1)]), group=self.group)

    def _limits_of(self, summed: list[Summed]) -> mx.array:
        """What rounding may leave of each reduction, [k, 2]: relative to its magnitude, and at least."""
        key = tuple((place.site, place.dtype) for place in summed)
        if (limits := self._limits.get(key)) is None:
            widths = [(self.sites[site].width, dtype) for site, dtype in key]
            rows = [[width * tolerance(width, dtype), FLOOR.get(dtype, 0.0)] for width, dtype in widths]
            limits = self._limits[key] = mx.array(rows)
            mx.eval(limits)
        return limits

    def _keep(self, wire: mx.array) -> None:
        self._outstanding = [*self._outstanding[1 - OUTSTANDING :], wire]


def _alike(summed: list[Summed]) -> list[list[int]]:
    """Numbers of reductions of equal shape together, in their order."""
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(summed):
        groups.setdefault(place.rows, []).append(i)
    return list(groups.values())


def tolerance(width: int, dtype: mx.Dtype) -> float:
    """How large a residual rounding can leave, relative to the summed magnitudes of the ranks' vectors.

    In 16 bits the elements' own rounding dominates: 6 eps (measured). In 32 bits it is that of adding
    `width` products one after the other, whose error grows with the square root of their number.
    """
    if dtype == mx.float32:
        return float(2.0**-23 * (8.0 * width**-0.5 + 4.0))
    return float(6.0 * (2.0**-8 if dtype == mx.bfloat16 else 2.0**-11) * width**-0.5)
