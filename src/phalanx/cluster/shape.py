"""The shape of a group that `up` starts: how many stages its hosts form, and how many hosts each has.

`dist/topology.py` decides which host is in which stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.cluster.argument_flags import split_flag
from phalanx.errors import ConfigError

TP_FLAGS = ("--tp", "-tp", "--tensor-parallel-size")
PP_FLAGS = ("--pp", "-pp", "--pipeline-parallel-size")
SPLIT_FLAG = "--pp-split"


class Shape(NamedTuple):
    """The shape that arguments of `serve` ask for."""

    rest: tuple[str, ...]
    """The arguments without --pp and --tp."""
    stages: int
    """--pp."""
    widths: tuple[int, ...]
    """--tp, for each stage; empty if it is not given."""
    split: tuple[int, ...] | None = None
    """--pp-split: layers of each stage."""

    def widths_of(self, n_hosts: int) -> tuple[int, ...]:
        """Hosts of each stage of a group of so many hosts: as given, else equally many.

        Raises:
            ConfigError: they do not fit.
        """
        if not self.widths and n_hosts % self.stages:
            raise _unequal(n_hosts, self.stages)
        widths = self.widths or (n_hosts // self.stages,) * self.stages
        if (needed := sum(widths)) != n_hosts:
            of_stages = f" and --pp {self.stages} need" if self.stages > 1 else " needs"
            raise ConfigError(
                f"--tp {','.join(map(str, widths))}{of_stages} {needed} hosts, not {n_hosts}.",
                remedy=f"Every host runs one rank: name {needed} hosts, or "
                + (f"use --num-ranks {needed}." if needed < n_hosts else "lower one of them."),
            )
        return widths

    def flags(self, n_hosts: int) -> list[str]:
        """The flags of `serve` for a group of so many hosts.

        Raises:
            ConfigError: as `widths_of`.
        """
        widths = self.widths_of(n_hosts)
        if self.stages == 1:
            return ["--tp", str(n_hosts)]
        alike = len(set(widths)) == 1
        return ["--tp", str(widths[0]) if alike else ",".join(map(str, widths)), "--pp", str(self.stages)]


def shape_of(words: Sequence[str]) -> Shape:
    """The shape that the arguments of `serve` ask for.

    Raises:
        ConfigError: a flag is not of whole numbers, or they contradict each other.
    """
    rest, tps = split_flag(words, *TP_FLAGS)
    rest, pps = split_flag(rest, *PP_FLAGS)
    (stages,) = _numbers("--pp", pps[-1]) if pps else (1,)
    widths = _numbers("--tp", tps[-1]) if tps else ()
    if len(widths) == 1:
        widths *= stages
    if widths and len(widths) != stages:
        raise ConfigError(
            f"--tp {tps[-1]} is for {len(widths)} stages, but --pp is {stages}.",
            remedy=f"Use --pp {len(widths)}, or give --tp one number.",
        )
    _, splits = split_flag(rest, SPLIT_FLAG)
    split = _numbers(SPLIT_FLAG, splits[-1]) if splits else None
    if split is not None and len(split) != stages:
        raise ConfigError(
            f"{SPLIT_FLAG} {splits[-1]} and --pp {stages} differ in the number of stages.",
            remedy="Give the number of layers of each stage.",
        )
    return Shape(rest, stages, widths, split)


def _unequal(n_hosts: int, stages: int) -> ConfigError:
    """So many hosts do not form so many stages of one width."""
    each, more = divmod(n_hosts, stages)
    example = ",".join(str(each + (stage < more)) for stage in range(stages))
    return ConfigError(
        f"{n_hosts} hosts cannot be divided equally among --pp {stages}.",
        remedy=f"Say how many hosts each stage has, as in `-- MODEL --pp {stages} --tp {example}`."
        if each
        else f"Every stage needs a host: name {stages} hosts, or use --pp {n_hosts}.",
    )


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    words = text.split(",")
    single = flag == "--pp"
    if not all(word.isascii() and word.isdigit() and int(word[:9]) > 0 for word in words) or (single and words[1:]):
        raise ConfigError(
            f"{flag} {text} is not {'a whole number' if single else 'whole numbers'}, 1 or more.",
            remedy=f"Give {flag} the number of stages." if single else f"Give {flag} one number for each stage.",
        )
    return tuple(int(word) for word in words)
