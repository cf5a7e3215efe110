"""The checked all-reduce: algorithm-based fault tolerance against corrupt buffers.

No collective backend detects a garbage, stale, zero or permuted buffer. So every vector to be summed carries a checksum
under random signs of its site in the model (Huang and Abraham, 1984), and a tag that changes with every forward. After
the all-reduce, each rank compares the received checksum with the checksum of the sum, up to the rounding error of
vectors of that magnitude. At the end of a forward the ranks all-reduce their verdicts on all sites, so that every rank
knows of a fault on any rank before a token is committed, and can name the layer.

One engine thread owns the group: MLX computes wrong sums if two threads use it.
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
"""Largest residual from rounding to float16's smallest step (2**-24), however small the vector."""
OUTSTANDING = 4  # last reductions kept until they are evaluated: parallel branches of the last layer


class FaultInjector(Protocol):
    """Corrupts received buffers, to inject faults (`corrupt_buffer.py`)."""

    def at_step(self, step: int) -> None:
        """Set the number of the step that begins."""

    def __call__(self, wire: mx.array, forward: int, site: int) -> mx.array:
        """The buffer to use instead of `wire`."""


class Site(NamedTuple):
    """A place in the model where ranks sum vectors of `width` elements."""

    name: str
    width: int


class Reduction(NamedTuple):
    """One all-reduce of a forward."""

    site: int
    rows: int
    dtype: mx.Dtype


class _Result(NamedTuple):
    """One all-reduce, and the figures by which it is judged."""

    summed: Reduction
    figures: mx.array  # [rows, 3]: residual of the checksum, magnitude, tag


@dataclass(slots=True)
class Tally:
    """Counts since the start."""

    forwards: int = 0
    reductions: int = 0


