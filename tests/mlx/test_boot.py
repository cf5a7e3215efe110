"""The order of a rank's start, before there is a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import EngineConfig
from phalanx.engine import boot
from phalanx.engine.link import SingleRank
from phalanx.errors import ModelUnsupported


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reads_the_vocabulary_beside_the_weights(rank, monkeypatch, tmp_path):
    said: list[str] = []

    def load(config, path: Path, member, report):
        said.append(f"weights of {path.name}")
        raise ModelUnsupported("enough")

    monkeypatch.setattr(boot, "reporter", lambda socket: None)
    monkeypatch.setattr(boot, "join_group", lambda *arguments: None)
    monkeypatch.setattr(boot, "resolve", lambda model, **options: tmp_path / model)
    monkeypatch.setattr(boot, "begin_grammars", lambda config, path, socket: said.append(f"grammars of {path.name}"))
    monkeypatch.setattr(boot, "load_model", load)
    with pytest.raises(ModelUnsupported, match="enough"):
        boot._start(EngineConfig(model="m"), None, None, None, SingleRank(), object() if rank == 0 else None)
    assert said == (["grammars of m"] if rank == 0 else []) + ["weights of m"]
