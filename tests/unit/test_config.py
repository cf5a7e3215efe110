"""Environment variables and the settings' defaults."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

import msgspec
import pytest

from phalanx import environment
from phalanx.config import EngineConfig
from phalanx.environment import (
    api_key_from_environment,
    child_environment,
    memory_guard_override_gb,
    own_cache,
    runtime_dir,
)
from phalanx.errors import ConfigError
from phalanx.server.settings.server_settings import ServerConfig


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


def test_runtime_dir_is_the_first_that_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert str(runtime_dir()) == "/tmp"
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert str(runtime_dir()) == "/var/tmp"
    own = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    assert runtime_dir() == own
    own.rmdir()
    assert str(runtime_dir()) == "/var/tmp"  # it is gone
    file, long = tmp_path / "file", tmp_path / ("l" * 100)
    file.touch()
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(file))
    monkeypatch.setenv("TMPDIR", str(long))
    assert str(runtime_dir()) == "/tmp"


def test_a_runtime_dir_in_which_others_may_rename_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after `su`, which leaves the other user's XDG_RUNTIME_DIR set."""
    planted = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(planted))
        assert runtime_dir() == planted
        planted.chmod(0o777)
        assert str(runtime_dir()) == "/tmp"
        planted.chmod(0o1777)  # as /tmp: each may rename what is his own
        assert runtime_dir() == planted
        planted.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(planted, 65534, 65534)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 0)
            monkeypatch.setattr(os, "access", lambda *_: True)  # as for root
        assert str(runtime_dir()) == "/tmp", "another user's"
        monkeypatch.setattr(environment, "LAST_RESORT", str(tmp_path / "gone"))
        with pytest.raises(ConfigError, match=rf"{planted} is another user's, or others may rename what lies there"):
            runtime_dir()
    finally:
        planted.rmdir()


def test_the_cache_is_a_directory_of_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cache = own_cache()
    assert cache == tmp_path / ".cache" / "phalanx" == own_cache() and cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert own_cache() == tmp_path / "other" / "phalanx"
    own_cache().chmod(0o777)
    with pytest.raises(ConfigError, match="other/phalanx is not used: others may enter it"):
        own_cache()
    linked = tmp_path / "links" / "phalanx"
    linked.parent.mkdir()
    linked.symlink_to(cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "links"))
    with pytest.raises(ConfigError, match="links/phalanx is not used: it is a link"):
        own_cache()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="There is no directory for caches"):
        own_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    foreign = tmp_path / "other" / "phalanx"
    foreign.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: foreign.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="other/phalanx is not used: it belongs to another user"):
        own_cache()


def test_on_macos_state_lies_in_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """macOS empties both temporary directories of what lies unread for three days, and servers run for weeks."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    library = tmp_path / "Library" / "Application Support" / "phalanx"
    monkeypatch.setattr(environment, "SOCKET_PATH", len(str(library)) + environment.SOCKET_NAME)
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert runtime_dir() == library
    assert library.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(environment, "SOCKET_PATH", environment.SOCKET_PATH - 1)
    assert str(runtime_dir()) == "/var/tmp", "a long name of a user leaves no room for sockets"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert str(runtime_dir()) == "/tmp"


def test_runtime_dir_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="/nonexistent is not a directory, /tmp may not be written to"):
        runtime_dir()


def test_children_get_no_keys_and_no_place_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PHALANX_API_KEY", "MLX_RANK", "MLX_HOSTFILE", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "NCCL_PORT"):
        monkeypatch.setenv(name, "1")
    kept = {"PHALANX_CPU_KERNELS": "0", "OMPI_MCA_btl": "tcp", "NCCL_DEBUG": "INFO", "MLX_METAL_FAST_SYNCH": "1"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    children = child_environment()
    assert kept.items() <= children.items()
    assert not {
        "PHALANX_API_KEY",
        "MLX_RANK",
        "MLX_HOSTFILE",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_NAMESPACE",
        "NCCL_PORT",
    } & set(children)
