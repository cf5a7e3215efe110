"""The memory that counts on each kind of device, and what is wired; Metal and CUDA by stand-ins for MLX's answers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest

from phalanx import memory
from phalanx.errors import ConfigError
from phalanx.memory import GB, MachineMemory
from phalanx.model import device_memory
from phalanx.model.device_memory import read_memory, wire

M3_ULTRA = {
    "device_name": "Apple M3 Ultra", "architecture": "applegpu_g15d", "memory_size": 128 * GB,
    "max_recommended_working_set_size": 107 * GB, "max_buffer_length": 60 * GB, "resource_limit": 499000,
}  # fmt: skip
H100 = {
    "device_name": "NVIDIA H100", "architecture": "sm_90", "uuid": "GPU-0a", "free_memory": 70 * GB,
    "total_memory": 80 * GB, "pci_bus_id": "0000:01:00.0", "compute_capability_major": 9,
}  # fmt: skip
HOST = MachineMemory(total=64 * GB, available=50 * GB)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process look as if MLX computed on another device. Returns the wired limits that are set."""

    def become(info: dict[str, Any], *, metal: bool, active: int = 0, cached: int = 0) -> list[int]:
        wired: list[int] = []
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: info)
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        monkeypatch.setattr(mx, "get_active_memory", lambda: active)
        monkeypatch.setattr(mx, "get_cache_memory", lambda: cached)
        monkeypatch.setattr(mx, "set_wired_limit", wired.append)
        monkeypatch.setattr(memory, "read_machine", lambda: HOST)
        return wired

    return become


def test_on_a_cpu_the_hosts_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(memory, "read_machine", lambda: HOST)
    assert read_memory() == read_memory(4) == HOST


def test_on_metal_the_gpus_part_counts_and_not_what_the_page_cache_left(device: Any) -> None:
    device(M3_ULTRA, metal=True, active=40 * GB)
    assert read_memory() == MachineMemory(107 * GB, 67 * GB, "metal", outside=21 * GB)
    assert read_memory(2).available == 27 * GB  # another rank holds as much
    assert read_memory(3).available == 0


def test_on_cuda_the_devices_own_memory_counts(device: Any) -> None:
    """MLX's cache counts as used for CUDA, but it is this process's to use."""
    device(H100, metal=False, active=3 * GB, cached=2 * GB)
    assert read_memory() == read_memory(8) == MachineMemory(80 * GB, 72 * GB, "cuda", device="GPU-0a")


def test_a_gpu_without_memory_of_its_own_has_the_hosts(device: Any) -> None:
    device({**H100, "device_name": "NVIDIA GB10", "free_memory": GB}, metal=False)
    assert read_memory() == HOST


@pytest.mark.parametrize(("info", "metal"), [(M3_ULTRA, True), (H100, False)])
def test_a_number_that_is_missing_is_named(info: dict[str, Any], metal: bool, device: Any) -> None:
    for name in ("max_recommended_working_set_size", "memory_size") if metal else ("free_memory", "total_memory"):
        device({**info, name: 0}, metal=metal)
        with pytest.raises(ConfigError, match=f"{name} is 0 .*{info['device_name']}"):
            read_memory()


# -- wired memory ----------------------------------------------------------------------------------------------------


def test_on_metal_weights_are_wired_up_to_the_gpus_part(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wired = device(M3_ULTRA, metal=True)
    wire(True)
    wire(True, 2)
    assert wired == [107 * GB, 107 * GB // 2]
    assert "107.00 GiB" in caplog.text and "--no-wired-limit" in caplog.text


def test_the_flag_leaves_paging_to_macos_and_says_so(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    wired = device(M3_ULTRA, metal=True)
    wire(False)
    assert wired == [] and "not wired (--no-wired-limit)" in caplog.text


def test_a_limit_that_mlx_refuses_does_not_end_the_start(
    device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(limit: int) -> None:
        raise ValueError("[metal::set_wired_limit] larger than the system's")

    device(M3_ULTRA, metal=True)
    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    wire(True)
    assert "not wired" in caplog.text and "larger than the system's" in caplog.text


def test_elsewhere_nothing_is_wired(
    device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wired = device(H100, metal=False)
    for wanted in (True, False):
        wire(wanted)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    wire(True)
    assert wired == [] and caplog.text == ""


def test_programs_without_mlx_read_the_same_numbers() -> None:
    said = subprocess.run(
        [sys.executable, "-P", "-m", device_memory.__name__], capture_output=True, text=True, check=True, timeout=400
    )
    found, here = json.loads(said.stdout), read_memory()
    assert (found["total"], found["kind"], found["device"]) == (here.total, here.kind, here.device)
