"""Where a rank's libraries write files, and load compiled code from."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest

from phalanx.engine.rank_directories import COMPILED_VARIABLE, own_directories
from phalanx.environment import own_cache
from phalanx.errors import ModelError
from phalanx.model.loading import smollm2
from phalanx.private_files import why_not_private


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user with a home directory and no variables, as when another launcher starts a rank. All is put back."""
    for name in ("TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", COMPILED_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield


def test_a_rank_makes_a_temporary_directory_where_there_is_none_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    (planted / "mlx").mkdir(parents=True)
    planted.chmod(0o777)
    for given in (None, str(planted)):
        if given is not None:
            monkeypatch.setenv("TMPDIR", given)
        with own_directories():
            made = Path(os.environ["TMPDIR"])
            assert not why_not_private(made) and made.parent == Path("/tmp")
            assert len(str(made)) < 60, "room for sockets"
        assert not made.exists()
    assert [*planted.iterdir()] == [planted / "mlx"]


def test_the_one_that_a_server_or_an_agent_gave_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as given:  # of mode 0700
        monkeypatch.setenv("TMPDIR", given)
        with own_directories():
            assert os.environ["TMPDIR"] == given
        assert Path(given).exists()


def test_without_cuda_nothing_is_cached(tmp_path: Path) -> None:
    with own_directories():
        assert COMPILED_VARIABLE not in os.environ
    assert not [*tmp_path.iterdir()]


def test_compiled_kernels_stay_in_a_cache_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    with own_directories():
        kept = Path(os.environ[COMPILED_VARIABLE])
    assert kept == tmp_path / ".cache" / "phalanx" / f"mlx-{version('mlx')}-sm_90"
    assert not why_not_private(kept.parent)

    monkeypatch.delenv(COMPILED_VARIABLE)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_120"})
    with own_directories():
        assert Path(os.environ[COMPILED_VARIABLE]) not in (kept, kept.parent), "MLX tells kinds of GPUs not apart"

    monkeypatch.setenv(COMPILED_VARIABLE, "/of/the/user")
    with own_directories():
        assert os.environ[COMPILED_VARIABLE] == "/of/the/user"

    monkeypatch.delenv(COMPILED_VARIABLE)
    kept.parent.chmod(0o777)  # planted
    with caplog.at_level(logging.WARNING), own_directories():
        assert COMPILED_VARIABLE not in os.environ, "then MLX compiles into the temporary directory, which is private"
        assert not why_not_private(Path(os.environ["TMPDIR"]))
    assert "MLX compiles its kernels at every start" in caplog.text and "others may enter it" in caplog.text


def test_a_model_in_the_cache_leaves_it_to_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> Path:
        raise ModelError("no network")

    monkeypatch.setattr(smollm2, "fetch_gguf", refuse)
    with pytest.raises(ModelError, match="no network"):
        smollm2.fetch()
    assert [file.name for file in own_cache().iterdir()] == [".smollm2.lock"]
