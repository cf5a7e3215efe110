"""Environment variables and the settings' defaults."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.config import (
    EngineConfig,
    ServerConfig,
    api_key_from_environment,
    memory_guard_override_gb,
    runtime_dir,
)
from phalanx.errors import ConfigError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_MEMORY_GUARD_GB", "MLX_MEMORY_GUARD_GB", "PHALANX_API_KEY", "XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def test_settings_survive_the_command_line_of_a_rank() -> None:
    config = EngineConfig(model="demo", max_num_seqs=3, prefix_cache_gb=0.0, dtype="float16", trace="plans.jsonl")
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_the_server_binds_loopback_unless_told_otherwise() -> None:
    assert ServerConfig(engine=EngineConfig(model="demo")).host == "127.0.0.1"


def test_no_guard_override_by_default() -> None:
    assert memory_guard_override_gb() is None


@pytest.mark.parametrize(("text", "gb"), [("5", 5.0), ("0", 0.0), ("0.5", 0.5)])
def test_guard_override(monkeypatch: pytest.MonkeyPatch, text: str, gb: float) -> None:
    monkeypatch.setenv("MLX_MEMORY_GUARD_GB", text)
    assert memory_guard_override_gb() == gb


def test_our_name_wins_and_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MEMORY_GUARD_GB", "7")
    monkeypatch.setenv("PHALANX_MEMORY_GUARD_GB", "")
    assert memory_guard_override_gb() == 7.0
    monkeypatch.setenv("PHALANX_MEMORY_GUARD_GB", "3")
    assert memory_guard_override_gb() == 3.0


@pytest.mark.parametrize("text", ["five", "-1", "nan", "inf"])
def test_a_bad_guard_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PHALANX_MEMORY_GUARD_GB", text)
    with pytest.raises(ConfigError, match=f"PHALANX_MEMORY_GUARD_GB='{text}'"):
        memory_guard_override_gb()


def test_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key_from_environment() is None
    monkeypatch.setenv("PHALANX_API_KEY", "")
    assert api_key_from_environment() is None
    monkeypatch.setenv("PHALANX_API_KEY", "secret")
    assert api_key_from_environment() == "secret"


def test_runtime_dir_prefers_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(runtime_dir()) == "/tmp"
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert str(runtime_dir()) == "/var/tmp"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert str(runtime_dir()) == "/run/user/1"
