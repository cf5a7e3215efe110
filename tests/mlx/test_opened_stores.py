"""A rank opens its prefixes on disk, and other ranks have not all of them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from phalanx.config import EngineConfig, GroupConfig
from phalanx.engine import role
from phalanx.engine.disk import _Held, open_store
from phalanx.engine.group_selftest import RankFacts
from phalanx.engine.link import SingleRank
from phalanx.errors import ConfigError
from phalanx.model.cache.layer_layout import Heads, KvLayout
from phalanx.prefix_store import store as store_module
from phalanx.sched.plan import DiskBlock

HEADS = Heads(1, 4, mx.float32)
RUNNER: Any = SimpleNamespace(facts=SimpleNamespace(layouts=(KvLayout(HEADS, HEADS, None),), recurrent=False))
NAMES = [b"1" * 16, b"2" * 16]


class Beside:
    """The link of a rank beside another one that has only the first block."""

    rank, size, host = 1, 2, "studio2"

    def share(self, value: _Held) -> list[_Held]:
        return [_Held(names=NAMES[0], sizes=value.sizes, recurrent=False), value]


def test_blocks_that_another_rank_lacks_are_dropped_or_the_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model="m", prefix_cache_dir=str(tmp_path / "cache"), prefix_cache_gb=1.0)
    link: Any = Beside()

    def fill() -> None:
        opened = open_store(config, link, RUNNER, "model")
        assert opened is not None
        missing = [name for name in NAMES if name not in {block.name for block in opened.blocks}]
        blocks = [DiskBlock(name, b"", b"", b"") for name in missing]
        opened.store.write([(block, lambda: np.zeros(8, np.uint8)) for block in blocks])
        opened.store.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fill()
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_write_at", full)
        patch.setattr(store_module, "LOCK_PATIENCE_S", 0.0)
        with pytest.raises(ConfigError, match=r"cache/rank-1 on studio2 cannot be written: No space left on device"):
            open_store(config, link, RUNNER, "model")


SOFTWARE = dict.fromkeys(RankFacts.__struct_fields__, "as before")
GROUP = {"size": 2, "widths": (1, 1), "backend": "ring"}
CHANGES: dict[str, dict[str, Any]] = {
    **{f"software's {name}": {"software": {name: "another"}} for name in RankFacts.__struct_fields__},
    "dtype of the weights": {"dtype": mx.bfloat16},
    "kernels": {"kernels": "others"},
    "processor": {"processor": "another"},
    "number of ranks": {"group": {"size": 3, "widths": (1, 2)}},
    "widths of stages": {"group": {"widths": (2,)}},
    "backend": {"group": {"backend": "mpi"}},
    "layers of stages": {"layers": ((0, 1), (2, 3))},
    "algorithm": {"config": {"collective": "star"}},
    "dtype between stages": {"config": {"pp_activation_dtype": "bfloat16"}},
    "layouts": {"heads": Heads(1, 8, mx.float32)},
    "format": {"format": store_module.FORMAT + 1},
}
"""Each one fact on which the numbers in a block depend."""


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, **change: Any) -> list[bytes]:
    """Names of the blocks that a start finds; it writes one if there are none."""
    monkeypatch.setattr(role.platform, "machine", lambda: change.get("processor", "x86_64"))
    monkeypatch.setattr(store_module, "FORMAT", change.get("format", store_module.FORMAT))
    config = EngineConfig(model="m", prefix_cache_dir=str(folder), prefix_cache_gb=1.0, **change.get("config", {}))
    group = GroupConfig(nonce=0, control="", **{**GROUP, **change.get("group", {})})
    member: Any = SimpleNamespace(group=group, kernels=change.get("kernels", "none"))
    model: Any = SimpleNamespace(
        software=RankFacts(**{**SOFTWARE, **change.get("software", {})}),
        loaded=SimpleNamespace(dtype=change.get("dtype", mx.float32)),
        layers=change.get("layers", ((0, 2), (3, 3))),
    )
    heads = change.get("heads", HEADS)
    runner: Any = SimpleNamespace(facts=SimpleNamespace(layouts=(KvLayout(heads, heads, None),), recurrent=False))
    found = open_store(config, SingleRank(), runner, role._identity(config, member, model))
    assert found is not None
    if not found.blocks:
        found.store.write([(DiskBlock(NAMES[0], b"", b"", b""), lambda: np.zeros(8, np.uint8))])
    found.store.close()
    return [block.name for block in found.blocks]


@pytest.mark.parametrize("fact", CHANGES)
def test_a_start_with_one_other_fact_finds_nothing_and_says_so_once(
    fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "phalanx.engine")
    assert opened(tmp_path, monkeypatch) == [] and opened(tmp_path, monkeypatch) == NAMES[:1]
    assert not caplog.messages
    with monkeypatch.context() as patch:
        assert opened(tmp_path, patch, **CHANGES[fact]) == []
    assert caplog.messages == [
        f"prefixes on disk were of another model, plan, version or machine: {tmp_path} starts empty"
    ]
    assert opened(tmp_path, monkeypatch) == [], "those of the other fact are no use either"
