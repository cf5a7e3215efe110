"""Scheduler and mirrors with disks that answer late, fail and survive restarts: tokens are those without any cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import FakeRunner, Simulation, make_config, make_request, reference

from phalanx.engine.mirror import Mirror
from phalanx.sched.disk_index import BLOCK_TOKENS, DiskIndex
from phalanx.sched.plan import CompareBlock, DiskBlock, DiskOutcome, DropBlocks, LoadBlocks, RowOp, WriteBlocks

Disk = dict[bytes, tuple[DiskBlock, list[int | None]]]


class DiskRunner(FakeRunner):
    """Buffers of tokens, and a disk of blocks of them. What it reports waits in `outcomes`."""

    def __init__(self, rank: int, disk: Disk) -> None:
        super().__init__()
        self.rank = rank
        self.disk = disk
        self.outcomes: list[DiskOutcome] = []
        self.error = ""

    def _apply(self, op: RowOp) -> None:
        match op:
            case WriteBlocks():
                for i, block in enumerate(op.blocks if not self.error else ()):
                    start = (op.first + i) * BLOCK_TOKENS
                    self.disk[block.name] = block, self.entries[op.entry][start : start + len(block.tokens) // 4]
                bad = () if self.error else None
                self.outcomes.append(DiskOutcome(self.rank, op.entry, False, 0.0, bad, self.error))
            case LoadBlocks():
                missing = tuple(name for name in op.names if name not in self.disk)
                found = [token for name in op.names if name in self.disk for token in self.disk[name][1]]
                self.entries[op.entry] = found
                self.outcomes.append(DiskOutcome(self.rank, op.entry, True, 0.01, missing or None))
            case CompareBlock():
                own, entry = self.arenas[op.arena][op.slot], self.entries[op.entry]
                if own[op.start : op.stop] != entry[op.start : op.stop]:
                    self.outcomes.append(DiskOutcome(self.rank, op.entry, False, 0.0, None, "", 7.0))
            case DropBlocks():
                for name in op.names:
                    self.disk.pop(name, None)
            case _:
                super()._apply(op)


class DiskSimulation(Simulation):
    """A group whose ranks report after a while."""

    def __init__(
        self, disks: list[Disk], *, max_blocks: int = 100, seed: int = 0, verify: bool = False, **more
    ) -> None:
        super().__init__(make_config(**{"prefix_budget": 1 << 15, **more}))
        self.runners = [DiskRunner(rank, disk) for rank, disk in enumerate(disks)]
        self.ranks = [(Mirror(), runner) for runner in self.runners]
        self.rnd = random.Random(seed)
        self.patient = True
        whole_only = more.get("recurrent", False)
        index = DiskIndex(b"secret", max_blocks, max_blocks, whole_only=whole_only)
        common = set.intersection(*(set(disk) for disk in disks))
        for disk in disks:
            for name in disk.keys() - common:
                del disk[name]
        index.add(block for block, _ in disks[0].values())
        self.scheduler.disk.open(index, len(disks), verify=verify)
        self.scheduler.disk.drop(index.trim())

    def step(self) -> bool:
        waiting = [(runner, outcome) for runner in self.runners for outcome in runner.outcomes]
        self.rnd.shuffle(waiting)
        for runner, outcome in waiting:
            if self.rnd.random() < 0.4:
                runner.outcomes.remove(outcome)
                self.scheduler.disk.take(outcome)
        return super().step() or bool(waiting and self.patient)


def conversation(rnd: random.Random, salt: int, length: int) -> list[int]:
    return [rnd.randrange(50) for _ in range(length)] + [salt]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.booleans(), st.floats(0.0, 0.2), st.booleans())
def test_tokens_are_those_without_a_cache_over_restarts_and_lost_blocks(seed, max_blocks, recurrent, lost, verify):
    rnd = random.Random(seed)
    disks: list[Disk] = [{}, {}]
    texts = [conversation(random.Random(i), i, 300) for i in range(3)]
    for life in range(3):
        group = DiskSimulation(disks, max_blocks=max_blocks, seed=seed + life, verify=verify, recurrent=recurrent)
        asked = []
        for i in range(6):
            which = rnd.randrange(3)
            options = {"owner": rnd.choice(["", "a"]), "checkpoint": rnd.randrange(len(texts[which]))}
            asked.append(make_request(f"{life}/{i}", list(texts[which]), 5, **options))
            group.submit(asked[-1])
            for _ in range(rnd.randrange(30)):
                group.step()
            texts[which] += conversation(rnd, i, rnd.randrange(200))
            if rnd.random() < 0.3:
                group.scheduler.cancel(rnd.choice(asked).id, group.now)
            for disk in disks:
                for name in [name for name in disk if rnd.random() < lost]:
                    del disk[name]
        group.run()
        for request in asked:
            wanted = reference(request)
            assert group.outputs[request.id] == wanted[: len(group.outputs[request.id])]
            ending = group.finished[request.id]
            assert ending.reason == "cancelled" or group.outputs[request.id] == wanted
            assert ending.disk_tokens <= ending.cached_tokens
        assert all(len(disk) <= 2 * max_blocks for disk in disks)
        assert not group.scheduler.disk.held and not group.scheduler.disk.mismatches


def restarted(disks: list[Disk], prompt: list[int], **more) -> tuple[DiskSimulation, int, int]:
    """A new group computes a prompt. Returns it, with the prompt's tokens that were cached, and those from disk."""
    group = DiskSimulation(disks, **more)
    group.submit(make_request("a", prompt, 5))
    group.run()
    return group, group.finished["a"].cached_tokens, group.finished["a"].disk_tokens


