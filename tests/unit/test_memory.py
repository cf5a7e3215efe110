"""The arithmetic of memory: guard, limits of containers, budgets."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from phalanx.errors import ConfigError, MemoryShortage
from phalanx.memory import (
    GB,
    MIB,
    MachineMemory,
    Prediction,
    check_fits,
    check_group,
    guard_bytes,
    largest_wired_limit_mb,
    prediction_table,
    process_rss,
    ranks_beside,
    read_machine,
    serving_budget,
)

NOWHERE = Path("/nonexistent")
MACHINE = MachineMemory(total=64 * GB, available=40 * GB)
MAC = MachineMemory(total=107 * GB, available=107 * GB, kind="metal", outside=21 * GB)
GPU = MachineMemory(total=24 * GB, available=23 * GB, kind="cuda", device="GPU-1")


def of(total: int) -> MachineMemory:
    return MachineMemory(total=total, available=total)


def test_the_guard_is_a_tenth_but_at_least_5_gb() -> None:
    assert guard_bytes(of(512 * GB)) == 512 * GB // 10
    assert guard_bytes(of(16 * GB)) == 5 * GB
    assert guard_bytes(of(512 * GB), 0.5) == GB // 2
    assert guard_bytes(of(512 * GB), 0.0) == 0


@pytest.mark.parametrize(
    ("limit_gb", "override", "guard_gb"),
    [(107, None, 0.0), (120, None, 4.8), (128, None, 12.8), (107, 30.0, 9.0), (107, 0.0, 0.0), (128, 2.0, 2.0)],
)
def test_what_macos_keeps_from_the_gpu_counts_as_free(limit_gb: int, override: float | None, guard_gb: float) -> None:
    """Of 128 GiB, macOS lets the GPU use 107 on its own, and what `iogpu.wired_limit_mb` says."""
    mac = MachineMemory(limit_gb * GB, limit_gb * GB, "metal", outside=(128 - limit_gb) * GB)
    assert guard_bytes(mac, override) == pytest.approx(guard_gb * GB, abs=1)


def test_a_gpu_keeps_a_tenth_of_its_own_memory() -> None:
    assert guard_bytes(GPU) == 24 * GB // 10
    assert guard_bytes(GPU, 1.0) == GB


@pytest.mark.parametrize("physical_gb", [16, 64, 128, 512])
def test_the_largest_wired_limit_needs_no_further_guard(physical_gb: int) -> None:
    most = largest_wired_limit_mb(physical_gb * GB) * MIB
    mac = MachineMemory(most, most, "metal", outside=physical_gb * GB - most)
    assert guard_bytes(mac) == 0
    assert guard_bytes(MachineMemory(most + MIB, most, "metal", outside=physical_gb * GB - most - MIB)) > 0
    assert largest_wired_limit_mb(4 * GB) == 0


@pytest.mark.parametrize("gb", [-1.0, math.nan, math.inf])
def test_a_value_that_is_not_a_number_of_gb_is_refused_by_its_flag(gb: float) -> None:
    with pytest.raises(ConfigError, match="--memory-guard-gb"):
        guard_bytes(MACHINE, gb)
    with pytest.raises(ConfigError, match="--kv-cache-gb"):
        serving_budget(MACHINE, 0, gb, None, minimum_kv=1)
    with pytest.raises(ConfigError, match="--prefix-cache-gb"):
        serving_budget(MACHINE, 0, None, gb, minimum_kv=1)


def test_an_exact_fit_passes_and_one_byte_more_is_refused_with_all_numbers() -> None:
    check_fits("A model", 35 * GB, MACHINE, 5 * GB)
    with pytest.raises(MemoryShortage) as raised:
        check_fits("A model", 35 * GB + 1, MACHINE, 5 * GB)
    for part in ("A model needs 35.00 GiB", "available 40.00 GiB", "64.00 GiB physical", "5.00 GiB free",
                 "--memory-guard-gb"):  # fmt: skip
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        (MACHINE, ["GiB physical", "Close other programs, choose"]),
        (MAC, ["107.00 GiB that macOS lets the GPU use", "more (`sudo sysctl iogpu.wired_limit_mb=117964`), choose"]),
        (replace(MAC, total=120 * GB, outside=8 * GB), ["120.00 GiB that macOS", "Use more machines, choose"]),
        (GPU, ["24.00 GiB of the GPU", "End other programs on the GPU (`nvidia-smi` lists them), choose"]),
    ],
)  # fmt: skip
def test_a_refusal_says_whose_memory_it_is_and_how_to_make_room(machine: MachineMemory, parts: list[str]) -> None:
    with pytest.raises(MemoryShortage) as raised:
        check_fits("A model", 200 * GB, machine, 0)
    assert [part for part in parts if part not in str(raised.value)] == []


# -- the machine -----------------------------------------------------------------------------------------------------


def test_a_machine_without_control_groups_has_the_systems_numbers() -> None:
    machine = read_machine(NOWHERE, NOWHERE)
    assert machine.total == psutil.virtual_memory().total
    assert 0 < machine.available <= machine.total


def test_this_process_has_a_size() -> None:
    assert 1 << 20 < process_rss() < read_machine(NOWHERE, NOWHERE).total


def group(folder: Path, version: int, limit: str, usage: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    total = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{total}inactive_file {inactive}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_instead_of_the_hosts_memory(version: int, tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/a/b\n1:cpu:/\n" if version == 1 else "0::/a/b\n")
    root = tmp_path / ("mount/memory" if version == 1 else "mount")
    group(root / "a", version, str(64 * MIB), usage=50 * MIB, inactive=20 * MIB)
    group(root / "a/b", version, "max" if version == 2 else str(2**63 - 4096), usage=10 * MIB, inactive=0)
    assert read_machine(membership, tmp_path / "mount") == MachineMemory(total=64 * MIB, available=34 * MIB)
    group(root / "a/b", version, str(32 * MIB), usage=40 * MIB, inactive=0)
    assert read_machine(membership, tmp_path / "mount") == MachineMemory(total=32 * MIB, available=0)


def test_inside_a_container_the_own_group_is_the_root_of_the_mount(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/../../host/path\n")
    group(tmp_path / "mount", 2, str(16 * MIB), usage=MIB, inactive=0)
    assert read_machine(tmp_path / "cgroup", tmp_path / "mount") == MachineMemory(16 * MIB, 15 * MIB)


def test_unreadable_limits_are_no_limits(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    group(tmp_path / "mount", 2, "what", usage=1, inactive=0)
    (tmp_path / "mount/memory.current").unlink()
    assert read_machine(tmp_path / "cgroup", tmp_path / "mount").total == psutil.virtual_memory().total


# -- budgets ---------------------------------------------------------------------------------------------------------

gigabytes = st.none() | st.floats(0, 40)


@given(kv=gigabytes, prefix=gigabytes, guard=st.integers(0, 50 * GB), minimum=st.integers(1, 10 * GB))
def test_budgets_never_cross_the_guard_and_obey_the_user(
    kv: float | None, prefix: float | None, guard: int, minimum: int
) -> None:
    free = max(0, MACHINE.available - guard)
    asked = int((kv or 0) * GB) + int((prefix or 0) * GB)
    try:
        budget = serving_budget(MACHINE, guard, kv, prefix, minimum_kv=minimum)
    except MemoryShortage:
        default = min(int(free * 0.6), free - int((prefix or 0) * GB))
        smallest = int(kv * GB) if kv is not None else default
        assert asked > free or minimum > smallest
        return
    assert budget.kv + budget.prefix <= free
    assert budget.kv >= minimum
    assert kv is None or budget.kv == int(kv * GB)
    assert prefix is None or budget.prefix == int(prefix * GB)


def test_the_default_split_is_60_and_20_percent_and_yields_to_a_choice() -> None:
    free = 35 * GB
    default = serving_budget(MACHINE, 5 * GB, None, None, minimum_kv=1)
    assert (default.kv, default.prefix) == (int(free * 0.6), int(free * 0.2))
    assert serving_budget(MACHINE, 5 * GB, 34.0, None, minimum_kv=1).prefix == GB
    assert serving_budget(MACHINE, 5 * GB, None, 30.0, minimum_kv=1).kv == 5 * GB
    assert serving_budget(MACHINE, 5 * GB, None, 0.0, minimum_kv=1).prefix == 0


def test_logits_get_a_twentieth_and_always_enough_for_one_token() -> None:
    """A verification has rows x (k + 1) of them, each a vocabulary wide (A7, B2)."""
    budget = serving_budget(MACHINE, MACHINE.available - 4 * GB, None, None, minimum_kv=1)
    assert budget.logits == int(4 * GB * 0.05)
    assert budget.kv + budget.prefix + budget.logits <= 4 * GB
    tokens = budget.max_logits(151_936)
    assert 16 * tokens * 151_936 <= budget.logits < 16 * (tokens + 1) * 151_936
    assert serving_budget(MACHINE, 0, None, None, minimum_kv=1).logits == GB
    assert serving_budget(MACHINE, MACHINE.available, 0.0, 0.0, minimum_kv=0).max_logits(151_936) == 1
    assert budget.max_logits(0) > 0


def test_a_budget_below_one_row_names_the_flag() -> None:
    with pytest.raises(MemoryShortage, match="--kv-cache-gb"):
        serving_budget(MACHINE, 5 * GB, 1.0, None, minimum_kv=2 * GB)


# -- groups ----------------------------------------------------------------------------------------------------------


def prediction(host: str, rank: int, **sizes: int) -> Prediction:
    usual = {"weights": 10, "working": 2, "kv": 4, "guard": 5, "available": 20, "total": 32}
    values = {name: size * GB for name, size in {**usual, **sizes}.items()}
    machine = MachineMemory(values.pop("total"), values.pop("available"))
    return Prediction(host, rank, machine=machine, **values)


def on(machine: MachineMemory, rank: int, host: str = "box") -> Prediction:
    return Prediction(host, rank, weights=15 * GB, working=GB, kv=GB, guard=guard_bytes(machine), machine=machine)


def test_a_rank_needs_its_weights_and_the_larger_of_working_and_kv_memory() -> None:
    assert prediction("a", 0).needed == 14 * GB
    assert prediction("a", 0, working=6).needed == 16 * GB


def test_ranks_of_one_machine_share_it() -> None:
    check_group("m", [prediction("a", 0), prediction("b", 1)])
    check_group("m", [prediction("a", 0, available=33), prediction("a", 1, available=33)])
    with pytest.raises(MemoryShortage, match=r"a lacks 13\.00 GiB"):
        check_group("m", [prediction("a", 0), prediction("a", 1)])


def test_a_refusal_names_the_short_machines_and_shows_all_ranks() -> None:
    ranks = [prediction("big", 1), prediction("small", 0, available=18), prediction("tiny", 2, guard=19)]
    with pytest.raises(MemoryShortage) as refused:
        check_group("the model", ranks)
    text = str(refused.value)
    assert "the model does not fit: small lacks 1.00 GiB, tiny lacks 13.00 GiB." in text
    assert "--memory-guard-gb" in text
    table = prediction_table(ranks).splitlines()
    assert [line.split()[:3] for line in table[:4]] == [
        ["host", "rank", "weights"], ["small", "0", "10.00"], ["big", "1", "10.00"], ["tiny", "2", "10.00"],
    ]  # fmt: skip
    assert len({len(line) for line in table[:4]}) == 1
    assert all(line in text for line in table)


def test_where_only_the_cache_is_too_large_the_refusal_names_one_that_fits() -> None:
    ranks = [prediction("a", 0, kv=500), prediction("b", 1, kv=500, available=23, working=1)]
    with pytest.raises(MemoryShortage) as refused:
        check_group("m", ranks)
    assert refused.value.remedy.startswith("--kv-cache-gb 5 fits. Close other programs")
    check_group("m", [replace(rank, kv=5 * GB) for rank in ranks])
    shared = [prediction("a", rank, kv=500, available=40) for rank in (0, 1)]
    with pytest.raises(MemoryShortage, match=r"--kv-cache-gb 7\.5 fits"):
        check_group("m", shared)
    with pytest.raises(MemoryShortage) as refused:
        check_group("m", [prediction("a", 0, kv=500), prediction("b", 1, kv=500, available=9)])
    assert "--kv-cache-gb" not in refused.value.remedy


def test_ranks_on_gpus_of_their_own_share_nothing() -> None:
    other = replace(GPU, device="GPU-2")
    ranks = [on(GPU, 0), on(other, 1)]
    check_group("m", ranks)
    assert [ranks_beside(ranks, rank) for rank in (0, 1)] == [1, 1]
    with pytest.raises(MemoryShortage, match=r"box lacks 11\.40 GiB"):
        check_group("m", [on(GPU, 0), on(GPU, 1)])
    crowded = [on(GPU, 0), on(other, 1), on(GPU, 2)]
    assert [ranks_beside(crowded, rank) for rank in (0, 1, 2)] == [2, 1, 2]


def test_a_table_of_memory_fits_a_narrow_terminal() -> None:
    ranks = [on(GPU, 0, "studio"), on(of(64 * GB), 1, "box")]
    assert max(map(len, prediction_table(ranks).splitlines()[:-1])) <= 58  # two more are for an error's indent


def test_a_refusal_says_on_which_machine_to_do_what() -> None:
    mac, gpu = replace(MAC, total=12 * GB, available=12 * GB), replace(GPU, available=GB)
    with pytest.raises(MemoryShortage) as refused:
        check_group("m", [on(mac, 0, "studio"), on(gpu, 1, "box"), on(of(10 * GB), 2, "a"), on(of(10 * GB), 3, "b")])
    assert refused.value.remedy.startswith(
        "Let the GPU use more (`sudo sysctl iogpu.wired_limit_mb=28672`) on studio. End other programs on the GPU "
        "(`nvidia-smi` lists them) on box. Close other programs on a and b. Use more machines"
    )
    assert [line.split()[-2:] for line in refused.value.message.splitlines()[2:6]] == [
        ["GPU's", "part"], ["24.00", "GPU's"], ["10.00", "host's"], ["10.00", "host's"],
    ]  # fmt: skip
