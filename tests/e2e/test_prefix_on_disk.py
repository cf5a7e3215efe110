"""A conversation whose engine starts again between its turns: the tokens are those without a restart and without a
cache, and what was computed before comes from disk."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.utils import load_model
from support.driver import PATIENT, Driver, ask, running
from support.grammars import GRAMMARS, reference
from support.models import EOS, make_model

from phalanx.config import EngineConfig
from phalanx.prefix_store.index_log import records
from phalanx.prefix_store.store import PrefixStore
from phalanx.types import EngineStats, KeepOwners

FAMILIES = [
    "llama",  # two tensor-parallel ranks and two stages of it: `ranks/test_prefixes_of_ranks.py`
    "qwen3_next",  # recurrent state
    *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "deepseek_v3", "qwen3_moe", "gpt_oss")),
]
SEEDED = {"temperature": 1.0, "seed": 11}
TURNS = 4
TOKENS = 12  # of an answer


def config_for(path: Path, **more) -> EngineConfig:
    sizes = {"kv_cache_gb": 0.25, "prefix_cache_gb": 0.2, "max_num_batched_tokens": 64, "prefix_cache_disk_gb": 0.2}
    return EngineConfig(model=str(path), **{**sizes, **PATIENT, **more})


def turn(said: list[int], number: int) -> list[int]:
    """What the user says next: the first time more than two blocks."""
    rnd = random.Random(number)
    return said + [rnd.randrange(3, 500) for _ in range(100 if number else 540)]


async def answer(driver: Driver, prompt: list[int], number: int) -> list[int]:
    """A seeded answer and then a greedy one to the same prompt; the conversation goes on with the greedy one."""
    seeded, greedy = f"seeded {number}", f"greedy {number}"
    (drawn,) = await driver.generate(ask(seeded, prompt, TOKENS, sampling=SEEDED))
    (tokens,) = await driver.generate(ask(greedy, prompt, TOKENS))
    return drawn + tokens


async def written(driver: Driver, blocks: int) -> None:
    """Wait until so many blocks count: a rank that is killed before has not written them."""
    async with asyncio.timeout(120):
        while (await driver.engine.ping()).disk_blocks < blocks:
            await asyncio.sleep(0.05)


async def at_once(config: EngineConfig) -> list[list[int]]:
    """All answers of one engine, which is not started again."""
    async with running(config) as driver:
        said, answers = [], []
        for number in range(TURNS):
            said = turn(said, number)
            answers.append(await answer(driver, said, number))
            said = said + answers[-1][TOKENS:]
        return answers


async def with_restarts(config: EngineConfig, *, endings: bool) -> tuple[list[list[int]], list[int]]:
    """The same answers where the engine ends after each turn, after the second one by SIGKILL; and the prompt tokens
    that each turn loads."""
    said, answers, loaded = [], [], []
    number = 0
    while number < TURNS:
        async with running(config) as driver:
            for _ in range(2 if number == 1 else 1):
                said = turn(said, number)
                answers.append(await answer(driver, said, number))
                loaded.append(driver.finished[f"seeded {number}"].disk_tokens)
                said = said + answers[-1][TOKENS:]
                await written(driver, len(said) // 256 + endings * 2 * (number + 1))
                number += 1
                if number == 2:
                    driver.ready.clear()
                    os.kill(driver.engine.pid, signal.SIGKILL)
                    await driver.until(driver.ready.is_set)
    return answers, loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_over_restarts(family, tmp_path):
    path = make_model(family, tmp_path / family)
    plain = asyncio.run(at_once(config_for(path, prefix_cache_gb=0.0)))
    cached = asyncio.run(at_once(config_for(path)))
    endings = family == "qwen3_next"
    config = config_for(path, prefix_cache_dir=str(tmp_path / "cache"))
    answers, loaded = asyncio.run(with_restarts(config, endings=endings))
    assert answers == cached == plain
    if endings:  # states serve whole: the last answer but its last token
        assert loaded == [0, *(540 + 100 * n + TOKENS * (n + 1) - 1 for n in range(TURNS - 1))]
    else:
        assert loaded == [0, 512, 512, 768]
    assert len({tuple(tokens) for tokens in answers}) == TURNS


def test_a_block_with_other_numbers_than_its_tokens_give_is_found(tmp_path):
    """Its checksum is right: it is rewritten, as a mistake of the program would."""
    path = make_model("llama", tmp_path / "llama")
    config = config_for(path, prefix_cache_dir=str(tmp_path / "cache"), verify_restores=True)

    async def life() -> EngineStats:
        async with running(config) as driver:
            await driver.generate(ask("a", turn([], 0), 4))
            await written(driver, 2)
            async with asyncio.timeout(120):
                while (stats := await driver.engine.ping()).disk_mismatches < damaged:
                    await asyncio.sleep(0.05)
            return stats

    damaged = 0
    asyncio.run(life())
    assert asyncio.run(life()).disk_hits == 256
    folder = tmp_path / "cache" / "rank-0"
    header = next(record for record, _ in records((folder / "index").read_bytes()))
    size = (folder / "blocks").stat().st_size // 2
    store = PrefixStore(folder, header.identity, (size, 0))
    last = store.blocks[-1]
    data = store.read(last.name, np.empty(size, np.uint8)).view(np.float32) * 1.5
    store.write([(last, lambda: data.view(np.uint8))])
    store.close()
    damaged = 1
    assert asyncio.run(life()).disk_mismatches == 1
    damaged = 0
    assert asyncio.run(life()).disk_hits == 256, "it was written again"


def test_two_servers_one_directory_and_keys_that_are_removed(tmp_path):
    path = make_model("llama", tmp_path / "llama")
    config = config_for(path, prefix_cache_dir=str(tmp_path / "cache"))
    prompt = turn([], 0)

    async def first():
        async with running(config) as driver:
            await driver.generate(ask("a", prompt, 4, owner="a"))
            await driver.generate(ask("b", prompt, 4, owner="b"))
            assert driver.finished["b"].cached_tokens == 0
            await written(driver, 4)
            with pytest.raises(AssertionError, match="another server uses"):
                async with running(config):
                    pass
            await driver.generate(ask("again", prompt, 4, owner="a"))

    async def second():
        async with running(config) as driver:
            driver.engine.send(KeepOwners(["b"]))
            await driver.generate(ask("c", prompt, 4, owner="c"), ask("a", prompt, 4, owner="a"))
            await driver.generate(ask("b", prompt, 4, owner="b.client"), ask("own", prompt, 4, owner="b"))
            return [driver.finished[name].disk_tokens for name in ("c", "a", "b", "own")]

    asyncio.run(first())
    assert asyncio.run(second()) == [0, 0, 0, 512]


def test_a_directory_that_is_deleted_turns_it_off_with_one_warning(tmp_path, capfd):
    path, cache = make_model("llama", tmp_path / "llama"), tmp_path / "cache"

    async def main() -> None:
        async with running(config_for(path, prefix_cache_dir=str(cache))) as driver:
            (tokens,) = await driver.generate(ask("a", turn([], 0), 4))
            await written(driver, 2)
            shutil.rmtree(cache)
            for name in ("b", "c", "d"):
                await driver.generate(ask(name, turn([ord(name)], 0), 4))
            assert await driver.generate(ask("again", turn([], 0), 4)) == [tokens]
            assert len(driver.finished) == 5

    asyncio.run(main())
    assert not cache.exists()
    said = capfd.readouterr().err
    assert said.count("the prefix cache on disk is off until the next start: rank 0: ") == 1
    assert f"{cache}/rank-0 was deleted" in said


def test_an_answer_that_follows_a_schema_is_the_same_after_a_restart(tmp_path):
    path = make_model("llama", tmp_path / "llama")
    config = config_for(path, prefix_cache_dir=str(tmp_path / "cache"))

    async def life() -> tuple[list[int], list[int], int]:
        async with running(config) as driver:
            schema = {"grammar": GRAMMARS["person"], "stop_ids": {EOS}}
            (greedy,) = await driver.generate(ask("greedy", turn([], 0), 60, **schema))
            (drawn,) = await driver.generate(ask("drawn", turn([], 0), 60, sampling=SEEDED, **schema))
            await written(driver, 2)
            return greedy, drawn, driver.finished["greedy"].disk_tokens

    first, again = asyncio.run(life()), asyncio.run(life())
    assert again[:2] == first[:2] and (first[2], again[2]) == (0, 512)
    assert reference(load_model(path)[0], path, turn([], 0), GRAMMARS["person"], 60, EOS) == first[0]


def test_another_precision_starts_empty(tmp_path):
    path = make_model("llama", tmp_path / "llama")
    config = config_for(path, prefix_cache_dir=str(tmp_path / "cache"))

    async def loaded(**more) -> int:
        async with running(config_for(path, prefix_cache_dir=str(tmp_path / "cache"), **more)) as driver:
            await driver.generate(ask("a", turn([], 0), 4))
            await written(driver, 2)
            return driver.finished["a"].disk_tokens

    assert config.dtype == "auto"
    assert [asyncio.run(loaded()), asyncio.run(loaded()), asyncio.run(loaded(dtype="bfloat16"))] == [0, 512, 0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prefix_cache_gb": 0.0}, "needs memory to read into"),
        ({"prefix_cache_disk_gb": 0.0}, "holds no 256 tokens"),
    ],
)
def test_sizes_that_hold_nothing_are_refused(tmp_path, flags, said):
    path = make_model("llama", tmp_path / "llama")

    async def main():
        with pytest.raises(AssertionError, match=said):
            async with running(config_for(path, prefix_cache_dir=str(tmp_path / "cache"), **flags)):
                pass

    asyncio.run(main())