@pytest.mark.parametrize("recurrent", [False, True])
def test_after_a_restart_a_prefix_comes_from_disk(recurrent):
    disks: list[Disk] = [{}, {}, {}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    first, cached, loaded = restarted(disks, prompt, recurrent=recurrent)
    assert (cached, loaded) == (0, 0)
    longer = prompt + first.outputs["a"] + [1] * 20
    whole = len(prompt) + 4 if recurrent else 3 * BLOCK_TOKENS
    second, cached, loaded = restarted(disks, longer, recurrent=recurrent)
    assert cached == loaded == whole
    assert second.scheduler.counters.disk_hits == whole and second.scheduler.disk.failures == 0
    second.submit(make_request("b", [*longer, *second.outputs["a"], 3], 5))
    second.run()
    assert second.finished["b"].cached_tokens > whole and second.finished["b"].disk_tokens == 0, "it is in memory"


def test_a_rank_that_lost_a_block_has_the_prompt_computed_and_the_block_goes_everywhere():
    disks: list[Disk] = [{}, {}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    restarted(disks, prompt)
    group = DiskSimulation(disks)
    lost = list(disks[1])[1]
    del disks[1][lost]
    group.submit(make_request("a", prompt, 5))
    group.run()
    assert group.outputs["a"] == reference(make_request("a", prompt, 5))
    assert group.finished["a"].disk_tokens == 0 and group.scheduler.disk.failures == 1
    assert lost in disks[0] and lost in disks[1], "it was written again with the answer"


def test_others_go_on_while_a_prefix_is_loaded_and_a_load_that_takes_too_long_is_given_up():
    disks: list[Disk] = [{}, {}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    restarted(disks, prompt)
    group = DiskSimulation(disks)
    group.patient = False
    taken, group.scheduler.disk.take = group.scheduler.disk.take, lambda outcome: None
    group.submit(make_request("a", prompt, 5))
    group.submit(make_request("b", [1, 2, 3], 3))
    for _ in range(7):
        group.step()
    assert "b" in group.finished and group.outputs["a"] == [] and group.scheduler.disk.held == {0}
    assert group.scheduler.idle_except(frozenset())
    group.now += 100.0
    group.run()
    group.scheduler.disk.take = taken
    assert group.outputs["a"] == reference(make_request("a", prompt, 5))
    assert group.finished["a"].disk_tokens == 0 and group.scheduler.disk.failures == 1


def test_nothing_is_loaded_where_that_takes_longer_than_computing():
    disks: list[Disk] = [{}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    restarted(disks, prompt)
    group = DiskSimulation(disks)
    group.scheduler.disk._speed = 100.0  # tokens/s
    group.scheduler.prefill_budget.observe(64, 0.1, 0.0)
    group.submit(make_request("a", prompt, 5))
    group.run()
    assert group.finished["a"].cached_tokens == 0 and group.scheduler.disk.failures == 0


def test_a_disk_that_fails_is_not_used_again_and_no_request_is_lost():
    disks: list[Disk] = [{}, {}]
    group = DiskSimulation(disks)
    group.runners[1].error = "No space left on device"
    prompts = [conversation(random.Random(i), i, 300) for i in range(4)]
    for i, prompt in enumerate(prompts):
        group.submit(make_request(str(i), prompt, 5))
        group.run()
    assert [group.outputs[str(i)] for i in range(4)] == [reference(make_request("", p, 5)) for p in prompts]
    assert group.scheduler.disk.error == "rank 1: No space left on device"
    assert sum(isinstance(op, WriteBlocks) for step in group.steps for op in step.ops) == 1


def test_dropping_all_prefixes_empties_the_disks():
    disks: list[Disk] = [{}, {}]
    group, _, _ = restarted(disks, conversation(random.Random(0), 0, 600))
    assert disks[0] and disks[1]
    group.submit(make_request("b", conversation(random.Random(1), 1, 600), 5))
    while "b" not in group.finished:
        group.step()
    super(DiskSimulation, group).step()  # its blocks are written now; the ranks have not said so
    assert len(disks[0]) == 4
    group.scheduler.reset_prefix_cache()
    group.run()
    assert disks == [{}, {}]


def test_a_restored_block_that_is_not_what_was_computed_is_found_and_deleted():
    disks: list[Disk] = [{}, {}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    restarted(disks, prompt)
    damaged = list(disks[1])[-1]
    disks[1][damaged][1][100] = 49 - prompt[612]  # the other tokens are right, and so is every checksum
    group, cached, loaded = restarted(disks, prompt, verify=True)
    assert cached == loaded == 2 * BLOCK_TOKENS
    assert group.outputs["a"] == reference(make_request("a", prompt, 5)), "that block was computed"
    (said,) = group.scheduler.disk.mismatches
    assert said.startswith(
        f"rank 1: a restored prefix of 3 blocks, the last of them {damaged.hex()}, differs by 7 times"
    )
    assert not group.scheduler.disk.held
    group.submit(make_request("b", prompt, 5))
    group.run()
    assert group.outputs["b"] == group.outputs["a"] and len(group.scheduler.disk.mismatches) == 1


def test_a_load_that_nobody_waits_for_any_more_holds_up_no_later_one():
    """Its entry made room for others, so ranks stopped reading and say nothing more."""
    disks: list[Disk] = [{}]
    prompt = conversation(random.Random(0), 0, 3 * BLOCK_TOKENS)
    restarted(disks, prompt)
    budget = 4 * BLOCK_TOKENS * make_config().limits.bytes_per_token
    group = DiskSimulation(disks, prefix_budget=budget)
    group.submit(make_request("a", prompt, 5))
    while not group.scheduler.disk.held:
        group.step()
    group.runners[0].outcomes.clear()
    group.scheduler.cancel("a", group.now)
    group.submit(make_request("other", conversation(random.Random(1), 1, 3 * BLOCK_TOKENS), 5))
    group.run()
    group.now += 3600.0
    group.submit(make_request("b", prompt, 5))
    group.run()
    assert group.finished["b"].disk_tokens == 3 * BLOCK_TOKENS
