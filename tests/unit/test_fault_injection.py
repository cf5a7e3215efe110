"""Faults on demand: how they are asked for."""

from __future__ import annotations

import pytest

from phalanx.dist.fault_injection import BUFFER_FAULTS, RANK_FAULTS, Injection, parse
from phalanx.errors import ConfigError


@pytest.mark.parametrize("kind", BUFFER_FAULTS + RANK_FAULTS)
def test_every_kind_can_be_asked_for(kind):
    assert parse(f"{kind}:rank=1,step=7,layer=2") == Injection(kind=kind, rank=1, step=7, layer=2)
    assert parse(f"{kind}:rank=0") == Injection(kind=kind, rank=0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("flood:rank=1", "Kinds: garbage"),
        ("kill", "Kinds: garbage"),
        ("kill:step=2", "Kinds: garbage"),
        ("kill:rank=one", "'rank=one'"),
        ("kill:rank=1,stop=2", "'stop=2'"),
        ("", "Kinds: garbage"),
    ],
)
def test_what_is_wrong_is_named(text, named):
    with pytest.raises(ConfigError, match="--inject") as caught:
        parse(text)
    assert named in str(caught.value)