class Reducer:
    """All-reduces over the ranks of one group, and judges them after each forward.

    Args:
        group: None for a single rank, which returns its own vectors.
        checked: whether vectors carry checksums. Without them, the reducer only keeps the evaluation order.
        fault: corrupts received buffers, for tests.
        checksum: the implementation of checksums; by default of MLX's own operations.
    """

    def __init__(
        self,
        group: mx.distributed.Group | None,
        *,
        checked: bool = True,
        fault: FaultInjector | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        self.group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.checked = checked and self.size > 1
        self.names = [f"rank {rank}" for rank in range(self.size)]
        """The ranks' names in messages."""
        self.foreign = False
        """Whether the model also has collectives of mlx-lm, which this reducer does not check."""
        self.sites: list[Site] = []
        self.tally = Tally()
        self._fault = fault
        self._checksum = checksum or ComposedChecksum()
        self._signs: dict[int, mx.array] = {}
        self._limits: dict[tuple[tuple[int, mx.Dtype], ...], mx.array] = {}
        self._tags: dict[int, list[mx.array]] = {}
        self._traced_tags: list[mx.array] | None = None
        self._results: list[_Result] = []
        self._summed: list[Reduction] = []  # reductions of the finished forward, until it is judged
        self._outstanding: list[mx.array] = []

    def begin(self, step: int) -> None:
        """Set the number of the step that begins."""
        if self._fault is not None:
            self._fault.at_step(step)

    def site(self, name: str, width: int) -> int:
        """Register a place where vectors of `width` elements are summed. Returns its number.

        All ranks must register the same sites in the same order.
        """
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
            self._hold(total)
            return total
        width = y.shape[-1]
        signs = self._signs_of(site)
        encoded = self._checksum.encode(y.reshape(-1, width), signs, self.tags()[0])
        wire = mx.distributed.all_sum(encoded, group=self.group)
        if self._fault is not None:
            wire = self._fault(wire, self.tally.forwards, site)
        total, figures = self._checksum.decode(wire, signs)
        self._results.append(_Result(Reduction(site, figures.shape[0], y.dtype), figures))
        self._hold(wire)
        return total.reshape(y.shape)

    def finish(self) -> list[mx.array]:
        """End a forward whose graph is built. Returns the arrays to evaluate next, in this order, on every rank.

        Collectives pair up in evaluation order, so all ranks must evaluate the same arrays. With checksums, the last
        array is the verdict.
        """
        outstanding, self._outstanding = self._outstanding, []
        self._summed = [result.summed for result in self._results]
        if not self._results:
            self.tally.forwards += self.size > 1
            return outstanding
        verdict, self._results = self._verdict(), []
        return [*outstanding, verdict]

    def discard(self) -> None:
        """Drop all-reduces that no rank has evaluated."""
        self._results, self._outstanding, self._summed = [], [], []

    # -- replayed forwards (the graph cache) -------------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether all forwards have the same operations for their all-reduces, so that graphs can be captured."""
        return self._fault is None and not self.foreign

    def tags(self) -> list[mx.array]:
        """The forward's tag and its sum over ranks: the only inputs of checksums that differ between forwards."""
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
        """Build forwards with these tags, without counting or keeping their reductions."""
        reductions, forwards = self.tally.reductions, self.tally.forwards
        self._traced_tags = tags if self.checked else None
        try:
            yield
        finally:
            self._traced_tags = None
            self.tally.reductions, self.tally.forwards = reductions, forwards
            self.discard()

    def summed(self) -> list[Reduction]:
        """The reductions of the forward that `finish` ended last."""
        return list(self._summed)

    def replayed(self, summed: list[Reduction]) -> None:
        """Record that a captured forward with these reductions was replayed, instead of `all_sum` and `finish`."""
        self._summed = list(summed)
        self.tally.reductions += len(summed)
        self.tally.forwards += self.size > 1 and not summed

    # -- the verdict -------------------------------------------------------------------------------------------------

    def judge(self, step: int, evaluated: list[mx.array]) -> None:
        """Read the verdict in the evaluated arrays of `finish`.

        Raises:
            CollectiveFault: a rank received a wrong sum; names the step, the sites and the ranks.
        """
        summed, self._summed = self._summed, []
        if not summed:
            return
        *flags, tags = [float(v) for v in cast("list[float]", evaluated[-1].tolist())]
        expected = float(self._tag() * self.size)
        self.tally.forwards += 1
        if tags == expected and not any(flags):
            return
        judged = [summed[i] for group in _group_by_rows(summed) for i in group]
        corrupt = [(self.sites[entry.site].name, bits) for entry, bits in zip(judged, flags, strict=True) if bits]
        sites = [name for name, _ in corrupt]
        where = ", ".join(sites[:4]) + (f" and {len(sites) - 4} more" if len(sites) > 4 else "")
        raise CollectiveFault(
            f"step {step}: the all-reduce is wrong at {where or 'the verdict itself'} "
            f"(checksum or tag) on {self._failing_ranks([bits for _, bits in corrupt])}.",
            remedy="A wrong buffer was delivered. If it happens again, check cables and run `phalanx selftest`.",
        )

    def _failing_ranks(self, flags: list[float]) -> str:
        """Names of the ranks whose bit is set in verdicts; of this rank if the verdicts are corrupt."""
        if not flags or not all(bits.is_integer() and 0 < bits < 1 << self.size for bits in flags):
            return f"{self.names[self.rank]}, at least"
        union = 0
        for bits in flags:
            union |= int(bits)
        return ", ".join(name for rank, name in enumerate(self.names) if union >> rank & 1)

    # -- the checksum ----------------------------------------------------------------------------------------------

    def _tag(self) -> int:
        """The forward's tag, unlike the last one's. Its sum over ranks is at most 256: exact in every dtype."""
        period = max(1, 256 // self.size)
        return 1 + self.tally.forwards % period

    def _signs_of(self, site: int) -> mx.array:
        """The random signs of a site, [width], scaled so that a checksum is as large as an element: no overflow."""
        if site not in self._signs:
            width = self.sites[site].width
            bits = mx.random.bernoulli(0.5, (width,), key=mx.random.key(site))
            self._signs[site] = mx.where(bits, 1.0, -1.0) / width**0.5
            mx.eval(self._signs[site])
        return self._signs[site]

    def _verdict(self) -> mx.array:
        """[reductions + 1]: for each all-reduce a bit per rank on which it failed; last, the sum of the verdict's tags.

        All-reduces of equally many rows are judged together: separate operations would cost once per layer.
        """
        flags: list[mx.array] = []
        tag, sum_of_tags = self.tags()
        for group in _group_by_rows(self._summed):
            results = [self._results[i] for i in group]
            figures = mx.concatenate([result.figures for result in results])
            limits = self._limits_of([result.summed for result in results])
            flags.append(self._checksum.judge(figures, limits, sum_of_tags, 1 << self.rank))
        return mx.distributed.all_sum(mx.concatenate([*flags, tag.reshape(1)]), group=self.group)

    def _limits_of(self, summed: list[Reduction]) -> mx.array:
        """[k, 2]: a, b of the largest residual that rounding can leave, a * magnitude + b, for each all-reduce."""
        key = tuple((entry.site, entry.dtype) for entry in summed)
        if (limits := self._limits.get(key)) is None:
            widths = [(self.sites[site].width, dtype) for site, dtype in key]
            rows = [[width * tolerance(width, dtype), FLOOR.get(dtype, 0.0)] for width, dtype in widths]
            limits = self._limits[key] = mx.array(rows)
            mx.eval(limits)
        return limits

    def _hold(self, wire: mx.array) -> None:
        self._outstanding = [*self._outstanding[1 - OUTSTANDING :], wire]


def _group_by_rows(summed: list[Reduction]) -> list[list[int]]:
    """Indices of reductions, grouped by number of rows, in their order."""
    groups: dict[int, list[int]] = {}
    for i, entry in enumerate(summed):
        groups.setdefault(entry.rows, []).append(i)
    return list(groups.values())


def tolerance(width: int, dtype: mx.Dtype) -> float:
    """The largest residual that rounding can leave, relative to the sum of the ranks' magnitudes.

    In 16 bits the rounding of the elements dominates: 6 eps (measured). In 32 bits it is the rounding of a sum of
    `width` products, whose error grows with the square root of their number.
    """
    if dtype == mx.float32:
        return float(2.0**-23 * (8.0 * width**-0.5 + 4.0))
    return float(6.0 * (2.0**-8 if dtype == mx.bfloat16 else 2.0**-11) * width**-0.5)
