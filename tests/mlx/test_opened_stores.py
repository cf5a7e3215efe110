"""A rank opens its prefixes on disk, and other ranks have not all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from phalanx.config import EngineConfig
from phalanx.engine.disk import _Held, open_store
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
