"""Prefixes on the disks of several ranks and stages (the story is that of `e2e/test_prefix_on_disk.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.driver import PATIENT, ask, running
from support.models import make_model

from phalanx.config import EngineConfig
from phalanx.speculation_config import NgramSpeculation

PLANS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2, drafts": {"pipeline_parallel_size": 2, "speculative_config": NgramSpeculation()},
}
PROMPT = [(7 * i * i + i) % 490 + 5 for i in range(600)]

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("plan", PLANS)
def test_after_a_restart_every_rank_loads_its_part(plan, tmp_path: Path):
    path = make_model("llama", tmp_path / "llama", num_hidden_layers=4)
    sizes = {"kv_cache_gb": 0.25, "prefix_cache_gb": 0.05, "max_num_batched_tokens": 64}
    config = EngineConfig(
        model=str(path),
        prefix_cache_dir=str(tmp_path / "cache"),
        verify_restores=True,
        **sizes,
        **PATIENT,
        **PLANS[plan],
    )

    async def life(name: str) -> tuple[list[int], int, int]:
        async with running(config) as driver:
            (tokens,) = await driver.generate(ask(name, PROMPT, 24))
            async with asyncio.timeout(120):
                while (stats := await driver.engine.ping()).disk_blocks < 2:
                    await asyncio.sleep(0.05)
            assert all(rank.steps == rank.matches == stats.step for rank in stats.ranks)
            assert stats.disk_mismatches == 0
            return tokens, driver.finished[name].disk_tokens, stats.disk_failures

    first = asyncio.run(life("a"))
    again = asyncio.run(life("b"))
    assert (first[1:], again[1:]) == ((0, 0), (256, 0)) and again[0] == first[0]
    blocks = tmp_path / "cache" / "rank-1" / "blocks"
    data = bytearray(blocks.read_bytes())
    data[len(data) * 3 // 4] ^= 1  # in the second block of one rank
    blocks.write_bytes(data)
    damaged = asyncio.run(life("c"))
    assert damaged[1:] == (0, 1) and damaged[0] == first[0]
    mended = asyncio.run(life("d"))
    assert mended[1:] == (256, 0) and mended[0] == first[0]


def test_one_rank_is_killed_and_the_group_that_restarts_serves_from_both_disks(tmp_path: Path):
    path = make_model("llama", tmp_path / "llama", num_hidden_layers=4)
    sizes = {"kv_cache_gb": 0.25, "prefix_cache_gb": 0.05, "max_num_batched_tokens": 64}
    cache = str(tmp_path / "cache")
    config = EngineConfig(model=str(path), prefix_cache_dir=cache, tensor_parallel_size=2, **sizes, **PATIENT)

    async def main() -> None:
        async with running(config) as driver:
            (first,) = await driver.generate(ask("a", PROMPT, 24))
            async with asyncio.timeout(120):
                while (stats := await driver.engine.ping()).disk_blocks < 2:
                    await asyncio.sleep(0.05)
            before = [rank.pid for rank in stats.ranks]
            driver.ready.clear()
            os.kill(before[1], signal.SIGKILL)
            await driver.until(driver.ready.is_set)
            (again,) = await driver.generate(ask("b", PROMPT, 24))
            stats = await driver.engine.ping()
            assert again == first and driver.finished["b"].disk_tokens == 512
            assert stats.disk_failures == 0 and not {rank.pid for rank in stats.ranks} & set(before)
            assert all(rank.matches == stats.step for rank in stats.ranks)

    asyncio.run(main())


def test_stages_with_and_without_recurrent_state_load_whole_prefixes(tmp_path: Path):
    """Of four layers the last has attention, and three have states: a block of one stage holds nothing."""
    path = make_model("qwen3_next", tmp_path / "model")
    sizes = {"kv_cache_gb": 0.25, "prefix_cache_gb": 0.05, "max_num_batched_tokens": 64}
    cache = str(tmp_path / "cache")
    config = EngineConfig(model=str(path), prefix_cache_dir=cache, pipeline_parallel_size=2, **sizes, **PATIENT)

    async def life(prompt: list[int]) -> tuple[list[int], int]:
        async with running(config) as driver:
            (tokens,) = await driver.generate(ask("a", prompt, 12))
            return tokens, driver.finished["a"].disk_tokens

    first, loaded = asyncio.run(life(PROMPT))
    longer = [*PROMPT, *first, 8, 9]
    second, loaded = asyncio.run(life(longer))
    assert loaded == len(PROMPT) + len(first) - 1
    third, loaded = asyncio.run(life(longer))
    assert third == second and loaded == len(PROMPT) + len(first) - 1
