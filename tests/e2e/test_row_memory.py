"""The memory that rows of a real engine process take, as the system counts it, beside what the scheduler charges."""

from __future__ import annotations

import asyncio
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.driver import ask, running
from support.models import make_model

from phalanx.config import GIB, EngineConfig

PER_TOKEN = 2 * 4 * 64 * 4  # bytes: keys and values of four heads in the only layer
AGENTS = (60_000, 8000, 8000)  # tokens
BUDGET = 80_000

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not find_spec("phalanx_cpu"), reason="rows take memory by the page with the native kernels"),
]


def memory_of(pid: int) -> int:
    """Bytes of a process's memory, its part of what it shares."""
    lines = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) << 10


def test_agents_of_different_lengths_take_their_own_memory_within_the_budget(tmp_path: Path) -> None:
    """As two length classes, they would be charged 180,000 tokens."""
    path = make_model(
        "llama", tmp_path, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=65536,
    )  # fmt: skip
    config = EngineConfig(
        model=str(path), max_num_seqs=4, max_model_len=61_000, kv_cache_gb=BUDGET * PER_TOKEN / GIB, prefix_cache_gb=0
    )
    draw = random.Random(0)
    agents = [ask(f"agent {i}", [draw.randrange(3, 500) for _ in range(n)], 900) for i, n in enumerate(AGENTS)]
    warm = ask("warm", [draw.randrange(3, 500) for _ in range(1500)], 20)

    async def main() -> int:
        async with running(config) as driver:
            await driver.generate(warm)
            before = memory_of(driver.engine.pid)
            for agent in agents:  # the shorter ones while the longest decodes
                driver.submit(agent)
                await driver.until(lambda agent=agent: len(driver.tokens[agent.id]) > 2 or agent.id in driver.finished)
            assert not driver.finished.keys() - {"warm"}
            return memory_of(driver.engine.pid) - before

    taken = asyncio.run(main())
    assert 0.95 < taken / (sum(AGENTS) * PER_TOKEN) < 1.05
    assert taken < BUDGET * PER_TOKEN
