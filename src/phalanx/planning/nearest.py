"""Where no plan fits: the changes with which one does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from phalanx.memory import GB
from phalanx.planning.candidates import Candidate, Fit, PlanHost, candidates, fit_memory
from phalanx.planning.model_shape import ModelShape, total

MAX_HOSTS = 16  # of the largest group that is suggested


class _Flags(NamedTuple):
    """--max-model-len and --kv-cache-gb; None: what fits."""

    max_len: int | None
    kv_gb: float | None


def nearest(
    shape: ModelShape,
    tried: Sequence[Candidate],
    hosts: Sequence[PlanHost],
    *,
    max_len: int | None = None,
    kv_gb: float | None = None,
) -> list[str]:
    """Changes of flags or of the number of hosts, each enough alone, with the plan that then fits.

    Args:
        tried: plans that do not fit.
        max_len, kv_gb: what is asked for, as in `fit_memory`.
    """
    asked = _Flags(max_len, kv_gb)
    named = {host.name: host for host in hosts}
    one_flag = {_Flags(None, kv_gb), _Flags(max_len, None)} - {asked}
    ways = [_changed(shape, tried, named, asked, kept) for kept in sorted(one_flag, key=str)]
    if not any(ways) and len(one_flag) == 2:
        ways = [_changed(shape, tried, named, asked, _Flags(None, None))]
    return [way for way in [*ways, _grown(shape, hosts, asked)] if way]


def _changed(
    shape: ModelShape, tried: Sequence[Candidate], hosts: Mapping[str, PlanHost], asked: _Flags, kept: _Flags
) -> str:
    """The flags with which the roomiest of the plans fits, and that plan; "" if none does.

    Args:
        kept: of the flags that are asked for.
    """
    fits = _fitting(fit_memory(shape, one, hosts, max_len=kept.max_len, kv_gb=kept.kv_gb) for one in tried)
    best = max(fits, key=lambda fit: (fit.context, _kv(fit)), default=None)
    if best is None:
        return ""
    words = []
    if kept.kv_gb != asked.kv_gb:
        kv_gb = int(100 * _kv(best) / GB) / 100
        words.append(f"--kv-cache-gb {kv_gb:g}")
        best = fit_memory(shape, best.candidate, hosts, max_len=kept.max_len, kv_gb=kv_gb)
    if kept.max_len != asked.max_len:
        words.append(f"--max-model-len {best.context}")
    return "" if best.problem or not best.context else f"{' '.join(words)} ({best.candidate.name})"


def _fitting(fits: Iterable[Fit]) -> Iterator[Fit]:
    return (fit for fit in fits if not fit.problem)


def _kv(fit: Fit) -> int:
    return min(rank.kv for rank in fit.ranks)


def _room(host: PlanHost) -> int:
    return max(0, host.memory.available - host.guard)


def _grown(shape: ModelShape, hosts: Sequence[PlanHost], asked: _Flags) -> str:
    """The fewest further hosts like the roomiest one, and the plan that then fits; "" if none does."""
    weights = total(shape.whole.stage(0, shape.n_layers)).kept
    like, *others = sorted(hosts, key=_room, reverse=True)
    for more in range(1, MAX_HOSTS - len(hosts) + 1):
        further = [replace(like, name=f"{like.name}+{number}") for number in range(more)]
        named = {host.name: host for host in (like, *further, *others)}
        if sum(map(_room, named.values())) < weights:
            continue
        groups = [one for one in candidates(shape, list(named)) if one.replicas == 1 and one.size > more]
        fits = (fit_memory(shape, one, named, max_len=asked.max_len, kv_gb=asked.kv_gb) for one in groups)
        if (fit := next(_fitting(fits), None)) is not None:
            return f"{more} more host{'s' * (more > 1)} like {like.name} ({fit.candidate.name})"
    return ""
