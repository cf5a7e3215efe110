"""How hosts divide into stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.shape import shape_of
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "hosts", "flags"),
    [
        ((), 4, ["--tp", "4"]),
        (("--pp", "2"), 4, ["--tp", "2", "--pp", "2"]),
        (("-pp=4",), 4, ["--tp", "1", "--pp", "4"]),
        (("--pp", "2", "--tp", "2"), 4, ["--tp", "2", "--pp", "2"]),
        (("--tp", "2,1", "--pipeline-parallel-size", "2"), 3, ["--tp", "2,1", "--pp", "2"]),
    ],
)
def test_flags_of_a_group(words: tuple[str, ...], hosts: int, flags: list[str]) -> None:
    shape = shape_of(("demo", *words, "--port", "9"))
    assert shape.rest == ("demo", "--port", "9")
    assert shape.flags(hosts) == flags


@pytest.mark.parametrize(
    ("words", "hosts", "said", "remedy"),
    [
        (("--pp", "3"), 5, "5 hosts cannot be divided equally among --pp 3", "`-- MODEL --pp 3 --tp 2,2,1`"),
        (("--pp", "3"), 2, "2 hosts cannot be divided equally among --pp 3", "name 3 hosts, or use --pp 2"),
        (("--pp", "2", "--tp", "3"), 4, "--tp 3,3 and --pp 2 need 6 hosts, not 4", "name 6 hosts, or lower one"),
        (("--pp", "2", "--tp", "2,1"), 4, "--tp 2,1 and --pp 2 need 3 hosts, not 4", "use --num-ranks 3"),
        (("--pp", "3", "--tp", "2,1"), 3, "--tp 2,1 is for 2 stages, but --pp is 3", "Use --pp 2, or give --tp one"),
        (("--tp", "2,1"), 3, "--tp 2,1 is for 2 stages, but --pp is 1", "Use --pp 2"),
        (("--pp", "2,2"), 4, "--pp 2,2 is not a whole number", "number of stages"),
        (("--pp", "0"), 4, "--pp 0 is not a whole number, 1 or more", "number of stages"),
        (("--tp", "two"), 4, "--tp two is not whole numbers", "one number for each stage"),
        (("--pp", "2", "--pp-split", "8"), 4, "--pp-split 8 and --pp 2 differ in the number", "layers of each stage"),
        (("--pp", "2", "--pp-split", "8,x"), 4, "--pp-split 8,x is not whole numbers", "one number for each stage"),
    ],
)
def test_what_hosts_cannot_form(words: tuple[str, ...], hosts: int, said: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        shape_of(words).flags(hosts)
    assert remedy in caught.value.remedy


@given(st.integers(1, 16), st.integers(1, 16))
def test_hosts_are_divided_equally_or_not_at_all(stages: int, hosts: int) -> None:
    shape = shape_of(("--pp", str(stages)))
    if hosts % stages:
        with pytest.raises(ConfigError):
            shape.widths_of(hosts)
    else:
        assert shape.widths_of(hosts) == (hosts // stages,) * stages
